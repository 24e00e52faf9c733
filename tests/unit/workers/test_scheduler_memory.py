"""Who gets blocks and slots, and who yields them. Blocks of four tokens, as in test_scheduler.py."""

import pytest
from helpers.fake_model import next_token, run_alone
from helpers.scheduling import ScheduledModel, make_request, prompt, shares

from workers.config import SchedulingPolicy
from workers.errors import InvalidRequestError
from workers.kv_cache_manager import KVCacheManager
from workers.sequence import Sequence, SequenceStatus


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


@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize(("max_in_flight", "looks_ahead"), [(1, False), (2, False), (3, False), (2, True)])
def test_small_pool_finishes_everything_without_a_storm(
    max_in_flight: int, looks_ahead: bool, policy: SchedulingPolicy
) -> None:
    requests = [make_request(str(i), prompt(10 + i, first=20 * i), max_tokens=20 + i) for i in range(12)]
    demand = sum(-(-(len(request.prompt_token_ids) + request.sampling.max_tokens) // 4) for request in requests)
    served = ScheduledModel(
        num_blocks=demand * 3 // 10,
        max_in_flight=max_in_flight,
        looks_ahead=looks_ahead,
        max_num_seqs=12,
        policy=policy,
    )
    sequences = [served.add(request) for request in requests]

    served.run()

    assert served.tokens == {request.request_id: run_alone(request) for request in requests}
    assert max(sequence.num_preemptions for sequence in sequences) <= 4
    assert 0 < served.scheduler.counters.num_recomputed_tokens < sum(each.num_tokens for each in sequences) / 2
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


def test_where_one_that_waits_has_no_room_nobody_who_could_give_way_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would cost each step as much as all the rest of it, for as long as the pool is half full."""
    served = ScheduledModel(num_blocks=8, max_num_seqs=2, policy="priority")
    for first in (1, 20):
        served.submit(f"ordinary {first}", prompt(3, first), max_tokens=6, priority=1)
    served.step()
    urgent = served.submit("urgent", prompt(10, first=50), max_tokens=3)
    looked_at: list[Sequence] = []

    def look(_cache: KVCacheManager, sequence: Sequence) -> int:
        looked_at.append(sequence)
        return 0

    monkeypatch.setattr(KVCacheManager, "least_tokens_at_risk", look)

    served.step()

    assert urgent.status is SequenceStatus.WAITING
    assert not looked_at


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


def test_running_sequence_sinks_with_the_token_that_uses_up_its_level() -> None:
    served = ScheduledModel(policy="mlfq")
    sequence = served.submit("a", prompt(4), max_tokens=60)
    levels = []
    while served.launch() is not None:
        levels.append(sequence.order[0])
        served.collect()

    assert [levels.index(level) for level in range(3)] == [0, 16, 48], "after as many tokens of output"


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
    assert served.cache.layout.num_blocks_of(500) >= peak


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
    assert shares(plan) == [(0, 0, 3 * 4 // max_in_flight)]  # all in flight take a quarter of the pool

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


@pytest.mark.parametrize(
    ("num_urgent", "expected_shares", "expected_new"),
    [
        (32, [(0, 0, 8), (1, 16, 8)], {0: 32}),  # fits at once: the first one yields before its turn
        (44, [(0, 16, 8), (1, 0, 8)], {0: 41, 1: 44}),  # fits later: the second one yields after its turn
    ],
)
def test_one_that_can_skip_ahead_is_displaced_in_the_same_step(
    num_urgent: int, expected_shares: list[tuple[int, int, int]], expected_new: dict[int, int]
) -> None:
    served = ScheduledModel(
        num_blocks=60, max_context=60, max_num_seqs=2, prefill_chunk_tokens=8, policy=SchedulingPolicy.PRIORITY
    )
    requests = [served.submit(name, prompt(41), max_tokens=3, priority=5).request for name in ("first", "second")]
    served.step()
    requests.append(served.submit("urgent", prompt(num_urgent, first=50), max_tokens=3, priority=1).request)

    plan = served.launch()
    served.run()

    assert plan is not None
    assert sorted(shares(plan)) == expected_shares
    assert {new.slot: len(new.token_ids) for new in plan.new} == expected_new
    assert sorted(plan.removed) == sorted(expected_new)
    assert served.tokens == {request.request_id: run_alone(request) for request in requests}


def test_nobody_skips_ahead_where_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ScheduledModel(num_blocks=60, max_context=60, prefill_chunk_tokens=8)
    requests = [served.submit(name, prompt(41), max_tokens=3).request for name in ("first", "second")]
    served.step()

    monkeypatch.setattr(served.cache, "fits", lambda sequence, prefix, *, reserve: False)  # blocks on the host, say
    plan = served.launch()
    served.run()

    assert plan is not None
    assert (shares(plan), plan.new) == ([(0, 8, 8), (1, 16, 8)], [])
    assert served.tokens == {request.request_id: run_alone(request) for request in requests}


def test_nobody_skips_to_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ScheduledModel(num_blocks=120, max_context=60, prefill_chunk_tokens=8, windows=(None, 9))
    requests = [served.submit(name, prompt(41), max_tokens=3).request for name in ("first", "second")]
    served.step()

    match = served.cache.match_prefix
    # what the next block needs in front of it under the window is gone, say
    monkeypatch.setattr(served.cache, "match_prefix", lambda sequence: match(sequence)[: len(sequence.block_table)])
    plan = served.launch()
    served.run()

    assert plan is not None
    assert (shares(plan), plan.new) == ([(0, 8, 8), (1, 16, 8)], [])
    assert served.tokens == {request.request_id: run_alone(request) for request in requests}
