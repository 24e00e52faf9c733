"""The order of the waiting queue."""

import pytest
from helpers.scheduling import make_request

from workers.queueing import WaitingQueue, serving_order
from workers.sequence import Sequence


class Arrivals:
    """Makes sequences in order of arrival under one policy."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.count = 0

    def next(self, *, priority: int = 0, generated: tuple[int, ...] = (), num_tokens: int = 1) -> Sequence:
        request = make_request(str(self.count), [7] * num_tokens, generated=generated, priority=priority)
        order = serving_order(self.policy, request, self.count)
        self.count += 1
        return Sequence(request=request, order=order, stop_token_ids=frozenset(), max_num_tokens=99, arrival_s=0.0)


def drain(queue: WaitingQueue) -> list[Sequence]:
    return [queue.pop() for _ in range(len(queue))]


def test_first_come_is_first_served_whatever_its_priority() -> None:
    arrivals, queue = Arrivals("fcfs"), WaitingQueue()
    sequences = [arrivals.next(priority=priority) for priority in (3, 1, 2)]
    for sequence in reversed(sequences):
        queue.push(sequence)

    assert queue.peek() is sequences[0]
    assert list(queue) == sequences
    assert drain(queue) == sequences
    assert queue.peek() is None


def test_lower_priority_number_is_served_first_then_arrival() -> None:
    arrivals, queue = Arrivals("priority"), WaitingQueue()
    sequences = [arrivals.next(priority=priority) for priority in (1, 0, 1, 0)]
    for sequence in sequences:
        queue.push(sequence)

    assert drain(queue) == [sequences[1], sequences[3], sequences[0], sequences[2]]


def test_sequences_served_before_come_before_new_ones() -> None:
    arrivals, queue = Arrivals("fcfs"), WaitingQueue()
    new, moved_here, preempted = arrivals.next(), arrivals.next(generated=(1, 2)), arrivals.next()
    preempted.num_preemptions = 1
    for sequence in (new, preempted, moved_here):
        queue.push(sequence)

    assert drain(queue) == [moved_here, preempted, new]


def test_preempted_sequence_does_not_overtake_a_higher_priority() -> None:
    arrivals, queue = Arrivals("priority"), WaitingQueue()
    preempted, urgent, ordinary = arrivals.next(priority=1), arrivals.next(priority=0), arrivals.next(priority=1)
    preempted.num_preemptions = 1
    for sequence in (preempted, urgent, ordinary):
        queue.push(sequence)

    assert drain(queue) == [urgent, preempted, ordinary]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_sequence_is_removed_from_any_place(index: int) -> None:
    arrivals, queue = Arrivals("fcfs"), WaitingQueue()
    sequences = [arrivals.next() for _ in range(3)]
    for sequence in sequences:
        queue.push(sequence)

    queue.remove(sequences[index])

    assert drain(queue) == [sequence for sequence in sequences if sequence is not sequences[index]]


def test_tokens_of_all_waiting_are_counted() -> None:
    arrivals, queue = Arrivals("fcfs"), WaitingQueue()
    sequences = [arrivals.next(num_tokens=num_tokens) for num_tokens in (5, 3, 2)]
    for sequence in sequences:
        queue.push(sequence)
    assert queue.num_tokens == 10

    queue.remove(sequences[1])
    queue.pop()

    assert queue.num_tokens == 2
