"""Plans that are made before those ahead of them are back. Blocks of four tokens, as in test_scheduler.py."""

import pytest
from helpers.fake_model import next_token, run_alone
from helpers.scheduling import ScheduledModel, prompt, shares
from weft.block_hash import block_hashes, root_hash

from workers.errors import GroupFailedError
from workers.plan import ModelOutput
from workers.request import FinishReason
from workers.sequence import SequenceStatus


def test_sequence_is_in_no_plan_after_one_that_samples() -> None:
    served = ScheduledModel(max_in_flight=3)
    served.submit("a", prompt(10))

    assert served.launch() is not None
    assert served.launch() is None
    assert len(served.flights) == 1


def test_chunks_of_a_prompt_are_in_flight_together() -> None:
    served = ScheduledModel(max_in_flight=3, prefill_chunk_tokens=4)
    request = served.submit("a", prompt(13), max_tokens=5).request

    assert [shares(served.launch()) for _ in range(3)] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 4)]]
    served.collect()
    assert shares(served.launch()) == [(0, 12, 1)]
    served.collect()
    assert served.launch() is None, "its next token is not known"
    served.run()
    assert served.tokens["a"] == run_alone(request)


def test_another_sequence_starts_from_chunks_in_flight() -> None:
    served = ScheduledModel(max_in_flight=3, prefill_chunk_tokens=8)
    requests = [served.submit(name, prompt(19), max_tokens=5).request for name in ("a", "b")]

    assert shares(served.launch()) == [(0, 0, 8), (1, 8, 8)]
    assert shares(served.launch()) == [(0, 16, 3), (1, 16, 3)], "and the first from those of the second"
    served.run()
    assert served.tokens == {request.request_id: run_alone(request) for request in requests}


def test_prompts_are_divided_over_the_plans_in_flight() -> None:
    served = ScheduledModel(num_blocks=600, max_in_flight=2, max_num_batched_tokens=2048, max_context=4000)
    request = served.submit("a", [i % 90 for i in range(2048)], max_tokens=3).request

    assert shares(served.launch()) == [(0, 0, 256)]  # what is left over 2 plans in flight, 4 parts for each
    assert shares(served.launch()) == [(0, 256, 256)]
    served.collect()
    assert shares(served.launch()) == [(0, 512, 224)]
    served.run()
    assert served.tokens["a"] == run_alone(request)


def test_a_plan_is_not_cut_into_small_parts() -> None:
    served = ScheduledModel(max_in_flight=2, max_num_batched_tokens=512)
    for name, first in (("a", 0), ("b", 300)):
        served.submit(name, prompt(100, first), max_tokens=1)

    assert [num_tokens for _, _, num_tokens in shares(served.launch())] == [100, 28]
    assert [num_tokens for _, _, num_tokens in shares(served.launch())] == [72]


def test_a_prompt_in_all_plans_gives_its_slot_once_they_are_back() -> None:
    served = ScheduledModel(max_num_seqs=1, max_in_flight=2, prefill_chunk_tokens=4, policy="priority")
    later = served.submit("later level", prompt(60), max_tokens=2, priority=2)
    served.launch()
    served.launch()
    earlier = served.submit("earlier level", prompt(3, first=70), max_tokens=2, priority=1)

    served.collect()
    assert shares(served.launch()) == [(0, 8, 4)]
    served.collect()
    assert served.launch() is None
    served.collect()
    assert shares(served.launch()) == [(0, 0, 3)]
    assert (later.status, later.num_computed_tokens) == (SequenceStatus.WAITING, 12)
    served.run()
    for sequence in (earlier, later):
        assert served.tokens[sequence.request_id] == run_alone(sequence.request)


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
        served.scheduler.update(plan, ModelOutput(7, [0], [1]), 0.0)


@pytest.mark.parametrize("slots", [[], [1], [0, 1]])
def test_output_for_other_slots_is_refused(slots: list[int]) -> None:
    served = ScheduledModel()
    served.submit("a", prompt(4))
    plan = served.scheduler.schedule(0.0)
    assert plan is not None

    with pytest.raises(GroupFailedError, match=r"step 0 answered for slots .*; expected: \[0\]"):
        served.scheduler.update(plan, ModelOutput(0, slots, [5] * len(slots)), 0.0)


@pytest.mark.parametrize("token_ids", [[], [5, 6]])
def test_output_with_another_number_of_tokens_is_refused(token_ids: list[int]) -> None:
    served = ScheduledModel()
    served.submit("a", prompt(4))
    plan = served.scheduler.schedule(0.0)
    assert plan is not None

    with pytest.raises(GroupFailedError, match=rf"step 0 has {len(token_ids)} tokens; expected: 1"):
        served.scheduler.update(plan, ModelOutput(0, [0], token_ids), 0.0)


# Looking ahead


def test_next_step_is_planned_before_the_token_is_known() -> None:
    served = ScheduledModel(max_in_flight=2, looks_ahead=True)
    item = served.submit("a", prompt(7), max_tokens=5).request

    assert shares(served.launch()) == [(0, 0, 7)]
    second = served.launch()
    assert shares(second) == [(0, 7, 1)]
    assert second is not None
    assert second.scheduled[0].learnt == []
    (output,) = served.collect()
    third = served.launch()
    assert shares(third) == [(0, 8, 1)]
    assert third is not None
    assert third.scheduled[0].learnt == [output.token_id]
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


def test_what_decodes_in_flight_goes_on_before_a_prompt_of_an_earlier_level() -> None:
    served = ScheduledModel(max_num_batched_tokens=8, policy="priority", max_in_flight=2, looks_ahead=True)
    served.submit("ordinary", prompt(4), max_tokens=9, priority=1)
    served.launch()
    served.submit("urgent", prompt(20, first=50))

    assert shares(served.launch()) == [(0, 4, 1), (1, 0, 7)]


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
