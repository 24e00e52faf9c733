"""Who runs, who waits, and what each of them holds meanwhile: the sequences of one replica, and every move of theirs.

    waiting ── start ──> running ── suspend ──> waiting, with its blocks ── drop ──> waiting, without

A running sequence holds a slot and blocks. Who moves, and when, is decided in scheduler.py; the place of a sequence
among the others is queueing.py's, and which blocks it gets kv_cache_manager.py's.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from operator import attrgetter

from workers.kv_cache_manager import KVCacheManager
from workers.queueing import ServingOrder, WaitingQueue
from workers.sequence import NO_SLOT, Sequence, SequenceStatus

logger = logging.getLogger(__name__)

_LEFT_BY_DISPLACEMENT = 0.5
"""Fraction of the pool that stays free for those that get a slot without displacing anyone."""


@dataclass(slots=True)
class RosterCounters:
    """Totals since the start, for statistics."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption: its price."""
    num_prompt_tokens: int = 0
    """Prompt tokens of sequences that were scheduled a first time: the queries of the prefix cache."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, when their sequence was first scheduled or later: its hits."""
    num_host_tokens: int = 0
    """Cached tokens that were brought back from the host."""


class Roster:
    """Every sequence of one replica that has not ended, and those that have and are still in a plan in flight."""

    def __init__(self, cache: KVCacheManager, order: ServingOrder, *, num_slots: int) -> None:
        self.counters = RosterCounters()
        self.running: list[Sequence] = []
        """Sequences with a slot, in serving order. To read: the methods change it."""
        self._cache = cache
        self._order = order
        self._num_slots = num_slots
        self._num_left_by_displacement = int(cache.num_blocks * _LEFT_BY_DISPLACEMENT)
        self._waiting = WaitingQueue(order)
        self._suspended: dict[Sequence, None] = {}  # those in the queue that kept their blocks
        self._passed_over: dict[Sequence, float] = {}  # those with a slot and no share, as of when
        self._free_slots = list(reversed(range(num_slots)))
        self._removed_slots: dict[int, None] = {}  # given back since they were last taken

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that have not ended: first the running ones, then the queue."""
        yield from self.running
        yield from self._waiting

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that wait to be computed; the one token that each decoding sequence always has is not counted."""
        num_kept = sum(sequence.num_computed_tokens for sequence in self._suspended)
        nums_left = (len(sequence.token_ids) - sequence.num_computed_tokens for sequence in self.running)
        return self._waiting.num_tokens - num_kept + sum(num for num in nums_left if num > 1)

    @property
    def has_free_slot(self) -> bool:
        """Whether a sequence could start without displacing another."""
        return bool(self._free_slots)

    def renew_order(self, now_s: float) -> None:
        """Give every sequence whose place can have changed the one that it has now."""
        self._waiting.promote(now_s)
        due = self._promote_passed_over(now_s) if self._passed_over else []
        if not self._order.is_fixed:
            due += [sequence for sequence in self.running if len(sequence.token_ids) >= sequence.order_until]
        for sequence in due:
            self._order.place(sequence)
        if due:
            self.running.sort(key=_order)

    def note_passed_over(self, sequences: Iterable[Sequence], now_s: float) -> None:
        """Note which running sequences have a part of their prompt left and are in no step. They wait as in the queue:
        others of an earlier level could take all steps from one that has begun, for ever.
        """
        before, self._passed_over = self._passed_over, dict.fromkeys(sequences, now_s)
        for sequence, since_s in before.items():
            sequence.waited_s += now_s - since_s

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Let a new sequence wait."""
        self._waiting.push(sequence, now_s)

    def leave(self, sequence: Sequence) -> None:
        """Take out an ended sequence. It gives back what it holds; one in a plan in flight keeps it until `release`."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self._suspended.pop(sequence, None)
            self._cache.free(sequence)
        else:
            del self.running[self._index(sequence)]
            self._passed_over.pop(sequence, None)
            if not sequence.num_in_flight:
                self.release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def release(self, sequence: Sequence) -> None:
        """Give back slot and blocks of an ended sequence."""
        self._cache.free(sequence)
        self._release_slot(sequence)

    def take_removed_slots(self) -> list[int]:
        """Return the slots that were given back since the last call, be it to be taken anew."""
        removed, self._removed_slots = self._removed_slots, {}
        return list(removed)

    def later_than(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences after this one."""
        return self.running[self._index(sequence) + 1 :]

    def in_yield_order(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield who gives way, first to last: those of the last level first, and of these the one with the least to
        compute again, of equal ones the last in order.

        What each has to compute again is looked at as late as can be, and closely only where it decides.
        """
        for _, group in groupby(sorted(sequences, key=_order, reverse=True), key=_level):
            level = list(group)
            heap = [(self._cache.least_tokens_at_risk(sequence), i, False) for i, sequence in enumerate(level)]
            heapify(heap)
            while heap:
                _, i, is_exact = heap[0]
                if is_exact:
                    heappop(heap)
                    yield level[i]
                else:
                    heapreplace(heap, (self._cache.num_tokens_at_risk(level[i]), i, True))

    # From the queue to a slot

    def next_to_start(self, before_level: float) -> Sequence | None:
        """Return the first that waits, if it is of an earlier level and there may be a slot for it."""
        sequence = self._waiting.peek()
        if sequence is None or sequence.order[0] >= before_level:
            return None
        if self._free_slots:
            return sequence
        has_room = self._cache.num_free_blocks > self._num_left_by_displacement
        has_later = bool(self.running) and self.running[-1].order[0] > sequence.order[0]
        return sequence if has_room and has_later else None

    def find_room(self, sequence: Sequence, reserve: int, *, displaces: bool) -> bool:
        """Return whether a waiting sequence fits, `reserve` blocks left free; then it holds what of it is computed.

        It takes blocks from suspended ones where it must, but not to displace another: then it leaves a part of the
        pool free, or more and more suspended sequences would fill it and lose their blocks to each other.
        """
        if displaces:
            return self._take_blocks(sequence, reserve + self._num_left_by_displacement)
        if self._take_blocks(sequence, reserve):
            return True
        kept = sum(self._cache.num_held_blocks(other) for other in self._suspended if other is not sequence)
        if not kept or self._find_prefix(sequence, reserve - kept) is None:
            return False  # nor would it fit if all of them gave way
        while self.drop_suspended(but=sequence):
            if self._take_blocks(sequence, reserve):
                return True
        return False

    def fits_displacing(self, sequence: Sequence, reserve: int) -> bool:
        """Return whether a waiting sequence would `find_room` by displacing another."""
        return self._find_prefix(sequence, reserve + self._num_left_by_displacement) is not None

    def start(self, sequence: Sequence, now_s: float) -> None:
        """Give a slot to the first that waits, which holds the blocks of what is computed of it."""
        first = self._waiting.pop(now_s)
        assert first is sequence, "none overtakes one that has to wait"
        self._suspended.pop(sequence, None)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens
            self.counters.num_host_tokens += sequence.num_host_tokens
        else:
            self.counters.num_recomputed_tokens += max(0, sequence.num_lost_tokens - sequence.num_computed_tokens)
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        insort(self.running, sequence, key=_order)

    def skip_ahead(self, sequence: Sequence) -> bool:
        """Let a running sequence go on from what others have computed of its prompt meanwhile; False if they have not.

        It keeps its slot, and starts anew there: its blocks are others than before. All of it fits as before.
        """
        cache, num_had = self._cache, sequence.num_scheduled_tokens
        prefix = cache.match_prefix(sequence) if cache.knows_next(sequence) else []
        if len(prefix) // cache.layout.num_groups * cache.block_size <= num_had:
            return False
        if not cache.fits(sequence, prefix, reserve=0):
            return False
        cache.free(sequence)
        sequence.num_host_tokens = 0
        self._share(sequence, prefix)
        self._removed_slots[sequence.slot] = None
        sequence.num_planned_blocks = 0
        if not sequence.num_preemptions:  # else what was found is not counted either
            num_prompt = sequence.num_prompt_tokens
            num_more = min(sequence.num_computed_tokens, num_prompt) - min(num_had, num_prompt)
            sequence.num_cached_tokens += num_more
            self.counters.num_cached_tokens += num_more
            self.counters.num_host_tokens += min(sequence.num_host_tokens, num_more)
        return True

    # From a slot to the queue

    def suspend(self, sequence: Sequence, now_s: float) -> None:
        """Take the slot from a running sequence; it waits, and keeps its blocks until somebody needs them."""
        self._cache.retract(sequence)
        self.counters.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_lost_tokens = 0
        del self.running[self._index(sequence)]
        self._release_slot(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.waited_s += now_s - self._passed_over.pop(sequence, now_s)
        self._suspended[sequence] = None
        self._waiting.push(sequence, now_s)

    def drop_suspended(self, *, but: Sequence | None = None) -> bool:
        """Take the blocks from the suspended sequence that gives way first; False when there is none but `but`."""
        first = next(self.in_yield_order(sequence for sequence in self._suspended if sequence is not but), None)
        if first is None:
            return False
        logger.warning(
            "request %s preempted with %d of %d tokens computed",
            first.request_id,
            first.num_computed_tokens,
            first.num_tokens,
        )
        del self._suspended[first]
        self._cache.free(first)
        first.num_lost_tokens = first.num_computed_tokens
        first.num_computed_tokens = first.num_scheduled_tokens = 0
        return True

    def check_integrity(self, ended: list[Sequence]) -> None:
        """Raise AssertionError when blocks, slots and queue contradict each other. Slow: for tests.

        `ended` are those that hold a slot and blocks only because they are in a plan in flight.
        """
        holders = [*self.running, *ended]
        self._cache.check_integrity([*holders, *self._suspended])
        slots = [*self._free_slots, *(sequence.slot for sequence in holders)]
        assert sorted(slots) == list(range(self._num_slots)), f"slots are lost or used twice: {slots}"
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in self.running)
        for sequence in self.running:
            assert sequence.num_in_flight or sequence.num_scheduled_tokens == sequence.num_computed_tokens
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            if sequence not in self._suspended:
                assert not sequence.block_table
                assert sequence.num_scheduled_tokens == sequence.num_computed_tokens == 0
        assert self._suspended.keys() <= set(self._waiting), "a sequence is suspended and does not wait"
        assert self.running == sorted(self.running, key=_order), "running sequences are not in order"
        assert self._passed_over.keys() <= set(self.running), "one without a slot waits in it"
        assert self._waiting.num_tokens == sum(sequence.num_tokens for sequence in self._waiting)

    def _promote_passed_over(self, now_s: float) -> list[Sequence]:
        """Promote the running sequences that have waited too long, and return them."""
        due = [
            sequence
            for sequence, since_s in self._passed_over.items()
            if not sequence.is_promoted and sequence.waited_s + now_s - since_s >= self._order.promote_after_s
        ]
        for sequence in due:
            sequence.is_promoted = True
        return due

    def _index(self, sequence: Sequence) -> int:
        """Where a sequence is among those that run."""
        index = bisect_left(self.running, sequence.order, key=_order)
        assert self.running[index] is sequence, "it does not run, or is not at its place"
        return index

    def _find_prefix(self, sequence: Sequence, reserve: int) -> list[int] | None:
        """Return the blocks that a waiting sequence can share, none if it kept its own; None where it does not fit."""
        cache = self._cache
        if sequence in self._suspended:
            return [] if cache.fits_rest(sequence, reserve=reserve) else None
        prefix = cache.match_prefix(sequence)
        return prefix if cache.fits(sequence, prefix, reserve=reserve) else None

    def _take_blocks(self, sequence: Sequence, reserve: int) -> bool:
        prefix = self._find_prefix(sequence, reserve)
        if prefix is not None and sequence not in self._suspended:
            self._share(sequence, prefix)
        return prefix is not None

    def _share(self, sequence: Sequence, prefix: list[int]) -> None:
        """Let a sequence without blocks start from what was found for it."""
        self._cache.share(sequence, prefix)
        num_shared = sequence.num_full_blocks * self._cache.block_size
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_shared

    def _release_slot(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        self._removed_slots[sequence.slot] = None
        sequence.slot = NO_SLOT
        sequence.num_planned_blocks = 0


_order = attrgetter("order")


def _level(sequence: Sequence) -> int:
    return sequence.order[0]
