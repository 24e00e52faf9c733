"""What each step computes. The fake model checks that plans and blocks make sense; blocks of four tokens."""

import pytest
from helpers.fake_model import next_token, run_alone
from helpers.scheduling import ScheduledModel, make_request
from weft.block_hash import block_hashes, root_hash

from workers.errors import GroupFailedError, InvalidRequestError, QueueFullError, RequestFailedError
from workers.plan import ModelOutput, SampledToken, StepPlan
from workers.request import FinishReason, RequestId
from workers.sequence import SequenceStatus


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    return list(range(first, first + num_tokens))


def shares(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(slot, start, tokens) of each share."""
    assert plan is not None
    return [(share.slot, share.start, share.num_tokens) for share in plan.scheduled]


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
    assert first.scheduled[0].new_token_ids == []
    assert len(first.scheduled[0].new_blocks) == 1
    assert second.new == []
    assert second.scheduled[0].learnt == output.token_id, "no list for one"
    assert len(second.scheduled[0].new_blocks) == 1  # the fifth token begins a block
    assert third.scheduled[0].new_blocks == []
    assert [plan.number for plan in (first, second, third)] == [0, 1, 2]


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
        (make_request("a", prompt(40)), "have 40 tokens; allowed: at most 39"),
        (make_request("a", prompt(30), generated=(5,) * 10, max_tokens=11), "have 40 tokens; allowed: at most 39"),
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


def test_one_token_shares_come_first_in_the_plan() -> None:
    served = ScheduledModel(max_num_batched_tokens=9)
    served.submit("a", prompt(5))
    served.submit("b", prompt(3, first=30))
    served.submit("c", prompt(9, first=60))

    assert [(slot, num_tokens) for slot, _, num_tokens in shares(served.launch())] == [(2, 1), (0, 5), (1, 3)]


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


# Memory


@pytest.mark.parametrize(("num_blocks", "num_running"), [(6, 2), (5, 1)])
@pytest.mark.parametrize("comes_later", [False, True])
def test_admission_leaves_each_running_sequence_a_block_to_grow(
    num_blocks: int, num_running: int, comes_later: bool
) -> None:
    served = ScheduledModel(num_blocks=num_blocks)
    served.submit("a", prompt(7), max_tokens=8)  # two blocks
    if comes_later:
        served.step()
    served.submit("b", prompt(11, first=50), max_tokens=4)  # three blocks

    served.step()

    assert served.scheduler.num_running == num_running
    served.run()
    assert len(served.ends) == 2


def test_admission_counts_what_running_prefills_still_need() -> None:
    served = ScheduledModel(num_blocks=8, prefill_chunk_tokens=4)
    served.submit("long", prompt(20), max_tokens=4)  # five blocks, one in the first step
    later = served.submit("later", prompt(8, first=50), max_tokens=4)

    served.step()

    assert later.status is SequenceStatus.RUNNING  # 2 of the 3 blocks that are not promised, 1 for growth
    served = ScheduledModel(num_blocks=7, prefill_chunk_tokens=4)
    served.submit("long", prompt(20), max_tokens=4)
    later = served.submit("later", prompt(8, first=50), max_tokens=4)
    served.step()
    assert later.status is SequenceStatus.WAITING


def test_none_overtakes_the_first_that_waits_for_memory() -> None:
    served = ScheduledModel(num_blocks=8, enable_prefix_caching=False)
    served.submit("a", prompt(16), max_tokens=8)
    served.submit("big", prompt(16, first=100), max_tokens=4)
    small = served.submit("small", prompt(2, first=200), max_tokens=4)

    served.step()

    assert small.status is SequenceStatus.WAITING
    served.run()
    assert len(served.ends) == 3


def test_latest_is_preempted_and_resumes_with_the_same_tokens() -> None:
    served = ScheduledModel(num_blocks=6, enable_prefix_caching=False)
    first = make_request("first", prompt(4), max_tokens=16)
    second = make_request("second", prompt(4, first=50), max_tokens=16)
    sequences = [served.add(first), served.add(second)]

    served.run()

    assert [sequence.num_preemptions for sequence in sequences] == [0, 1]
    assert served.tokens == {"first": run_alone(first), "second": run_alone(second)}
    assert served.scheduler.counters.num_preemptions == 1
    assert served.scheduler.counters.num_recomputed_tokens == sequences[1].num_lost_tokens > 0


def test_lowest_priority_is_preempted_under_priority() -> None:
    served = ScheduledModel(num_blocks=6, policy="priority", enable_prefix_caching=False)
    low = served.submit("low", prompt(4), max_tokens=16, priority=1)
    high = served.submit("high", prompt(4, first=50), max_tokens=16, priority=0)

    served.run()

    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_preempted_sequence_resumes_before_new_ones() -> None:
    served = ScheduledModel(num_blocks=6, enable_prefix_caching=False)
    served.submit("first", prompt(4), max_tokens=16)
    second = served.submit("second", prompt(4, first=50), max_tokens=16)
    while not second.num_preemptions:
        served.step()
    new = served.submit("new", prompt(2, first=80), max_tokens=2)

    while second.status is SequenceStatus.WAITING:
        assert new.status is SequenceStatus.WAITING
        served.step()
    served.run()


def test_preempted_sequence_finds_its_blocks_where_nobody_took_them() -> None:
    served = ScheduledModel(num_blocks=6)
    served.submit("first", prompt(8), max_tokens=8)
    second = served.submit("second", prompt(8, first=50), max_tokens=10)

    served.run()

    assert second.num_preemptions == 1
    assert served.scheduler.counters.num_recomputed_tokens < second.num_lost_tokens


def test_earlier_prefill_takes_the_blocks_of_a_decode_planned_in_the_same_step() -> None:
    served = ScheduledModel(num_blocks=7, prefill_chunk_tokens=1, enable_prefix_caching=False)
    slow = served.submit("slow", prompt(20), max_tokens=2)  # a token a step: the later one grows past it meanwhile
    late = served.submit("late", prompt(3, first=50), max_tokens=20)
    plan = served.launch()
    while not late.num_preemptions:
        served.collect()
        plan = served.launch()

    assert len(shares(plan)) == 1
    assert slow.num_in_flight
    served.run()
    assert slow.num_preemptions == 0
    assert len(served.tokens["late"]) == 20


def test_block_that_a_preempted_decode_would_have_filled_does_not_go_to_the_host() -> None:
    served = ScheduledModel(num_blocks=8, prefill_chunk_tokens=1, num_host_blocks=16)
    served.submit("slow", prompt(20), max_tokens=2)
    served.step()
    late = served.submit("late", prompt(3, first=50), max_tokens=20)
    while not late.num_preemptions:  # its 16th token fills a block in the step in which the slow one needs a fifth
        served.step()
    assert (late.num_lost_tokens, late.num_tokens) == (15, 16)

    served.run()

    assert served.tokens["late"] == run_alone(late.request)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_small_pool_finishes_everything_without_a_storm(max_in_flight: int) -> None:
    requests = [make_request(str(i), prompt(10 + i, first=20 * i), max_tokens=20 + i) for i in range(12)]
    demand = sum(-(-(len(request.prompt_token_ids) + request.sampling.max_tokens) // 4) for request in requests)
    served = ScheduledModel(num_blocks=demand * 3 // 10, max_in_flight=max_in_flight, max_num_seqs=12)
    sequences = [served.add(request) for request in requests]

    served.run()

    assert served.tokens == {request.request_id: run_alone(request) for request in requests}
    assert max(sequence.num_preemptions for sequence in sequences) <= 4
    assert served.cache.num_free_blocks == served.cache.num_blocks


def test_earlier_level_displaces_a_running_sequence_which_keeps_its_blocks() -> None:
    served = ScheduledModel(max_num_seqs=1, policy="priority", enable_prefix_caching=False)
    ordinary = served.submit("ordinary", prompt(10), max_tokens=6, priority=1)
    served.step()
    served.step()
    urgent = served.submit("urgent", prompt(10, first=50), max_tokens=3)
    served.step()

    assert (ordinary.status, urgent.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    assert len(ordinary.block_table) == 3
    assert served.scheduler.num_pending_tokens == 1
    served.scheduler.check_integrity()
    served.run()
    counters = served.scheduler.counters
    assert (counters.num_preemptions, counters.num_recomputed_tokens) == (1, 0)
    assert served.model.num_computed_tokens == (10 + 5) + (10 + 2)
    assert served.tokens["ordinary"] == run_alone(ordinary.request)


def test_sequence_from_whose_step_another_one_starts_is_not_displaced_in_it() -> None:
    served = ScheduledModel(max_num_seqs=2, policy="priority")
    ordinary = served.submit("ordinary", prompt(7), max_tokens=9, priority=1)
    served.step()
    common = [*ordinary.token_ids, 90]  # eight tokens and one more: the next step fills the second block
    urgent = [served.submit(name, common, max_tokens=3) for name in ("one", "two")]
    served.step()

    assert [sequence.num_cached_tokens for sequence in urgent] == [8, 0]
    assert [sequence.status for sequence in urgent] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    served.step()
    assert ordinary.status is SequenceStatus.WAITING
    served.run()
    assert all(served.tokens[sequence.request_id] == run_alone(sequence.request) for sequence in (ordinary, *urgent))


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 0), ("priority", 1)])
def test_same_level_displaces_nobody(policy: str, priority: int) -> None:
    served = ScheduledModel(max_num_seqs=1, policy=policy)
    served.submit("first", prompt(10), max_tokens=6, priority=1)
    served.step()
    later = served.submit("later", prompt(10, first=50), max_tokens=3, priority=priority)
    served.step()

    assert later.status is SequenceStatus.WAITING


@pytest.mark.parametrize(("own", "chunk"), [([], 3), ([next_token(prompt(3)), 9], None)], ids=["prefills", "decodes"])
def test_sequence_does_not_start_from_what_the_one_that_it_displaces_would_have_computed(
    own: list[int], chunk: int | None
) -> None:
    served = ScheduledModel(max_num_seqs=1, policy="priority", prefill_chunk_tokens=chunk)
    served.submit("late", prompt(3) if own else prompt(4), priority=5, max_tokens=8)
    served.step()
    request = make_request("early", [*prompt(3), *own] if own else prompt(5), priority=0, max_tokens=8)
    served.add(request)

    served.run()

    assert served.scheduler.counters.num_preemptions == 1
    assert served.tokens["early"] == run_alone(request)


def test_displaced_sequence_loses_its_blocks_to_one_that_needs_them() -> None:
    served = ScheduledModel(
        num_blocks=16, max_num_seqs=1, policy="priority", enable_prefix_caching=False, max_num_batched_tokens=8
    )
    ordinary = served.submit("ordinary", prompt(16), max_tokens=6, priority=2)
    while not ordinary.num_output_tokens:
        served.step()
    served.submit("urgent", prompt(6, first=50), max_tokens=2)
    served.step()
    assert ordinary.block_table
    large = served.submit("large", prompt(52, first=30), max_tokens=4, priority=1)  # 14 of 16 blocks

    while large.status is SequenceStatus.WAITING:
        served.step()
        served.scheduler.check_integrity()

    assert not ordinary.block_table
    while not ordinary.num_computed_tokens:
        served.step()
    assert served.scheduler.counters.num_recomputed_tokens == 16
    served.submit("urgent again", prompt(6, first=50), max_tokens=2)
    served.run()
    assert served.scheduler.counters.num_preemptions == 2
    assert served.scheduler.counters.num_recomputed_tokens == 16, "the last one took the slot and no blocks"
    assert served.tokens["ordinary"] == run_alone(ordinary.request)


def test_running_sequence_grows_into_the_blocks_of_a_displaced_one_before_those_of_a_running_one() -> None:
    served = ScheduledModel(num_blocks=13, max_num_seqs=2, policy="priority", enable_prefix_caching=False)
    displaced = served.submit("displaced", prompt(10), max_tokens=20, priority=2)  # three blocks
    other = served.submit("other", prompt(2, first=30), max_tokens=22, priority=1)  # six in the end
    served.step()
    urgent = served.submit("urgent", prompt(4, first=50), max_tokens=21)  # six in the end, before the other has
    served.step()
    assert len(displaced.block_table) == 3

    while displaced.block_table:
        served.step()

    assert len(urgent.block_table) == 6
    served.run()
    assert (other.num_preemptions, urgent.num_preemptions) == (0, 0)


def test_displaced_sequence_keeps_blocks_that_would_not_be_enough() -> None:
    served = ScheduledModel(num_blocks=40, max_num_seqs=2, policy="priority", enable_prefix_caching=False)
    low = served.submit("low", prompt(40), max_tokens=30, priority=9)
    served.submit("other", prompt(4, first=50), max_tokens=60, priority=5)
    served.step()
    served.submit("urgent", prompt(16, first=60), max_tokens=60)
    served.step()
    assert low.block_table
    served.abort("other")
    large = served.submit("large", prompt(142, first=80), max_tokens=4, priority=1)  # 36 blocks, beside the urgent 6
    served.step()

    assert large.status is SequenceStatus.WAITING
    assert low.block_table
    served.run()


@pytest.mark.parametrize(("num_large", "num_kept"), [(104, 11), (108, 0)], ids=["a block is free", "none is"])
def test_displaced_sequence_comes_back_with_its_blocks_and_takes_others_where_it_must(
    num_large: int, num_kept: int
) -> None:
    """A block is to be left for the large one to grow."""
    served = ScheduledModel(num_blocks=40, max_num_seqs=2, policy="priority", enable_prefix_caching=False)
    first = served.submit("first", prompt(4), max_tokens=9, priority=9)  # the one with less to compute again
    other = served.submit("other", prompt(40, first=20), max_tokens=9, priority=9)
    served.step()
    for i in range(2):
        served.submit(f"urgent {i}", prompt(3, first=70 + i), max_tokens=1)
    served.step()
    assert [len(sequence.block_table) for sequence in (first, other)] == [2, 11]
    large = served.submit("large", prompt(num_large), max_tokens=8, priority=1)
    while not large.num_output_tokens:
        served.step()

    assert (first.status, first.num_lost_tokens) == (SequenceStatus.RUNNING, 0)
    assert len(other.block_table) == num_kept


def test_one_that_needs_blocks_takes_those_of_no_more_displaced_ones_than_it_must() -> None:
    served = ScheduledModel(num_blocks=40, max_num_seqs=3, policy="priority", enable_prefix_caching=False)
    displaced = [served.submit(f"displaced {i}", prompt(14, first=20 * i), priority=9) for i in range(3)]
    served.step()
    for i in range(3):
        served.submit(f"urgent {i}", prompt(3, first=70 + i), max_tokens=1)
    served.step()
    assert [len(each.block_table) for each in displaced] == [4, 4, 4]
    large = served.submit("large", prompt(131), max_tokens=4, priority=1)  # 33 blocks, and 28 are free

    served.step()

    assert large.status is SequenceStatus.RUNNING
    assert [len(each.block_table) for each in displaced] == [4, 0, 0]


@pytest.mark.parametrize(
    ("num_tokens", "priority"), [(160, 0), (3, 5)], ids=["half of the pool would not stay free", "of the same level"]
)
def test_plans_run_ahead_though_one_waits_that_cannot_displace_anybody(num_tokens: int, priority: int) -> None:
    served = ScheduledModel(num_blocks=84, max_num_seqs=2, max_in_flight=2, looks_ahead=True, policy="priority")
    for name in ("a", "b"):
        served.submit(name, prompt(3), priority=5, max_tokens=60)
    served.step()
    served.submit("waiting", prompt(num_tokens), max_tokens=4, priority=priority)
    while len(served.tokens["a"]) < 40:
        while served.launch() is not None:
            pass
        assert len(served.flights) == 2
        served.collect()


def test_nobody_is_displaced_where_that_fills_the_pool() -> None:
    served = ScheduledModel(num_blocks=8, max_num_seqs=1, policy="priority")
    served.submit("ordinary", prompt(10), max_tokens=6, priority=1)
    served.step()
    urgent = served.submit("urgent", prompt(10, first=50), max_tokens=3)
    served.step()

    assert urgent.status is SequenceStatus.WAITING  # 3 blocks of 5, and 4 are to stay free
    served.run()


def test_a_displaced_sequence_needs_no_blocks_to_grow() -> None:
    served = ScheduledModel(num_blocks=11, max_num_seqs=2, policy="priority")
    for first in (1, 50):
        served.submit(f"ordinary {first}", prompt(3, first), max_tokens=20, priority=1)
    served.step()
    urgent = [served.submit(f"urgent {first}", prompt(3, first), max_tokens=3) for first in (100, 200)]
    served.step()

    assert [each.status for each in urgent] == [SequenceStatus.RUNNING] * 2


def test_abort_of_a_displaced_sequence_frees_its_blocks() -> None:
    served = ScheduledModel(max_num_seqs=1, policy="priority")
    served.submit("ordinary", prompt(10), max_tokens=6, priority=1)
    served.step()
    served.submit("urgent", prompt(3, first=50), max_tokens=9)
    served.step()

    served.abort("ordinary")

    served.scheduler.check_integrity()
    assert served.cache.num_blocks - served.cache.num_free_blocks == 1
    served.run()


def test_short_request_is_admitted_before_the_rest_of_a_long_prompt() -> None:
    served = ScheduledModel(max_num_batched_tokens=16, policy="shortest_remaining", num_blocks=99)
    served.submit("long", prompt(160), max_tokens=100)
    served.step()
    served.submit("short", prompt(4, first=50), max_tokens=2)

    assert [num_tokens for _, _, num_tokens in shares(served.launch())] == [4, 12]


@pytest.mark.parametrize(("priority", "expected"), [(0, [4, 12]), (1, [16])])
def test_request_of_an_earlier_level_is_admitted_before_the_rest_of_a_prompt(
    priority: int, expected: list[int]
) -> None:
    served = ScheduledModel(max_num_batched_tokens=16, policy="priority")
    served.submit("long", prompt(160), max_tokens=4, priority=1)
    served.step()
    served.submit("other", prompt(4, first=50), max_tokens=2, priority=priority)

    assert sorted(num_tokens for _, _, num_tokens in shares(served.launch())) == expected


def test_those_that_displace_prefills_get_no_more_than_the_budget() -> None:
    served = ScheduledModel(max_num_batched_tokens=16, max_num_seqs=2, policy="priority")
    for i in range(2):
        served.submit(f"ordinary {i}", prompt(40, first=40 * i), priority=1)
    while served.scheduler.num_waiting:
        served.step()
    served.submit("short", prompt(10, first=50), priority=0)
    served.submit("long", prompt(40, first=60), priority=0)

    assert [num_tokens for _, _, num_tokens in shares(served.launch())] == [10, 6]


@pytest.mark.parametrize("has_common", [True, False])
def test_who_has_the_least_to_compute_again_is_preempted(has_common: bool) -> None:
    served = ScheduledModel(num_blocks=14 if has_common else 17)  # full when all four need a block at the same step
    served.submit("first", prompt(4), max_tokens=40)
    common = prompt(12, first=30)
    served.submit("holder", common, max_tokens=40)
    served.step()
    own = prompt(12, first=60)
    sharing = served.submit("sharing", [*(common if has_common else own), 90], max_tokens=40)
    served.step()
    alone = served.submit("alone", prompt(10, first=80), max_tokens=40)
    while not served.scheduler.counters.num_preemptions:
        served.step()

    assert (sharing.num_preemptions, alone.num_preemptions) == ((1, 0) if has_common else (0, 1))


def test_sequence_that_sank_a_level_gives_way_to_one_that_came_after_it() -> None:
    served = ScheduledModel(num_blocks=11, policy="mlfq", enable_prefix_caching=False)
    sinking = served.submit("sinking", prompt(4), max_tokens=40)
    for _ in range(14):
        served.step()
    later = served.submit("later", prompt(4, first=50), max_tokens=16)
    while served.scheduler.has_unfinished and not served.scheduler.counters.num_preemptions:
        served.step()
        served.scheduler.check_integrity()

    assert (sinking.num_preemptions, later.num_preemptions) == (1, 0)


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


# Several plans in flight


def test_sequence_is_in_one_plan_at_most() -> None:
    served = ScheduledModel(max_in_flight=3)
    served.submit("a", prompt(10))

    assert served.launch() is not None
    assert served.launch() is None
    assert len(served.flights) == 1


def test_decodes_are_divided_over_the_plans_in_flight() -> None:
    served = ScheduledModel(max_in_flight=2, max_num_seqs=8)
    for i in range(7):
        served.submit(str(i), prompt(4, first=10 * i), max_tokens=20)
    served.step()

    sizes = []
    for _ in range(6):
        while (plan := served.launch()) is not None:
            sizes.append(len(plan.scheduled))
        assert len(served.flights) == 2
        served.collect()

    assert sizes == [4, 3] * 3 + [4]


def test_no_more_plans_than_allowed_are_in_flight() -> None:
    served = ScheduledModel(max_in_flight=2, max_num_batched_tokens=8)
    for i in range(4):
        served.submit(str(i), prompt(8, first=10 * i), max_tokens=4)

    assert [served.launch() is not None for _ in range(3)] == [True, True, False]
    served.run()


def test_sequence_in_flight_is_not_preempted() -> None:
    served = ScheduledModel(num_blocks=6, max_in_flight=2, enable_prefix_caching=False)
    served.submit("first", prompt(4), max_tokens=16)
    second = served.submit("second", prompt(4, first=50), max_tokens=16)
    while served.scheduler.has_unfinished:
        while served.launch() is not None:
            served.scheduler.check_integrity()  # a preempted sequence in flight would be found here
        served.collect()

    assert second.num_preemptions >= 1
    assert len(served.tokens["second"]) == 16


def test_an_earlier_level_waits_for_a_slot_in_flight_while_plans_go_on() -> None:
    served = ScheduledModel(max_num_seqs=2, max_in_flight=2, policy="priority")
    same = served.submit("same level", prompt(4), max_tokens=9, priority=1)
    later = served.submit("later level", prompt(4, first=30), max_tokens=9, priority=2)
    served.step()
    served.launch()
    served.launch()
    served.collect()
    assert (same.num_in_flight, later.num_in_flight) == (0, 1)
    earlier = served.submit("earlier level", prompt(4, first=50), max_tokens=9, priority=1)

    assert served.launch() is not None
    assert (same.num_in_flight, earlier.status) == (1, SequenceStatus.WAITING)
    served.collect()
    assert served.launch() is not None
    assert (later.status, earlier.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)


def test_first_in_order_waits_for_one_plan_only_to_get_a_block() -> None:
    served = ScheduledModel(num_blocks=5, max_in_flight=3, enable_prefix_caching=False)
    first = served.submit("first", prompt(2), max_tokens=8)
    later = [served.submit(name, prompt(4, start), max_tokens=8) for name, start in (("b", 30), ("c", 60))]
    while first.num_computed_tokens < 4:
        served.step()
    assert [sequence.num_in_flight for sequence in later] == [1, 1]

    assert served.launch() is None
    served.collect()
    assert shares(served.launch()) == [(first.slot, 4, 1)]
    assert [sequence.status for sequence in later] == [SequenceStatus.WAITING, SequenceStatus.RUNNING]


def test_output_of_another_step_is_refused() -> None:
    served = ScheduledModel()
    served.submit("a", prompt(4))
    plan = served.scheduler.schedule(0.0)
    assert plan is not None

    with pytest.raises(GroupFailedError, match="output of step 7 came; expected: step 0"):
        served.scheduler.update(plan, ModelOutput(7, [SampledToken(0, 1)]), 0.0)


@pytest.mark.parametrize("sampled", [[], [SampledToken(1, 5)], [SampledToken(0, 5), SampledToken(1, 5)]])
def test_output_for_other_slots_is_refused(sampled: list[SampledToken]) -> None:
    served = ScheduledModel()
    served.submit("a", prompt(4))
    plan = served.scheduler.schedule(0.0)
    assert plan is not None

    with pytest.raises(GroupFailedError, match=r"step 0 answered for slots .*; expected: \[0\]"):
        served.scheduler.update(plan, ModelOutput(0, sampled), 0.0)


# Looking ahead


def test_next_step_is_planned_before_the_token_is_known() -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True)
    item = served.submit("a", prompt(7), max_tokens=5).request

    assert shares(served.launch()) == [(0, 0, 7)]
    second = served.launch()
    assert shares(second) == [(0, 7, 1)]
    assert second is not None
    assert second.scheduled[0].new_token_ids == []
    (output,) = served.collect()
    third = served.launch()
    assert shares(third) == [(0, 8, 1)]
    assert third is not None
    assert third.scheduled[0].new_token_ids == [output.token_id]
    served.run()
    assert served.tokens["a"] == run_alone(item)
    assert served.model.num_computed_tokens == 7 + 4  # nothing beyond the last token but one


def test_chunks_of_a_prompt_are_planned_ahead() -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True, prefill_chunk_tokens=4)
    served.submit("a", prompt(10))

    assert [shares(served.launch()) for _ in range(2)] == [[(0, 0, 4)], [(0, 4, 4)]]


def test_what_was_planned_behind_the_last_token_is_dropped() -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True, eos_token_ids=frozenset({next_token(prompt(7))}))
    sequence = served.submit("a", prompt(7), max_tokens=5)
    served.launch()
    served.launch()

    (output,) = served.collect()

    assert output.finish is not None
    assert sequence.block_table, "its second step is in flight"
    assert served.collect() == []
    assert served.cache.num_free_blocks == served.cache.num_blocks
    assert not served.scheduler.has_unfinished


def test_error_ends_what_was_planned_behind_it() -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True)
    served.model.failing_prompts.add(tuple(prompt(8)))
    served.submit("bad", prompt(8))
    served.launch()
    served.launch()
    served.collect()
    served.collect()

    assert served.ends == {"bad": "logits are not finite"}
    assert served.cache.match_prefix(served.submit("again", prompt(9))) == []
    served.scheduler.check_integrity()


def test_first_in_order_gets_its_blocks_from_later_ones_in_flight() -> None:
    served = ScheduledModel(
        num_blocks=6, max_in_flight=2, looks_ahead=True, max_num_seqs=2, enable_prefix_caching=False
    )
    requests = [served.submit(name, prompt(7, first), max_tokens=14).request for name, first in (("a", 1), ("b", 50))]

    served.run()

    assert served.scheduler.counters.num_preemptions > 0
    assert [served.tokens[item.request_id] for item in requests] == [run_alone(item) for item in requests]


def test_first_in_order_does_not_wait_until_later_ones_in_flight_need_blocks_themselves() -> None:
    served = ScheduledModel(
        num_blocks=5, block_size=16, max_in_flight=2, looks_ahead=True, max_num_seqs=2, enable_prefix_caching=False
    )
    served.submit("a", prompt(20), max_tokens=40)  # its third block is the last one
    served.submit("b", prompt(21, first=500), max_tokens=40)
    num_steps = 0
    while "a" not in served.ends:
        num_preemptions = served.scheduler.counters.num_preemptions
        served.step()
        num_steps += 1
        assert not num_preemptions or served.flights or "a" in served.ends, "plans run ahead again"

    assert served.scheduler.counters.num_preemptions == 1
    assert num_steps <= 40 + 4


def test_plans_run_ahead_while_the_last_in_order_waits_for_a_block() -> None:
    served = ScheduledModel(num_blocks=4, block_size=16, max_in_flight=2, looks_ahead=True, enable_prefix_caching=False)
    served.submit("a", prompt(10), max_tokens=50)  # takes its second block in the 7th step, its third in the 23rd
    waiting = served.submit("b", prompt(20, first=500), max_tokens=30)  # two blocks, and would take a third in the 14th
    while waiting.num_computed_tokens < 32:
        served.step()

    for _ in range(6):
        served.step()
        assert served.flights
    assert (waiting.status, waiting.num_computed_tokens) == (SequenceStatus.RUNNING, 32)


def test_earlier_level_gets_the_slot_of_one_in_flight() -> None:
    served = ScheduledModel(max_num_seqs=1, policy="priority", max_in_flight=2, looks_ahead=True)
    ordinary = served.submit("ordinary", prompt(10), max_tokens=50, priority=1)
    served.step()
    served.submit("urgent", prompt(10, first=50), max_tokens=3)
    for _ in range(6):
        served.step()

    assert served.ends == {"urgent": FinishReason.LENGTH}
    served.run()
    assert served.tokens["ordinary"] == run_alone(ordinary.request)


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


# Sliding windows


def peak_owned(served: ScheduledModel) -> int:
    """Run to the end; the most blocks that were held after a plan was made."""
    peak = 0
    while served.scheduler.has_unfinished:
        served.launch()
        peak = max(peak, served.cache.num_blocks - served.cache.num_free_blocks)
        served.collect()
        served.scheduler.check_integrity()
    return peak


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((33,), 8 + 1 + 2),  # eight blocks in sight of a border, a begun one, two more of a chunk of eight tokens
        ((32,), 8 + 1 + 2),
        ((1,), 0 + 1 + 1),  # the chunks begin where blocks do
        ((None, 33), 125 + 8 + 1),
        ((None, 33, 33), 125 + 2 * (8 + 1)),
    ],
)
def test_long_sequence_holds_windows_and_a_chunk(windows: tuple[int | None, ...], expected: int) -> None:
    """400 tokens of prompt and 100 generated: 125 blocks of four in a group that sees everything."""
    served = ScheduledModel(windows=windows, num_blocks=160, prefill_chunk_tokens=8)
    request = make_request("a", prompt(400), max_tokens=101)
    served.add(request)

    peak = peak_owned(served)

    assert served.tokens["a"] == run_alone(request)
    assert expected - 2 <= peak <= expected
    assert served.cache.num_blocks_of(500) >= peak


def test_windows_let_more_sequences_run_at_once() -> None:
    """Eight of 200 tokens in 40 blocks, each of which holds three to five; without a window each would need 50."""
    served = ScheduledModel(windows=(9,), num_blocks=40, prefill_chunk_tokens=4, max_num_batched_tokens=16)
    requests = [make_request(str(i), prompt(150, first=i), max_tokens=50) for i in range(8)]
    for request in requests:
        served.add(request)

    peak = 0
    while served.scheduler.has_unfinished:
        served.step()
        peak = max(peak, served.scheduler.num_running)

    assert served.tokens == {request.request_id: run_alone(request) for request in requests}
    assert peak == 8
    assert served.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_chunks_adapt_to_a_pool_smaller_than_the_token_budget(max_in_flight: int) -> None:
    served = ScheduledModel(windows=(9,), num_blocks=12, max_in_flight=max_in_flight, max_num_batched_tokens=500)
    request = make_request("a", prompt(300), max_tokens=30)
    served.add(request)
    plan = served.launch()
    assert shares(plan) == [(0, 0, 3 * 4)]  # a quarter of the pool

    served.run()

    assert served.tokens["a"] == run_alone(request)


def test_request_that_the_windows_make_fit_is_accepted() -> None:
    served = ScheduledModel(windows=(None, 9), num_blocks=20, prefill_chunk_tokens=4)
    # the window takes 2 + 2 blocks, so that 16 are left to what sees everything
    with pytest.raises(InvalidRequestError, match="puts 65 tokens into the KV cache; allowed: 64"):
        served.submit("long", prompt(50), max_tokens=16)
    request = make_request("a", prompt(50), max_tokens=15)
    served.add(request)

    served.run()

    assert served.tokens["a"] == run_alone(request)


def test_failover_and_preemption_give_the_same_tokens_under_windows() -> None:
    requests = [make_request(str(i), prompt(4, first=i), max_tokens=60) for i in range(4)]
    served = ScheduledModel(windows=(None, 17), num_blocks=36, max_num_batched_tokens=16)
    for request in requests:
        served.add(request)
    served.run()
    assert served.scheduler.counters.num_preemptions > 0
    assert served.tokens == {request.request_id: run_alone(request) for request in requests}

    elsewhere = ScheduledModel(windows=(None, 17), num_blocks=36, max_num_batched_tokens=16)
    elsewhere.submit("1", prompt(4, first=1), generated=tuple(served.tokens["1"][:37]), max_tokens=60)
    elsewhere.run()
    assert elsewhere.tokens["1"] == served.tokens["1"]


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


def test_a_preempted_sequence_comes_back_from_the_host() -> None:
    """Its blocks go to others, and are loaded when it goes on: nothing full is computed again."""
    served = ScheduledModel(num_blocks=8, num_host_blocks=40)
    for i in range(3):
        served.submit(str(i), list(range(30 * i, 30 * i + 7)), max_tokens=20)
    served.run()

    counters = served.scheduler.counters
    assert counters.num_preemptions > 0
    assert served.host.num_loaded_blocks > 0
    assert counters.num_recomputed_tokens < 4 * counters.num_preemptions
    for i in range(3):
        assert served.tokens[str(i)] == run_alone(make_request("r", list(range(30 * i, 30 * i + 7)), max_tokens=20))


@pytest.mark.parametrize("windows", [(None,), (None, 3)])
def test_an_end_with_a_token_in_flight_makes_no_block_known_that_holds_it(windows: tuple[int | None, ...]) -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True, windows=windows)  # blocks of four tokens
    tokens = [1, 2, 3, 4, 5, 6, 7]
    served.submit("a", tokens, max_tokens=20)
    served.launch()
    served.launch()  # computes the token that is being sampled, the last of the second block
    served.abort("a")
    served.collect()
    served.collect()
    assert served.pool.resident_hashes() == block_hashes(root_hash(b"test"), tokens, 4)
    assert served.pool.num_free == served.pool.num_blocks
    served.scheduler.check_integrity()


def test_error_in_a_later_chunk_leaves_nothing_that_was_planned_behind_it() -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True, prefill_chunk_tokens=7)
    served.model.failing_prompts.add(tuple(prompt(8)))
    served.submit("bad", prompt(8))
    served.launch()
    served.launch()
    served.collect()
    served.model._slots[0].is_failing = False  # what follows does not fail by itself
    assert shares(served.launch()) == [(0, 8, 1)]
    served.collect()
    served.collect()

    assert served.ends == {"bad": "logits are not finite"}
    assert not served.cache.match_prefix(served.submit("again", prompt(9)))
    served.scheduler.check_integrity()


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
