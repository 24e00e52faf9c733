"""The order in which sequences are served, and the queue of those that wait."""

import pytest
from helpers.scheduling import make_request

from workers.config import SchedulingPolicy
from workers.queueing import PREFILL_TOKENS_PER_STEP, PROMOTED_LEVEL, ServingOrder, WaitingQueue
from workers.sequence import Sequence

STEP = PREFILL_TOKENS_PER_STEP


class Arrivals:
    """Makes sequences in order of arrival, and their queue under one policy."""

    def __init__(self, policy: SchedulingPolicy, *, promote_after_s: float | None = None) -> None:
        self.order = ServingOrder(policy, promote_after_s=promote_after_s)
        self.queue = WaitingQueue(self.order)
        self.count = 0

    def next(
        self,
        *,
        priority: int = 0,
        generated: tuple[int, ...] = (),
        num_tokens: int = 1,
        max_tokens: int = 98,
        deadline_s: float | None = None,
    ) -> Sequence:
        request = make_request(
            str(self.count),
            [7] * num_tokens,
            generated=generated,
            priority=priority,
            deadline_s=deadline_s,
            max_tokens=max_tokens,
        )
        self.count += 1
        return Sequence(
            request=request,
            arrival_number=self.count,
            stop_token_ids=frozenset(),
            max_num_tokens=num_tokens + max_tokens,
            arrival_s=0.0,
        )

    def push(self, *sequences: Sequence, now_s: float = 0.0) -> None:
        for sequence in sequences:
            self.queue.push(sequence, now_s)

    def drain(self) -> list[Sequence]:
        return [self.queue.pop(0.0) for _ in range(len(self.queue))]

    def level(self, sequence: Sequence) -> int:
        self.order.place(sequence)
        return sequence.order[0]


def test_first_come_is_first_served_whatever_its_priority() -> None:
    arrivals = Arrivals(SchedulingPolicy.FCFS)
    sequences = [arrivals.next(priority=priority, deadline_s=priority) for priority in (3, 1, 2)]
    arrivals.push(*reversed(sequences))

    assert arrivals.queue.peek() is sequences[0]
    assert list(arrivals.queue) == sequences
    assert arrivals.drain() == sequences
    assert arrivals.queue.peek() is None


def test_lower_priority_number_is_served_first_then_arrival() -> None:
    arrivals = Arrivals(SchedulingPolicy.PRIORITY)
    sequences = [arrivals.next(priority=priority) for priority in (1, 0, 1, 0)]
    arrivals.push(*sequences)

    assert arrivals.drain() == [sequences[1], sequences[3], sequences[0], sequences[2]]


def test_sequences_served_before_come_before_new_ones() -> None:
    arrivals = Arrivals(SchedulingPolicy.FCFS)
    new, moved_here, preempted = arrivals.next(), arrivals.next(generated=(1, 2)), arrivals.next()
    preempted.num_preemptions = 1
    arrivals.push(new, preempted, moved_here)

    assert arrivals.drain() == [moved_here, preempted, new]


def test_preempted_sequence_does_not_overtake_a_higher_priority() -> None:
    arrivals = Arrivals(SchedulingPolicy.PRIORITY)
    preempted, urgent, ordinary = arrivals.next(priority=1), arrivals.next(priority=0), arrivals.next(priority=1)
    preempted.num_preemptions = 1
    arrivals.push(preempted, urgent, ordinary)

    assert arrivals.drain() == [urgent, preempted, ordinary]


def test_earliest_deadline_is_first_and_none_is_last() -> None:
    arrivals = Arrivals(SchedulingPolicy.DEADLINE)
    patient, late, early = arrivals.next(), arrivals.next(deadline_s=9.0), arrivals.next(deadline_s=2.0)
    arrivals.push(patient, late, early)

    assert arrivals.drain() == [early, late, patient]
    assert arrivals.level(early) == arrivals.level(late) < arrivals.level(patient)


def test_shortest_remaining_counts_prompt_and_output_still_to_come() -> None:
    arrivals = Arrivals(SchedulingPolicy.SHORTEST_REMAINING)
    long_output = arrivals.next(max_tokens=90)
    long_prompt = arrivals.next(num_tokens=60 * STEP, max_tokens=9)
    nearly_done = arrivals.next(max_tokens=90, generated=(5,) * 80)
    arrivals.push(long_output, long_prompt, nearly_done)

    assert arrivals.drain() == [nearly_done, long_prompt, long_output]


def test_shortest_remaining_looks_at_what_is_computed() -> None:
    arrivals = Arrivals(SchedulingPolicy.SHORTEST_REMAINING)
    sequence = arrivals.next(num_tokens=60 * STEP, max_tokens=4)
    before = arrivals.level(sequence)

    sequence.num_computed_tokens = 60 * STEP - 1

    assert (before, arrivals.level(sequence)) == (7, 3)


@pytest.mark.parametrize(("num_output", "level"), [(0, 0), (15, 0), (16, 1), (47, 1), (48, 2), (111, 2), (112, 3)])
def test_mlfq_sinks_with_its_output(num_output: int, level: int) -> None:
    arrivals = Arrivals(SchedulingPolicy.MLFQ)
    sequence = arrivals.next(num_tokens=3, generated=(5,) * num_output, max_tokens=200)

    assert arrivals.level(sequence) == level


@pytest.mark.parametrize("num_prompt_tokens", [1, STEP - 1, 16 * STEP, 40 * STEP + 3])
def test_mlfq_says_how_long_a_level_lasts(num_prompt_tokens: int) -> None:
    arrivals = Arrivals(SchedulingPolicy.MLFQ)
    sequence = arrivals.next(num_tokens=num_prompt_tokens, max_tokens=1000)
    levels = []
    for _ in range(1000):
        was_due, before = len(sequence.token_ids) >= sequence.order_until, sequence.order
        levels.append(arrivals.level(sequence))
        assert was_due == (sequence.order != before)
        sequence.token_ids.append(1)
    assert len({*levels}) > 3


@pytest.mark.parametrize(("num_steps", "level"), [(15, 0), (16, 1), (31, 1), (32, 2), (64, 3)])
def test_mlfq_skips_the_levels_that_the_prompt_alone_would_use_up(num_steps: int, level: int) -> None:
    arrivals = Arrivals(SchedulingPolicy.MLFQ)
    new = arrivals.next(num_tokens=num_steps * STEP)
    begun = arrivals.next(num_tokens=num_steps * STEP, generated=(5,) * 90)

    assert arrivals.level(new) == level
    assert arrivals.level(begun) > level


def test_mlfq_level_is_a_function_of_the_tokens_wherever_they_were_generated() -> None:
    arrivals = Arrivals(SchedulingPolicy.MLFQ)
    moved_here, here = arrivals.next(generated=(5,) * 50), arrivals.next()
    here.token_ids += [5] * 50
    here.num_preemptions = 3

    assert arrivals.level(moved_here) == arrivals.level(here) == 2


@pytest.mark.parametrize("policy", [policy for policy in SchedulingPolicy if policy is not SchedulingPolicy.FCFS])
def test_who_waited_too_long_goes_before_all_others_for_good(policy: SchedulingPolicy) -> None:
    arrivals = Arrivals(policy, promote_after_s=10.0)
    starving = arrivals.next(priority=9, num_tokens=2000, max_tokens=999)
    arrivals.push(starving)
    arrivals.queue.promote(9.9)
    urgent = arrivals.next(priority=-9, deadline_s=1.0, max_tokens=1)
    arrivals.push(urgent, now_s=9.9)
    assert arrivals.queue.peek() is urgent

    arrivals.queue.promote(10.0)

    assert arrivals.queue.pop(10.0) is starving
    assert arrivals.level(starving) == PROMOTED_LEVEL
    arrivals.push(starving, now_s=11.0)
    assert arrivals.queue.peek() is starving


def test_stays_in_the_queue_add_up() -> None:
    arrivals = Arrivals(SchedulingPolicy.MLFQ, promote_after_s=10.0)
    sequence = arrivals.next()
    arrivals.push(sequence, now_s=50.0)
    arrivals.queue.pop(56.0)
    arrivals.push(sequence, now_s=100.0)

    arrivals.queue.promote(103.9)
    assert not sequence.is_promoted
    arrivals.queue.promote(104.0)
    assert sequence.is_promoted


def test_promoted_sequences_are_served_in_order_of_arrival() -> None:
    arrivals = Arrivals(SchedulingPolicy.SHORTEST_REMAINING, promote_after_s=1.0)
    sequences = [arrivals.next(max_tokens=max_tokens) for max_tokens in (50, 5, 20)]
    arrivals.push(*sequences)

    arrivals.queue.promote(1.0)

    assert arrivals.drain() == sequences


@pytest.mark.parametrize(("policy", "promote_after_s"), [(SchedulingPolicy.FCFS, 1.0), (SchedulingPolicy.MLFQ, None)])
def test_nobody_is_promoted_where_nobody_starves_or_never_is_said(
    policy: SchedulingPolicy, promote_after_s: float | None
) -> None:
    arrivals = Arrivals(policy, promote_after_s=promote_after_s)
    sequence = arrivals.next()
    arrivals.push(sequence)

    arrivals.queue.promote(1e9)

    assert not sequence.is_promoted


@pytest.mark.parametrize("index", [0, 1, 2])
def test_sequence_is_removed_from_any_place(index: int) -> None:
    arrivals = Arrivals(SchedulingPolicy.FCFS)
    sequences = [arrivals.next() for _ in range(3)]
    arrivals.push(*sequences)

    arrivals.queue.remove(sequences[index])

    assert arrivals.drain() == [sequence for sequence in sequences if sequence is not sequences[index]]


def test_tokens_of_all_waiting_are_counted() -> None:
    arrivals = Arrivals(SchedulingPolicy.MLFQ, promote_after_s=1.0)
    sequences = [arrivals.next(num_tokens=num_tokens) for num_tokens in (5, 3, 2)]
    arrivals.push(*sequences)
    arrivals.queue.promote(2.0)
    assert arrivals.queue.num_tokens == 10

    arrivals.queue.remove(sequences[1])
    arrivals.queue.pop(2.0)

    assert arrivals.queue.num_tokens == 2


def test_all_stays_in_the_queue_count_towards_promotion() -> None:
    arrivals = Arrivals(SchedulingPolicy.PRIORITY, promote_after_s=10.0)
    late = arrivals.next(priority=5)
    for start_s in (0.0, 100.0, 200.0):  # four seconds each time
        arrivals.push(late, now_s=start_s)
        arrivals.queue.promote(start_s + 4.0)
        assert arrivals.queue.pop(start_s + 4.0) is late
        assert late.is_promoted == (start_s == 200.0)
