"""What each step computes. The fake model checks that plans and blocks make sense; blocks of four tokens."""

import pytest
from helpers.fake_model import next_token, run_alone
from helpers.scheduling import ScheduledModel, make_request, prompt, shares

from workers.errors import InvalidRequestError, QueueFullError, RequestFailedError
from workers.plan import ModelOutput
from workers.request import FinishReason, RequestId, TokenLogprobs
from workers.sequence import SequenceStatus

# One request


def test_request_gets_the_tokens_of_the_model_alone() -> None:
    served = ScheduledModel()
    request = make_request("a", prompt(10), max_tokens=20)
    served.add(request)

    served.run()

    assert served.tokens["a"] == run_alone(request)
    assert served.ends["a"] is FinishReason.LENGTH
    assert served.cache.num_free_blocks == served.cache.num_blocks


def test_plan_tells_only_what_changed() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(4), max_tokens=3)

    first = served.launch()
    (output,) = served.collect()
    second = served.launch()
    served.collect()
    third = served.launch()

    assert first is not None
    assert second is not None
    assert third is not None
    assert [new.token_ids for new in first.new] == [prompt(4)]
    assert first.scheduled[0].learnt == []
    assert len(first.scheduled[0].new_blocks) == 1
    assert second.new == []
    assert second.scheduled[0].learnt == [output.token_id]
    assert len(second.scheduled[0].new_blocks) == 1  # the fifth token begins a block
    assert third.scheduled[0].new_blocks == []
    assert [plan.number for plan in (first, second, third)] == [0, 1, 2]


def test_each_token_comes_with_its_log_probabilities_and_the_last_one_too() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(4), max_tokens=1)
    served.submit("b", prompt(4, first=9), max_tokens=1)
    plan = served.scheduler.schedule(0.0)
    assert plan is not None
    of_second = TokenLogprobs(token_id=6, logprob=-0.5, top=())
    output = ModelOutput(plan.number, [0, 1], [5, 6], {1: of_second})
    tokens = served.scheduler.update(plan, output, 0.0)
    assert [(token.token_id, token.logprobs) for token in tokens] == [(5, None), (6, of_second)]
    assert all(token.finish is not None for token in tokens)


def test_a_plan_tells_whether_there_was_work_ever_since_the_one_before() -> None:
    served = ScheduledModel()

    def follows() -> bool:
        plan = served.launch()
        assert plan is not None
        served.collect()
        return plan.follows

    served.submit("a", prompt(4), max_tokens=2)
    assert [follows(), follows()] == [False, True]
    assert not served.scheduler.has_unfinished
    served.submit("b", prompt(4), max_tokens=1)
    served.submit("c", prompt(4), max_tokens=2)
    assert [follows(), follows()] == [False, True], "b has ended, c has not"
    served.submit("d", prompt(4), max_tokens=9)
    served.submit("e", prompt(4), max_tokens=9)
    served.submit("ends before any plan", prompt(4), max_tokens=9)
    served.scheduler.abort(RequestId("ends before any plan"), 0.0)
    assert follows() is False, "it was empty"
    served.scheduler.abort(RequestId("d"), 0.0)
    served.submit("f", prompt(4), max_tokens=9)
    assert follows() is True


def test_slot_of_a_finished_sequence_is_given_back_and_refilled_in_the_next_step() -> None:
    served = ScheduledModel(max_num_seqs=1)
    served.submit("a", prompt(4), max_tokens=1)
    served.submit("b", prompt(5, first=50), max_tokens=1)

    served.step()
    plan = served.launch()

    assert plan is not None
    assert plan.removed == [0]
    assert [new.slot for new in plan.new] == [0]


def test_plan_does_not_alias_the_sequence() -> None:
    served = ScheduledModel()
    sequence = served.submit("a", prompt(4), max_tokens=4)
    plan = served.launch()
    served.collect()

    assert plan is not None
    assert plan.new[0].token_ids == prompt(4)
    assert sequence.num_tokens == 5


def test_nothing_to_do_gives_no_plan() -> None:
    served = ScheduledModel()

    assert served.launch() is None
    assert not served.scheduler.has_unfinished


# How a request ends


def test_end_of_sequence_stops_and_names_the_token() -> None:
    served = ScheduledModel(eos_token_ids=frozenset([next_token(prompt(6))]))
    sequence = served.submit("a", prompt(6), max_tokens=9)

    (output,) = served.step()

    assert output.finish is not None
    assert output.finish is sequence.finish
    assert output.finish.reason is FinishReason.STOP
    assert output.finish.stop_token_id == output.token_id == next_token(prompt(6))
    assert served.tokens["a"] == [output.token_id]


def test_ignored_end_of_sequence_goes_on() -> None:
    served = ScheduledModel(eos_token_ids=frozenset([next_token(prompt(6))]))
    served.submit("a", prompt(6), max_tokens=3, ignore_eos=True)

    served.run()

    assert served.ends["a"] is FinishReason.LENGTH
    assert len(served.tokens["a"]) == 3


def test_own_stop_token_ends_even_when_end_of_sequence_is_ignored() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(6), max_tokens=3, ignore_eos=True, stop_token_ids=(next_token(prompt(6)),))

    served.run()

    assert served.ends["a"] is FinishReason.STOP


def test_stop_token_counts_after_min_tokens_others() -> None:
    first = next_token(prompt(6))
    second = next_token([*prompt(6), first])
    served = ScheduledModel(eos_token_ids=frozenset([first, second]))
    served.submit("a", prompt(6), max_tokens=5, min_tokens=1)

    served.run()

    assert served.tokens["a"] == [first, second]
    assert served.ends["a"] is FinishReason.STOP


def test_ranks_are_told_which_tokens_stop() -> None:
    served = ScheduledModel(eos_token_ids=frozenset([90, 91]))
    served.submit("a", prompt(3), stop_token_ids=(5,))
    served.submit("b", prompt(3), stop_token_ids=(5,), ignore_eos=True)

    plan = served.launch()

    assert plan is not None
    assert [new.stop_token_ids for new in plan.new] == [[5, 90, 91], [5]]


def test_context_end_is_length() -> None:
    served = ScheduledModel(max_context=12)
    sequence = served.submit("a", prompt(10), max_tokens=50)

    served.run()

    assert len(served.tokens["a"]) == 2
    assert sequence.finish is not None
    assert (sequence.finish.reason, sequence.finish.stop_token_id) == (FinishReason.LENGTH, None)


def test_sampling_error_fails_one_request_alone_and_is_not_cached() -> None:
    served = ScheduledModel()
    served.model.failing_prompts.add(tuple(prompt(9)))
    bad = served.submit("bad", prompt(9), max_tokens=4)
    served.submit("good", prompt(9, first=40), max_tokens=4)

    outputs = served.step()
    served.run()

    assert isinstance(outputs[0].error, RequestFailedError)
    assert outputs[0].token_id is None
    assert bad.finish is None
    assert bad.status is SequenceStatus.FINISHED
    assert served.ends == {"bad": "logits are not finite", "good": FinishReason.LENGTH}
    assert served.cache.match_prefix(served.submit("again", prompt(9))) == []


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_nothing_that_led_to_an_error_is_found_again(num_host_blocks: int) -> None:
    served = ScheduledModel(num_blocks=6, num_host_blocks=num_host_blocks, prefill_chunk_tokens=4)
    served.submit("good", prompt(9), max_tokens=1)
    served.run()
    if num_host_blocks:  # where what was found goes to, too
        served.submit("other", prompt(23, first=40), max_tokens=1)
        served.run()
    served.model.failing_prompts.add(tuple(prompt(13)))
    bad = served.submit("bad", prompt(13), max_tokens=4)
    served.run()

    assert (bad.num_cached_tokens, served.ends["bad"]) == (8, "logits are not finite")
    again = served.submit("again", prompt(9), max_tokens=1)
    assert served.cache.match_prefix(again) == [], "neither its chunks nor the prefix that it began with"
    served.run()
    assert served.tokens["again"] == served.tokens["good"]
    stored, evicted = served.pool.take_events()
    assert not set(stored) & set(evicted)
    assert set(served.pool.resident_hashes()) >= set(again.block_hashes[:2])


def test_engine_can_finish_a_sequence_at_a_stop_string() -> None:
    served = ScheduledModel()
    sequence = served.submit("a", prompt(6), max_tokens=9)
    served.step()

    finish = served.scheduler.finish(sequence, FinishReason.STOP, 2.5, stop_string="###")

    assert finish is sequence.finish
    assert (finish.reason, finish.stop_string) == (FinishReason.STOP, "###")
    assert finish.usage.completion_tokens == 1
    assert not served.scheduler.has_unfinished
    served.scheduler.check_integrity()


def test_requests_that_cannot_be_served_are_refused() -> None:
    served = ScheduledModel(num_blocks=4, max_context=40)
    served.submit("twice", prompt(3), max_tokens=4)

    for request, message in [
        (make_request("a", []), "the prompt has 0 tokens; allowed: at least 1"),
        (make_request("a", prompt(40)), "the prompt has 40 tokens; allowed: at most 39"),
        (
            make_request("a", prompt(30), generated=(5,) * 10, max_tokens=11),
            "prompt and output have 40 tokens; allowed: at most 39",
        ),
        (
            make_request("a", prompt(3), generated=(1, 2), max_tokens=2),
            "2 tokens are generated already; allowed: fewer",
        ),
        (make_request("a", prompt(10), max_tokens=8), "puts 17 tokens into the KV cache; allowed: 16"),
        (make_request("twice", prompt(3)), "'twice' is in use"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            served.scheduler.add(request, 0.0)
    assert served.scheduler.num_waiting == 1


def test_request_that_fills_the_pool_to_the_last_token_is_served() -> None:
    served = ScheduledModel(num_blocks=4)
    request = make_request("a", prompt(10), max_tokens=7)  # 17 tokens; the last is not computed
    served.add(request)

    served.run()

    assert served.tokens["a"] == run_alone(request)


def test_queue_has_a_bound() -> None:
    served = ScheduledModel(max_waiting=2)
    for name in "ab":
        served.submit(name, prompt(3))

    with pytest.raises(QueueFullError, match="2 requests wait; allowed: 2"):
        served.submit("c", prompt(3))
    served.step()
    served.submit("c", prompt(3))


def test_request_continues_with_tokens_from_elsewhere() -> None:
    whole = make_request("a", prompt(10), max_tokens=12)
    expected = run_alone(whole)
    served = ScheduledModel()
    rest = make_request("a", prompt(10), generated=tuple(expected[:5]), max_tokens=12)
    sequence = served.add(rest)

    served.run()

    assert served.tokens["a"] == expected
    assert sequence.finish is not None
    assert sequence.finish.usage.completion_tokens == 12


def test_continued_request_goes_before_new_ones() -> None:
    served = ScheduledModel(max_num_seqs=1)
    served.submit("new", prompt(4))
    moved = served.submit("moved", prompt(4, first=50), generated=(3,))

    served.step()

    assert moved.status is SequenceStatus.RUNNING
    assert served.scheduler.num_waiting == 1


# Chunks and budget


def test_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    served = ScheduledModel(max_num_batched_tokens=16)
    served.submit("a", prompt(40), max_tokens=2)

    plans = []
    for _ in range(4):
        plans.append(shares(served.launch()))
        served.collect()

    assert plans == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8)], [(0, 40, 1)]]


def test_chunk_limit_leaves_budget_to_others() -> None:
    served = ScheduledModel(max_num_batched_tokens=20, prefill_chunk_tokens=8)
    served.submit("a", prompt(30))
    served.submit("b", prompt(6, first=50))
    served.submit("c", prompt(30, first=60))

    assert [num_tokens for _, _, num_tokens in shares(served.launch())] == [8, 6, 6]


def test_none_starts_in_a_step_that_has_no_token_left_for_it() -> None:
    served = ScheduledModel(max_num_batched_tokens=8)
    served.submit("a", prompt(8))
    waiting = served.submit("b", prompt(8, first=50))

    assert shares(served.launch()) == [(0, 0, 8)]
    assert waiting.status is SequenceStatus.WAITING


def test_decodes_are_served_before_prefills_and_never_wait_for_them() -> None:
    served = ScheduledModel(max_num_batched_tokens=8)
    served.submit("short", prompt(4), max_tokens=30)
    served.step()
    served.submit("long", prompt(60, first=100), max_tokens=2)

    for _ in range(8):
        plan = served.launch()
        assert [num_tokens for _, _, num_tokens in shares(plan)] == [1, 7]
        served.collect()

    assert len(served.tokens["short"]) == 9


@pytest.mark.parametrize(("first", "second"), [(5, 3), (2, 2)])
def test_one_token_shares_come_first_in_the_plan(first: int, second: int) -> None:
    served = ScheduledModel(max_num_batched_tokens=first + second + 1, max_num_seqs=4)
    served.submit("a", prompt(first))
    served.submit("b", prompt(second, first=30))
    served.submit("c", prompt(9, first=60))

    planned = [(slot, num_tokens) for slot, _, num_tokens in shares(served.launch())]
    assert planned == [(2, 1), (0, first), (1, second)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, None])
def test_chunk_size_does_not_change_tokens(chunk: int | None) -> None:
    requests = [make_request(str(i), prompt(5 + 9 * i, first=10 * i), max_tokens=10) for i in range(4)]
    served = ScheduledModel(prefill_chunk_tokens=chunk)
    for request in requests:
        served.add(request)

    served.run()

    assert served.tokens == {request.request_id: run_alone(request) for request in requests}


def test_no_more_sequences_run_than_there_are_slots() -> None:
    served = ScheduledModel(max_num_seqs=2)
    for i in range(5):
        served.submit(str(i), prompt(4, first=10 * i), max_tokens=3)

    served.step()

    assert (served.scheduler.num_running, served.scheduler.num_waiting) == (2, 3)
    served.run()
    assert len(served.ends) == 5


# Prefix cache


def test_second_request_computes_only_what_is_not_cached() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(18), max_tokens=1)
    served.run()
    before = served.model.num_computed_tokens

    sequence = served.submit("b", prompt(18), max_tokens=1)
    served.run()

    assert served.model.num_computed_tokens - before == 18 % 4
    assert sequence.num_cached_tokens == 16
    assert sequence.finish is not None
    assert sequence.finish.usage.cached_tokens == 16
    assert served.tokens["a"] == served.tokens["b"]
    assert served.scheduler.counters.num_prompt_tokens == 36
    assert served.scheduler.counters.num_cached_tokens == 16


def test_running_sequences_share_their_prefix() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(18), max_tokens=30)
    served.step()
    served.submit("b", [*prompt(18), 90, 91], max_tokens=30)
    served.step()

    assert served.cache.num_blocks - served.cache.num_free_blocks == 5 + 1
    served.run()
    assert served.cache.num_free_blocks == served.cache.num_blocks


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    served = ScheduledModel()
    sequences = [served.submit(str(i), [*prompt(17), 50 + i], max_tokens=5) for i in range(3)]

    plan = served.launch()
    served.run()

    assert shares(plan) == [(0, 0, 18), (1, 16, 2), (2, 16, 2)]
    assert all(served.tokens[sequence.request_id] == run_alone(sequence.request) for sequence in sequences)


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_prompts_in_chunks_compute_their_common_prefix_once(windows: tuple[int | None, ...]) -> None:
    served = ScheduledModel(num_blocks=200, max_context=200, prefill_chunk_tokens=8, windows=windows)
    sequences = [served.submit(str(i), [*prompt(60), 60 + i], max_tokens=3) for i in range(4)]

    plan = served.launch()
    assert shares(plan) == [(0, 0, 8), (1, 8, 8), (2, 16, 8), (3, 24, 8)]
    served.collect()
    plan = served.launch()
    served.run()

    assert plan is not None
    assert shares(plan) == [(0, 32, 8), (1, 40, 8), (2, 48, 8), (3, 56, 5)]
    assert [new.slot for new in plan.new] == plan.removed == [0, 1, 2, 3], "each starts anew in its slot"
    assert served.model.num_computed_tokens == 60 + 4 + 4 * 2
    assert all(served.tokens[sequence.request_id] == run_alone(sequence.request) for sequence in sequences)
    cached = [sequence.finish.usage.cached_tokens for sequence in sequences if sequence.finish]
    assert cached == [44, 44, 44, 48], "of the prefix each computed 16, the last one 12"
    assert served.scheduler.counters.num_cached_tokens == sum(cached)


def test_what_a_sequence_skips_is_cached_unless_it_may_have_computed_it_before() -> None:
    served = ScheduledModel(num_blocks=200, max_context=200, prefill_chunk_tokens=8)
    first, second = (served.submit(name, prompt(60), max_tokens=1) for name in "ab")
    served.step()
    first.num_host_tokens = 4  # of what it began with
    second.num_preemptions = 1
    served.run()

    assert (first.num_cached_tokens, second.num_cached_tokens) == (8 + 8 + 8, 8)
    assert served.scheduler.counters.num_cached_tokens == 24 + 8
    assert served.scheduler.counters.num_host_tokens == 0


def test_prefix_of_a_sequence_that_failed_in_the_same_step_is_not_found_again() -> None:
    served = ScheduledModel()
    served.model.failing_prompts.add(tuple(prompt(9)))
    served.submit("bad", prompt(9))
    good = served.submit("good", [*prompt(8), 50], max_tokens=4)
    served.step()

    assert served.cache.match_prefix(served.submit("again", [*prompt(8), 51])) == []
    served.run()
    assert served.tokens["good"] == run_alone(good.request)


def test_salts_are_not_shared() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(18), max_tokens=1, cache_salt="one")
    served.run()

    sequence = served.submit("b", prompt(18), max_tokens=1, cache_salt="two")
    served.run()

    assert sequence.num_cached_tokens == 0


def test_without_prefix_caching_everything_is_computed() -> None:
    served = ScheduledModel(enable_prefix_caching=False)
    for name in "ab":
        served.submit(name, prompt(18), max_tokens=1)
        served.run()

    assert served.model.num_computed_tokens == 36
    assert served.pool.resident_hashes() == []


def test_aborted_sequence_leaves_its_prefix_to_others() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(18), max_tokens=30)
    served.step()
    served.abort("a")

    sequence = served.submit("b", prompt(18), max_tokens=1)
    served.run()

    assert sequence.num_cached_tokens == 16


# Abort and deadline


def test_abort_frees_everything_at_once() -> None:
    served = ScheduledModel()
    sequence = served.submit("a", prompt(10), max_tokens=20)
    served.step()

    assert served.abort("a") is sequence
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.ABORT
    assert served.cache.num_free_blocks == served.cache.num_blocks
    assert not served.scheduler.has_unfinished
    assert served.scheduler.abort(RequestId("a"), 0.0) is None


def test_abort_of_a_waiting_request_takes_it_from_the_queue() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(10))
    served.submit("b", prompt(10))

    served.abort("a")
    served.run()

    assert served.ends == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}
    assert served.tokens["a"] == []


def test_abort_in_flight_keeps_blocks_until_the_step_returns() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(10), max_tokens=20)
    served.launch()

    served.abort("a")

    assert served.cache.num_free_blocks == served.cache.num_blocks - 3
    assert served.scheduler.has_unfinished
    served.scheduler.check_integrity()
    assert served.collect() == []
    assert served.cache.num_free_blocks == served.cache.num_blocks
    assert not served.scheduler.has_unfinished


def test_id_of_an_ended_request_can_be_used_again_while_its_step_is_in_flight() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(10), max_tokens=20)
    served.launch()
    served.scheduler.abort(RequestId("a"), 0.0)

    served.submit("a", prompt(6, first=50), max_tokens=3)
    served.run()

    assert len(served.tokens["a"]) == 3


def test_request_is_aborted_when_its_deadline_has_passed() -> None:
    served = ScheduledModel(max_num_seqs=1)
    served.submit("running", prompt(4), max_tokens=50, deadline_s=5.0)
    served.submit("waiting", prompt(4), max_tokens=50, deadline_s=3.0)
    served.submit("patient", prompt(4), max_tokens=2)
    served.step()

    served.now_s = 2.9
    served.step()
    assert served.ends == {}
    served.now_s = 3.0
    served.step()
    assert served.ends == {"waiting": FinishReason.ABORT}
    served.now_s = 100.0
    served.run()

    assert served.ends["running"] is FinishReason.ABORT
    assert served.ends["patient"] is FinishReason.LENGTH


def test_a_look_for_passed_deadlines_is_due_only_where_one_has_passed() -> None:
    served = ScheduledModel()
    for name, deadline_s in (("late", 9.0), ("early", 3.0), ("latest", 12.0), ("none", None)):
        served.submit(name, prompt(4), deadline_s=deadline_s)

    due = []
    for now_s in (2.9, 3.0, 8.9, 9.0, 12.0, 99.0):
        due.append(served.scheduler.has_expired(now_s))
        served.scheduler.expire(now_s)

    assert due == [False, True, False, True, True, False]


def test_deadline_in_flight_ends_the_request_now_and_frees_later() -> None:
    served = ScheduledModel()
    sequence = served.submit("a", prompt(10), max_tokens=20, deadline_s=1.0)
    served.launch()

    assert served.scheduler.expire(1.0) == [sequence]
    assert sequence.finish is not None
    assert served.cache.num_free_blocks < served.cache.num_blocks
    assert served.scheduler.expire(2.0) == []
    served.collect()
    assert served.cache.num_free_blocks == served.cache.num_blocks


# Times and load


def test_usage_divides_the_time_since_arrival() -> None:
    served = ScheduledModel(max_num_batched_tokens=8)
    served.now_s = 10.0
    sequence = served.submit("a", prompt(12), max_tokens=2)
    for now_s in (11.0, 13.0):  # two chunks, the second samples
        served.now_s = now_s
        served.launch()
        served.now_s = now_s + 0.5
        served.collect()
    served.now_s = 20.0
    served.step()

    assert sequence.finish is not None
    usage = sequence.finish.usage
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (1.0, 2.5, 6.5)
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 2)


def test_usage_of_a_request_that_never_ran_is_queue_time() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(12))

    sequence = served.scheduler.abort(RequestId("a"), 4.0)

    assert sequence is not None
    assert sequence.finish is not None
    usage = sequence.finish.usage
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (4.0, 0.0, 0.0)


def test_pending_tokens_count_what_waits_to_be_computed() -> None:
    served = ScheduledModel(max_num_batched_tokens=8, max_num_seqs=1)
    served.submit("a", prompt(10), max_tokens=3)
    served.submit("b", prompt(5, first=50))
    pending = [served.scheduler.num_pending_tokens]
    for _ in range(2):
        served.step()
        pending.append(served.scheduler.num_pending_tokens)

    assert pending == [15, 2 + 5, 5]


def test_hits_are_counted_by_where_they_were() -> None:
    served = ScheduledModel(num_blocks=8, num_host_blocks=20)
    for name, first in (("a", 0), ("b", 50)):
        served.submit(name, list(range(first, first + 21)), max_tokens=4)
        served.run()
    served.submit("again", list(range(21)), max_tokens=4)
    served.run()

    counters = served.scheduler.counters
    assert counters.num_cached_tokens == 20
    assert 0 < counters.num_host_tokens == 4 * served.host.num_loaded_blocks <= 20
    assert served.tokens["again"] == served.tokens["a"]


def test_output_that_comes_from_the_host_is_no_hit_of_the_prompt() -> None:
    served = ScheduledModel(num_blocks=7, num_host_blocks=20)
    served.submit("a", prompt(16), max_tokens=9)  # four blocks of prompt, two of output
    served.run()
    served.submit("b", prompt(8, first=50), max_tokens=4)  # takes the last ones of `a`
    served.run()
    generated = tuple(served.tokens["a"][:8])
    served.add(make_request("again", prompt(16), generated=generated, max_tokens=9))
    served.run()

    counters = served.scheduler.counters
    assert served.host.num_loaded_blocks
    assert (counters.num_cached_tokens, counters.num_host_tokens) == (16, 0)


def test_usage_of_a_continued_request_tells_no_more_cached_than_prompt_tokens() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(6), max_tokens=12)
    served.run()
    generated = tuple(served.tokens["a"][:10])
    sequence = served.submit("b", prompt(6), generated=generated, max_tokens=12)
    served.run()
    assert sequence.finish is not None
    assert sequence.finish.usage.cached_tokens == 6
    assert served.scheduler.counters.num_cached_tokens == 6
