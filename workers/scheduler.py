"""Decides what each step computes: which sequences, how many tokens of each, in which blocks. Pure: no I/O, no clock.

There is no prefill phase and no decode phase. A sequence has `num_computed_tokens` and catches up with `num_tokens`
inside the token budget of a step; chunked prefill, prefix hits and preemption by recompute are this one loop.
Tensors are built in inputs.py from the plans made here.
"""

import logging
import math
from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from workers.batch import Batch, Flight
from workers.config import SchedulerConfig
from workers.errors import InvalidRequestError, QueueFullError, RequestFailedError
from workers.kv_cache_manager import KVCacheManager
from workers.limits import LengthLimits
from workers.plan import ModelOutput, SampledToken, ScheduledSequence, StepPlan
from workers.queueing import ServingOrder, WaitingQueue
from workers.request import Finish, FinishReason, Request, RequestId, TokenLogprobs
from workers.sequence import NO_SLOT, Order, Sequence, SequenceStatus, make_finish

logger = logging.getLogger(__name__)

_LEFT_BY_DISPLACEMENT = 0.5
"""Fraction of the pool that stays free for those that get a slot without displacing anyone."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave one sequence: a token (already in `sequence.token_ids`), or an error that ended it."""

    sequence: Sequence
    token_id: int | None
    """None exactly when `error` is set."""
    logprobs: TokenLogprobs | None = None
    finish: Finish | None = None
    """The token was the last one; the same as `sequence.finish`."""
    error: Exception | None = None
    """RequestFailedError: the sequence ended without a Finish."""


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start, for statistics."""

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption: its price."""
    num_prompt_tokens: int = 0
    """Prompt tokens of sequences that were scheduled a first time: the queries of the prefix cache."""
    num_cached_tokens: int = 0
    """Those found in the prefix cache: its hits."""
    num_host_tokens: int = 0
    """Of these, those that were brought back from the host."""


class Scheduler:
    """The decisions of one replica's step loop. One thread; every method is synchronous and fast.

    A step of the engine is

        for sequence in scheduler.expire(now): tell its client      # sequence.finish is set
        plan = scheduler.schedule(now)                              # until it returns None: several plans in flight
        outputs = scheduler.update(plan, model_output, now)         # the oldest plan first

    A sequence ends exactly once: with a TokenOutput that has `finish` or `error`, or in abort(), expire() or finish(),
    at once even while its step is in flight. No output follows; blocks and slot are given back when that step returns.

    Memory: a sequence is admitted when all its tokens fit and every running sequence keeps room for what it has and one
    block more. When blocks run out all the same, a running sequence that is later in order gives up its own for one
    before it, and waits; nothing is ever taken for one that is later. So the first in order always goes on, alone if
    it must be, and alone it fits: add() refuses what does not.

    Looking ahead: a sequence can be in the next plan too, whose share of it begins with the token that is being
    sampled; the ranks know that before the scheduler does. Should it turn out to be the last, the share was for
    nothing. Who gives way is in no plan in flight; where only such as are could, nothing is planned until they are
    back.

    Order is the policy's (queueing.py). Where it has levels, a waiting sequence displaces a running one of a later
    level from its slot, not from its blocks: those are kept while nobody needs them, so that mostly nothing is computed
    again. Of those that could give way, that of the last level does which has the least to compute again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        max_context: int,
        eos_token_ids: frozenset[int],
        max_in_flight: int,
        looks_ahead: bool = False,
    ) -> None:
        """`max_in_flight` plans at most; `looks_ahead`: a sequence is in up to two of them, else in one."""
        self.counters = SchedulerCounters()
        self._config = config
        self._cache = cache
        self._limits = LengthLimits(max_context=max_context, cache_tokens=cache.max_sequence_tokens(max_context))
        self._max_chunk_tokens = min(config.max_chunk_tokens, cache.max_chunk_tokens)
        self._eos_token_ids = eos_token_ids
        self._max_in_flight = max_in_flight
        self._looks_ahead = looks_ahead
        self._must_settle = False  # plan nothing until all plans are back
        self._num_left_by_displacement = int(cache.num_blocks * _LEFT_BY_DISPLACEMENT)
        self._sequences: dict[RequestId, Sequence] = {}  # not ended
        self._order = ServingOrder(config.policy, promote_after_s=config.promote_after_s)
        self._waiting = WaitingQueue(self._order)
        self._suspended: dict[Sequence, None] = {}  # those in the queue that kept their blocks
        self._running: list[Sequence] = []  # in order
        self._flights: deque[Flight] = deque()
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._removed_slots: list[int] = []  # given back since the last plan
        self._num_arrivals = 0
        self._num_plans = 0
        self._next_deadline_s: float | None = None  # never later than the first deadline

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a reason to step: a sequence that has not ended or a plan in flight."""
        return bool(self._sequences or self._flights)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans whose output has not come back."""
        return len(self._flights)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that wait to be computed; the one token that each decoding sequence always has is not counted."""
        num_kept = sum(sequence.num_computed_tokens for sequence in self._suspended)
        num_running = sum(num for sequence in self._running if (num := _num_not_computed(sequence)) > 1)
        return self._waiting.num_tokens - num_kept + num_running

    def add(self, request: Request, now_s: float) -> Sequence:
        """Queue a request.

        Raises:
            InvalidRequestError: no token to start from, no room for one more within max_context or max_tokens, an id in
                use, or more tokens than the whole pool could hold.
            QueueFullError: max_waiting requests wait already.
        """
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; allowed: a new one")
        self._limits.check(request)
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests wait; allowed: {self._config.max_waiting}")
        sampling = request.sampling
        sequence = Sequence(
            request=request,
            arrival_number=self._num_arrivals,
            stop_token_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else self._eos_token_ids),
            max_num_tokens=self._limits.max_num_tokens(request),
            arrival_s=now_s,
        )
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence, now_s)
        self._watch_deadline(sequence)
        return sequence

    def abort(self, request_id: RequestId, now_s: float) -> Sequence | None:
        """End a sequence for its client and return it, `finish` set to ABORT; None when no such sequence goes on."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, FinishReason.ABORT, now_s)
        return sequence

    def expire(self, now_s: float) -> list[Sequence]:
        """End the sequences whose deadline has passed, `finish` set to ABORT, and return them."""
        if self._next_deadline_s is None or now_s < self._next_deadline_s:
            return []
        self._next_deadline_s = None
        expired = []
        for sequence in list(self._sequences.values()):
            deadline_s = sequence.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self.finish(sequence, FinishReason.ABORT, now_s)
                expired.append(sequence)
            else:
                self._watch_deadline(sequence)
        return expired

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, *, stop_string: str | None = None
    ) -> Finish:
        """End a sequence for a reason that the caller found (a stop string, say); it must not have ended before."""
        sequence.finish = make_finish(sequence, reason, now_s, stop_string=stop_string)
        self._end(sequence)
        return sequence.finish

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step; None when there is nothing to do, or nothing that is not in flight.

        Decodes (one token left to compute) are served first, then running prefills and the queue, each in order: the
        queue after all prefills that are not of a later level.
        """
        if len(self._flights) >= self._max_in_flight or (self._flights and self._must_settle):
            return None
        self._must_settle = False
        self._waiting.promote(now_s)
        if not self._order.is_fixed:
            self._sort_running()
        batch = Batch(budget=self._config.max_num_batched_tokens, now_s=now_s)
        decodes, prefills = self._split_ready()
        for sequence in decodes:
            self._share(batch, sequence, 1)
        for sequence in prefills:
            self._admit(batch, before_level=sequence.order[0])
            if not batch.budget:
                break
            self._share(batch, sequence, self._chunk(sequence, batch.budget))
        self._admit(batch)
        return self._launch(batch) if batch.shares else None

    def update(self, plan: StepPlan, output: ModelOutput, now_s: float) -> list[TokenOutput]:
        """Take the output of the oldest plan in flight: append tokens, finish or go on.

        Raises:
            GroupFailedError: the output is not that plan's.
        """
        flight = self._flights[0]
        assert flight.plan is plan, f"plan {plan.number} is not the oldest in flight, {flight.plan.number} is"
        flight.check_answers(output)
        self._flights.popleft()
        sampled = iter(output.sampled)
        outputs = []
        for sequence, share in zip(flight.sequences, plan.scheduled, strict=True):
            token = next(sampled) if share.samples else None
            token_output = self._land(sequence, share, token, now_s)
            if token_output is not None:
                outputs.append(token_output)
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks, slots, queue and plans contradict each other. Slow: for tests."""
        in_flight = Counter(sequence for flight in self._flights for sequence in flight.sequences)
        assert max(in_flight.values(), default=0) <= 1 + self._looks_ahead, "a sequence is in too many plans"
        ended = [sequence for sequence in in_flight if sequence.status is SequenceStatus.FINISHED]
        holders = [*self._running, *ended]
        self._cache.check_integrity([*holders, *self._suspended])
        slots = [*self._free_slots, *(sequence.slot for sequence in holders)]
        assert sorted(slots) == list(range(self._config.max_num_seqs)), f"slots are lost or used twice: {slots}"
        assert in_flight == Counter({sequence: num for sequence in holders if (num := sequence.num_in_flight)})
        for sequence in self._running:
            assert sequence.num_in_flight or sequence.num_scheduled_tokens == sequence.num_computed_tokens
        assert all(sequence.status is SequenceStatus.RUNNING for sequence in self._running)
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            if sequence not in self._suspended:
                assert not sequence.block_table
                assert sequence.num_scheduled_tokens == sequence.num_computed_tokens == 0
        assert self._suspended.keys() <= set(self._waiting), "a sequence is suspended and does not wait"
        assert set(self._sequences.values()) == {*self._running, *self._waiting}, "a sequence is lost"
        assert len(self._sequences) == len(self._running) + len(self._waiting)
        assert self._running == sorted(self._running, key=_order), "running sequences are not in order"
        assert self._waiting.num_tokens == sum(sequence.num_tokens for sequence in self._waiting)
        assert len(self._flights) <= self._max_in_flight

    # Putting a step together

    def _sort_running(self) -> None:
        for sequence in self._running:
            sequence.order = self._order.place(sequence)
        self._running.sort(key=_order)

    def _split_ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences that can go on: those to decode now, and those with more to compute.

        With several plans in flight each takes an equal part of the decodes, or the first would take all and the other
        stages of the pipeline would idle. None waits longer than max_in_flight plans.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running:
            if not sequence.num_in_flight or (self._looks_ahead and _can_run_ahead(sequence)):
                (decodes if sequence.num_left == 1 else prefills).append(sequence)
        if self._max_in_flight > 1 and not self._looks_ahead:
            del decodes[-(-len(self._running) // self._max_in_flight) :]
        return decodes, prefills

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_left, self._max_chunk_tokens, budget)

    def _share(self, batch: Batch, sequence: Sequence, num_tokens: int) -> None:
        """Give a running sequence its share of the step, preempting later ones for its blocks.

        Without success it keeps what it has and is not in this step: later ones are in flight or needed in this step,
        or there are none and earlier ones will take its blocks or finish.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted a moment ago, for this step
        while not self._cache.allocate(sequence, num_tokens):
            if self._suspended:
                self._drop_blocks(max(self._suspended, key=self._victim_key))
                continue
            later = self._running[self._running.index(sequence) + 1 :]
            victims = [candidate for candidate in later if _may_yield(candidate, batch)]
            if not victims:
                self._must_settle = self._looks_ahead and bool(later)
                return
            self._preempt(batch, max(victims, key=self._victim_key))
        batch.add(sequence, num_tokens, self._cache.commit(sequence, num_tokens))

    def _victim_key(self, sequence: Sequence) -> tuple[int, int, Order]:
        """Largest for who gives way first: the one of the last level with the least to compute again."""
        return (sequence.order[0], -self._cache.num_tokens_at_risk(sequence), sequence.order)

    def _preempt(self, batch: Batch, sequence: Sequence) -> None:
        """Take slot and blocks from a running sequence; it keeps its tokens and is computed again."""
        self._suspend(batch, sequence)
        self._drop_blocks(sequence)

    def _suspend(self, batch: Batch, sequence: Sequence) -> None:
        """Take the slot from a running sequence; it waits, and keeps its blocks until somebody needs them."""
        batch.drop(sequence)
        self._cache.retract(sequence)
        self.counters.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_lost_tokens = 0
        self._running.remove(sequence)
        self._release_slot(sequence)
        sequence.status = SequenceStatus.WAITING
        self._suspended[sequence] = None
        self._waiting.push(sequence, batch.now_s)

    def _drop_blocks(self, sequence: Sequence) -> None:
        """Take the blocks from a suspended sequence."""
        logger.warning(
            "request %s preempted with %d of %d tokens computed",
            sequence.request_id,
            sequence.num_computed_tokens,
            sequence.num_tokens,
        )
        del self._suspended[sequence]
        self._cache.free(sequence)
        sequence.num_lost_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0

    def _admit(self, batch: Batch, *, before_level: float = math.inf) -> None:
        """Start waiting sequences of earlier levels while there are slots, or running ones to displace, budget and
        memory. None overtakes one that has to wait.
        """
        sequence = self._next_to_start(before_level)
        if sequence is None or not batch.budget:
            return
        reserve = sum(self._cache.num_reserved_blocks(running) for running in self._running)
        victims: list[Sequence] | None = None  # who could be displaced, last is first
        while sequence is not None and batch.budget:
            displaces = not self._free_slots
            if displaces:
                victims = sorted(self._running, key=self._victim_key) if victims is None else victims
                victims = [victim for victim in victims if _may_yield(victim, batch)]
            if displaces and not (victims and victims[-1].order[0] > sequence.order[0]):
                self._must_settle = self._looks_ahead  # for one that could give way, which _next_to_start has seen
                return
            if not self._find_room(sequence, reserve, displaces=displaces):
                return
            if displaces and victims:
                victim = victims.pop()
                reserve -= self._cache.num_reserved_blocks(victim)
                self._suspend(batch, victim)
            self._waiting.pop(batch.now_s)
            self._start(sequence, batch.now_s)
            batch.start(sequence)
            self._share(batch, sequence, self._chunk(sequence, batch.budget))
            reserve += self._cache.num_reserved_blocks(sequence)
            sequence = self._next_to_start(before_level)

    def _next_to_start(self, before_level: float) -> Sequence | None:
        """Return the first that waits, if it is of an earlier level and there may be a slot for it."""
        sequence = self._waiting.peek()
        if sequence is None or sequence.order[0] >= before_level:
            return None
        if self._free_slots:
            return sequence
        has_room = self._cache.num_free_blocks > self._num_left_by_displacement
        has_later = bool(self._running) and self._running[-1].order[0] > sequence.order[0]
        return sequence if has_room and has_later else None

    def _find_room(self, sequence: Sequence, reserve: int, *, displaces: bool) -> bool:
        """Return whether a waiting sequence fits, `reserve` blocks left free; then it holds what of it is computed.

        It takes blocks from suspended ones where it must, but not to displace another: then it leaves a part of the
        pool free, or more and more suspended sequences would fill it and lose their blocks to each other.
        """
        if displaces:
            return self._take_blocks(sequence, reserve + self._num_left_by_displacement)
        while not self._take_blocks(sequence, reserve):
            others = [other for other in self._suspended if other is not sequence]
            if not others:
                return False
            self._drop_blocks(max(others, key=self._victim_key))
        return True

    def _take_blocks(self, sequence: Sequence, reserve: int) -> bool:
        cache = self._cache
        if sequence in self._suspended:
            return cache.fits_rest(sequence, reserve=reserve)
        prefix = cache.match_prefix(sequence)
        if not cache.fits(sequence, prefix, reserve=reserve):
            return False
        cache.share(sequence, prefix)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = sequence.num_full_blocks * cache.block_size
        return True

    def _start(self, sequence: Sequence, now_s: float) -> None:
        """Make a waiting sequence, which has the blocks of what is computed of it, a running one."""
        self._suspended.pop(sequence, None)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
            self.counters.num_cached_tokens += sequence.num_cached_tokens
            self.counters.num_host_tokens += min(sequence.num_host_tokens, sequence.num_cached_tokens)
        else:
            self.counters.num_recomputed_tokens += max(0, sequence.num_lost_tokens - sequence.num_computed_tokens)
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        insort(self._running, sequence, key=_order)

    def _launch(self, batch: Batch) -> StepPlan:
        flight = batch.launch(self._num_plans, self._removed_slots, self._cache.take_copies())
        self._num_plans += 1
        self._removed_slots = []
        self._flights.append(flight)
        return flight.plan

    # Taking a step's output

    def _land(
        self, sequence: Sequence, share: ScheduledSequence, token: SampledToken | None, now_s: float
    ) -> TokenOutput | None:
        """Account for a sequence's share that came back."""
        sequence.num_in_flight -= 1
        sequence.num_sampling -= share.samples
        if token is not None and token.error is not None:
            self._cache.retract(sequence)  # what led to an error must not be shared
        elif share.start == sequence.num_computed_tokens:  # the share before it did not end in an error
            sequence.num_computed_tokens += share.num_tokens
            self._cache.commit(sequence, 0)
            self._cache.settle(sequence)
        if sequence.status is SequenceStatus.FINISHED:
            if not sequence.num_in_flight:
                self._release(sequence)
            return None
        if token is None:
            return None
        if token.error is not None:
            self._end(sequence)
            return TokenOutput(sequence=sequence, token_id=None, error=RequestFailedError(token.error))
        return self._append(sequence, token, now_s)

    def _append(self, sequence: Sequence, token: SampledToken, now_s: float) -> TokenOutput:
        token_id = token.token_id
        sequence.token_ids.append(token_id)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        if token_id in sequence.stop_token_ids and sequence.num_output_tokens > sequence.request.sampling.min_tokens:
            sequence.finish = make_finish(sequence, FinishReason.STOP, now_s, stop_token_id=token_id)
            self._end(sequence)
        elif len(sequence.token_ids) >= sequence.max_num_tokens:
            self.finish(sequence, FinishReason.LENGTH, now_s)
        return TokenOutput(sequence=sequence, token_id=token_id, logprobs=token.logprobs, finish=sequence.finish)

    # The end of a sequence

    def _watch_deadline(self, sequence: Sequence) -> None:
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None and (self._next_deadline_s is None or deadline_s < self._next_deadline_s):
            self._next_deadline_s = deadline_s

    def _end(self, sequence: Sequence) -> None:
        """Take an ended sequence off the books. What it holds is given back now, or when its step in flight returns."""
        del self._sequences[sequence.request_id]
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self._suspended.pop(sequence, None)
            self._cache.free(sequence)
        else:
            self._running.remove(sequence)
            if not sequence.num_in_flight:
                self._release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _release(self, sequence: Sequence) -> None:
        self._cache.free(sequence)
        self._release_slot(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        self._free_slots.append(sequence.slot)
        self._removed_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        sequence.num_planned_tokens = 0
        sequence.num_planned_blocks = 0


_order = attrgetter("order")


def _may_yield(sequence: Sequence, batch: Batch) -> bool:
    """Whether a running sequence can give up its blocks or its slot now."""
    return not (sequence.num_in_flight or sequence in batch.needed)


def _can_run_ahead(sequence: Sequence) -> bool:
    """Whether a sequence in flight can be in the next plan too: it goes on, unless the token being sampled is its last.

    Penalties need that token on the host before the next one is sampled.
    """
    if not sequence.num_sampling:
        return sequence.num_left > 0
    num_tokens = sequence.num_tokens + sequence.num_sampling
    return num_tokens < sequence.max_num_tokens and not sequence.request.sampling.has_penalties


def _num_not_computed(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed_tokens
