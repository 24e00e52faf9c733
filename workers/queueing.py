"""Who is served first: the scheduling policies, and the queue of those that wait.

Pure functions of a request, its tokens so far and its time in the queue; scheduler.py acts on them.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import assert_never

from workers.config import SchedulingPolicy
from workers.sequence import Sequence

PROMOTED_LEVEL = -(1 << 62)
"""Level of sequences that have waited too long, under every policy that could let them starve."""

PREFILL_TOKENS_PER_STEP = 64
"""Prompt tokens that take about as long to compute as one step of decoding: arithmetic weighed against reading the
weights gives 13 on a CPU with two cores (435 GFLOP/s, 34 GB/s) and 170 on an H200."""

QUANTUM_STEPS = 16
"""Service in the first level of "mlfq", in steps of decoding; twice as much in each further one."""

_ANY_NUMBER = 1 << 62

_Rank = tuple[int, float, int]
"""Level, rank within it, and the number of tokens from which they may be others; 0: they may be in any step."""


class ServingOrder:
    """Gives each sequence its place: (level, rank within it, arrival number), smaller first.

    A waiting sequence may displace a running one of a larger level; within a level nothing is displaced.

        policy               level                                        within
        fcfs                 the same for all                             arrival
        priority             the request's priority                       arrival
        deadline             0 with a deadline, 1 without                 earliest deadline
        shortest_remaining   number of bits of the steps left             fewest steps left
        mlfq                 queue, by first the prompt, then the output  arrival
    """

    def __init__(self, policy: SchedulingPolicy, *, promote_after_s: float | None) -> None:
        self.is_fixed = policy not in (SchedulingPolicy.SHORTEST_REMAINING, SchedulingPolicy.MLFQ)
        """Whether a sequence keeps its place for as long as it runs."""
        self.promote_after_s = math.inf
        """Time of waiting after which a sequence goes before all others."""
        if promote_after_s is not None and policy is not SchedulingPolicy.FCFS:
            self.promote_after_s = promote_after_s
        self._rank = _choose_rank(policy)

    def place(self, sequence: Sequence) -> None:
        """Give the sequence the place where it belongs now."""
        level, within, until = (PROMOTED_LEVEL, 0.0, _ANY_NUMBER) if sequence.is_promoted else self._rank(sequence)
        sequence.order = (level, within, sequence.arrival_number)
        sequence.order_until = until


class WaitingQueue:
    """Sequences that wait for a slot, those that were served before (preempted, or from another replica) first.

    They come first among those of equal rank. A sorted list: a heap would need tombstones for aborted requests, while
    moving a few kilobytes of pointers costs less than a microsecond.
    """

    def __init__(self, order: ServingOrder) -> None:
        self._order = order
        self._sequences: list[Sequence] = []  # the first to be served is last
        self._num_tokens = 0
        self._next_promotion_s = math.inf  # never later than the first promotion

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait."""
        return self._num_tokens

    def push(self, sequence: Sequence, now_s: float) -> None:
        """Add a sequence at its place; its tokens stay as they are while it waits."""
        sequence.waiting_since_s = now_s
        self._insert(sequence)
        self._next_promotion_s = min(self._next_promotion_s, self._promotion_s(sequence))

    def peek(self) -> Sequence | None:
        """Return the next to be served, None when nothing waits."""
        return self._sequences[-1] if self._sequences else None

    def pop(self, now_s: float) -> Sequence:
        """Remove and return the next to be served."""
        sequence = self._sequences.pop()
        sequence.waited_s += now_s - sequence.waiting_since_s
        self._num_tokens -= sequence.num_tokens
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        i = bisect_left(self._sequences, _queue_key(sequence), key=_queue_key)
        assert self._sequences[i] is sequence
        del self._sequences[i]
        self._num_tokens -= sequence.num_tokens

    def promote(self, now_s: float) -> None:
        """Put those whose time in the queue, all their stays together, has become too long before all others.

        They stay there until they end, in order of arrival: so whoever was preempted again and again is served at last.
        """
        if now_s < self._next_promotion_s:
            return
        due = [sequence for sequence in self._sequences if self._promotion_s(sequence) <= now_s]
        for sequence in due:
            self.remove(sequence)
            sequence.is_promoted = True
            self._insert(sequence)
        self._next_promotion_s = min(map(self._promotion_s, self._sequences), default=math.inf)

    def _insert(self, sequence: Sequence) -> None:
        self._order.place(sequence)
        insort(self._sequences, sequence, key=_queue_key)
        self._num_tokens += sequence.num_tokens

    def _promotion_s(self, sequence: Sequence) -> float:
        if sequence.is_promoted:
            return math.inf
        return sequence.waiting_since_s + self._order.promote_after_s - sequence.waited_s


def _queue_key(sequence: Sequence) -> tuple[int, float, bool, int]:
    level, within, arrival_number = sequence.order
    return (-level, -within, sequence.is_resumed, -arrival_number)


# The policies


def _choose_rank(policy: SchedulingPolicy) -> Callable[[Sequence], _Rank]:
    match policy:
        case SchedulingPolicy.FCFS:
            return lambda sequence: (0, 0.0, _ANY_NUMBER)
        case SchedulingPolicy.PRIORITY:
            return lambda sequence: (sequence.request.priority, 0.0, _ANY_NUMBER)
        case SchedulingPolicy.DEADLINE:
            return _rank_by_deadline
        case SchedulingPolicy.SHORTEST_REMAINING:
            return _rank_by_steps_left
        case SchedulingPolicy.MLFQ:
            return _rank_by_service
        case _:
            assert_never(policy)


def _rank_by_deadline(sequence: Sequence) -> _Rank:
    deadline_s = sequence.request.deadline_s
    return (1, 0.0, _ANY_NUMBER) if deadline_s is None else (0, deadline_s, _ANY_NUMBER)


def _rank_by_steps_left(sequence: Sequence) -> _Rank:
    """The level halves the work from one to the next, so that little is displaced for little."""
    num_tokens = len(sequence.token_ids)
    num_prefill = num_tokens - sequence.num_computed_tokens
    num_steps = sequence.max_num_tokens - num_tokens + num_prefill // PREFILL_TOKENS_PER_STEP
    return (num_steps.bit_length(), num_steps, 0)


def _rank_by_service(sequence: Sequence) -> _Rank:
    """The level of a multi-level feedback queue with skip-join (FastServe, arXiv:2305.05920, section 4).

    Level i grants quantum q_i = QUANTUM_STEPS * 2**i. A request joins at the first level whose quantum is more than its
    prompt takes, and sinks a level whenever its prompt and output so far have used up the quanta from there on:

        level = first i >= join with q_join + ... + q_i = QUANTUM_STEPS * (2**(i+1) - 2**join) > service

    What is computed again after a preemption does not count, so the level is a function of the tokens alone.
    """
    num_prefill_steps = sequence.num_prompt_tokens // PREFILL_TOKENS_PER_STEP
    join = (num_prefill_steps // QUANTUM_STEPS).bit_length()
    service = num_prefill_steps + sequence.num_output_tokens
    level = (service // QUANTUM_STEPS + (1 << join)).bit_length() - 1
    num_output_tokens = QUANTUM_STEPS * ((2 << level) - (1 << join)) - num_prefill_steps  # when it has used up this one
    return (level, 0.0, sequence.num_prompt_tokens + num_output_tokens)
