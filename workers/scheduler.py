"""Decides what each step computes: which sequences, how many tokens of each, in which blocks. Pure: no I/O, no clock.

There is no prefill phase and no decode phase. A sequence has `num_computed_tokens` and catches up with `num_tokens`
inside the token budget of a step; chunked prefill, prefix hits and preemption by recompute are this one loop.
Slots and the queue are kept in roster.py; tensors are built in inputs.py from the plans made here.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from workers.batch import Batch, InFlightPlan
from workers.config import SchedulerConfig
from workers.errors import InvalidRequestError, QueueFullError, RequestFailedError
from workers.kv_cache_manager import KVCacheManager
from workers.limits import LengthLimits, find_end, stop_ids
from workers.plan import ModelOutput, StepPlan
from workers.queueing import ServingOrder
from workers.request import Finish, FinishReason, Request, RequestId, TokenLogprobs
from workers.roster import Roster
from workers.sequence import NO_SLOT, Sequence, SequenceStatus

_MIN_PART = 128
"""Tokens of prompts that a plan is not cut below for the sake of others in flight: with as many, most devices compute
longer than they read weights."""
_PARTS_OF_PLAN = 4
"""Plans that what is left of prompts is divided into, for each in flight: the stages wait for the first of them, and
after the last."""
_FINISHED = SequenceStatus.FINISHED  # for each share: Python 3.11 takes 60 ns to find a member of an enum


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one sequence: a token (already in `sequence.token_ids`), or an error that ended it.

    In no cycle, hence not the business of the garbage collector, which would else run in most steps of 256 sequences.
    """

    sequence: Sequence
    token_id: int | None
    """None exactly when `error` is set."""
    logprobs: TokenLogprobs | None = None
    finish: Finish | None = None
    """How the sequence ended, if the token was its last: `sequence.finish`."""
    error: Exception | None = None
    """RequestFailedError that ended the sequence, which then has no `finish`."""


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

    Several plans in flight: a prompt can be in all of them, a chunk in each, for every stage computes them in order.
    Each plan has a part of the prompts that are left and of the sequences that decode, so that all stages have
    something to do.

    Looking ahead: a sequence can be in the next plan too, whose share of it begins with the token that is being
    sampled; the ranks know that before the scheduler does. Should it turn out to be the last, the share was for
    nothing. A sequence that is in a plan in flight does not give way. Where only such ones could, and would be planned
    again before they are back, nothing is planned until all are back: else none would ever give way.

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
        """At most `max_in_flight` plans; `looks_ahead`: two of them may sample for the same sequence, else one."""
        self._config = config
        self._cache = cache
        self.limits = LengthLimits(max_context=max_context, cache_tokens=cache.layout.max_sequence_tokens(max_context))
        self._max_chunk_tokens = min(
            config.max_chunk_tokens, max(1, cache.layout.max_tokens_in_flight // max_in_flight)
        )
        self._eos_token_ids = eos_token_ids
        self._max_in_flight = max_in_flight
        self._looks_ahead = looks_ahead
        self._is_divided = max_in_flight > 1 and not looks_ahead  # what there is, over the plans in flight
        self._must_settle = False  # plan nothing until all plans are back
        self._sequences: dict[RequestId, Sequence] = {}  # not ended
        order = ServingOrder(config.policy, promote_after_s=config.promote_after_s)
        self._roster = Roster(cache, order, num_slots=config.max_num_seqs)
        self.counters = self._roster.counters
        self._in_flight: deque[InFlightPlan] = deque()
        self._num_arrivals = 0
        self._num_plans = 0
        self._has_had_work = False  # ever since the latest plan
        self._next_deadline_s: float | None = None  # never later than the first deadline

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a reason to step: a sequence that has not ended or a plan in flight."""
        return bool(self._sequences or self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return self._roster.num_waiting

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that wait to be computed; the one token that each decoding sequence always has is not counted."""
        return self._roster.num_pending_tokens

    def add(self, request: Request, now_s: float) -> Sequence:
        """Queue a request.

        Raises:
            InvalidRequestError: no token to start from, no room for one more within max_context or max_tokens, an id in
                use, or more tokens than the whole pool could hold.
            QueueFullError: max_waiting requests wait already.
        """
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; allowed: a new one")
        self.limits.check(request)
        if self.num_waiting >= self._config.max_waiting:
            raise QueueFullError(f"{self.num_waiting} requests wait; allowed: {self._config.max_waiting}")
        sequence = Sequence(
            request=request,
            arrival_number=self._num_arrivals,
            stop_token_ids=stop_ids(request.sampling, self._eos_token_ids),
            max_num_tokens=self.limits.max_num_tokens(request),
            arrival_s=now_s,
        )
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._roster.enter(sequence, now_s)
        self._watch_deadline(sequence)
        return sequence

    def abort(self, request_id: RequestId, now_s: float) -> Sequence | None:
        """End a sequence for its client and return it, `finish` set to ABORT; None when no such sequence goes on."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT, now_s)
        return sequence

    def has_expired(self, now_s: float) -> bool:
        """Whether `expire` may find a sequence."""
        return self._next_deadline_s is not None and now_s >= self._next_deadline_s

    def expire(self, now_s: float) -> list[Sequence]:
        """End the sequences whose deadline has passed, `finish` set to ABORT, and return them."""
        if not self.has_expired(now_s):
            return []
        self._next_deadline_s = None
        expired = []
        for sequence in list(self._sequences.values()):
            deadline_s = sequence.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._finish(sequence, FinishReason.ABORT, now_s)
                expired.append(sequence)
            else:
                self._watch_deadline(sequence)
        return expired

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, *, stop_string: str | None = None
    ) -> Finish:
        """End a sequence for a reason that the caller found (a stop string, say); it must not have ended before."""
        return self._finish(sequence, reason, now_s, stop_string=stop_string)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step; None when there is nothing to do, or nothing that is not in flight.

        Decodes (one token left to compute) are served first, then running prefills and the queue, each in order: the
        queue after all prefills that are not of a later level.
        """
        if len(self._in_flight) >= self._max_in_flight or (self._in_flight and self._must_settle):
            return None
        self._must_settle = False
        self._roster.renew_order(now_s)
        batch = Batch(budget=self._config.max_num_batched_tokens, now_s=now_s)
        decodes, prefills = self._split_ready()
        self._share_decodes(batch, decodes)
        if self._is_divided:
            batch.budget = min(batch.budget, self._part_of_prompts())
        for sequence in prefills:
            self._admit(batch, before_level=sequence.order[0])
            if not batch.budget:
                break
            if sequence.slot != NO_SLOT and self._roster.skip_ahead(sequence):
                batch.start(sequence)
            self._share(batch, sequence, self._chunk(sequence, batch.budget))
        self._admit(batch)
        self._roster.note_passed_over(_without_share(batch, prefills), now_s)
        return self._launch(batch) if batch.shares else None

    def update(self, plan: StepPlan, output: ModelOutput, now_s: float) -> list[TokenOutput]:
        """Take the output of the oldest plan in flight: append tokens, finish or go on.

        Raises:
            GroupFailedError: the output is not that plan's.
        """
        oldest = self._in_flight[0]
        assert oldest.plan is plan, f"plan {plan.number} is not the oldest in flight, {oldest.plan.number} is"
        oldest.check_answers(output)
        self._in_flight.popleft()
        sampled = iter(output.token_ids)
        shares, logprobs, block_size = plan.scheduled, output.logprobs, self._cache.block_size
        outputs = []  # each token of each sequence passes here: no calls but where something happens
        for sequence, slot, start, num_tokens, samples in zip(
            oldest.sequences, shares.slots, shares.starts, shares.nums_tokens, shares.samples, strict=True
        ):
            token_id = next(sampled) if samples else 0
            sequence.num_in_flight -= 1
            sequence.num_sampling -= samples
            if token_id < 0:
                self._cache.disown(sequence)  # what led to an error must not be shared, be it a prefix that was found
            elif start == sequence.num_computed_tokens:  # the share before it did not end in an error
                sequence.num_computed_tokens = end = start + num_tokens
                if end % block_size < num_tokens:  # else it fills no block
                    self._cache.settle(sequence)
            if sequence.status is _FINISHED:
                if not sequence.num_in_flight:
                    self._roster.release(sequence)
            elif token_id < 0:
                self._end(sequence)
                error = RequestFailedError(output.errors.get(slot, "nothing was sampled"))
                outputs.append(TokenOutput(sequence, None, error=error))
            elif samples:
                token_ids = sequence.token_ids
                token_ids.append(token_id)
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
                if token_id in sequence.stop_token_ids or len(token_ids) >= sequence.max_num_tokens:
                    self._end_with(sequence, token_id, now_s)  # only where it can: most tokens are spared the call
                logprob = logprobs.get(slot) if logprobs else None
                outputs.append(TokenOutput(sequence, token_id, logprob, sequence.finish))
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks, slots, queue and plans contradict each other. Slow: for tests."""
        in_flight = Counter(sequence for plan in self._in_flight for sequence in plan.sequences)
        assert all(sequence.num_sampling <= 1 + self._looks_ahead for sequence in in_flight), "sampled too often"
        assert max(in_flight.values(), default=0) <= self._max_in_flight, "a sequence is in too many plans"
        ended = [sequence for sequence in in_flight if sequence.status is SequenceStatus.FINISHED]
        self._roster.check_integrity(ended)
        holders = [*self._roster.running, *ended]
        assert in_flight == Counter({sequence: num for sequence in holders if (num := sequence.num_in_flight)})
        entered = list(self._roster)
        assert set(self._sequences.values()) == set(entered), "a sequence is lost"
        assert len(self._sequences) == len(entered)
        assert len(self._in_flight) <= self._max_in_flight

    # Putting a step together

    def _split_ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences that can go on: those to decode now, and those with more to compute.

        With several plans in flight each takes an equal part of the decodes, or the first would take all and the other
        stages of the pipeline would idle. None waits longer than max_in_flight plans.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        goes_on = _can_run_ahead if self._looks_ahead else _has_more_chunks
        for sequence in self._roster.running:
            if not sequence.num_in_flight or goes_on(sequence):
                num_left = len(sequence.token_ids) + sequence.num_sampling - sequence.num_scheduled_tokens
                (decodes if num_left == 1 else prefills).append(sequence)
        if self._is_divided:
            del decodes[-(-self.num_running // self._max_in_flight) :]
        return decodes, prefills

    def _part_of_prompts(self) -> int:
        """Return how many tokens of prompts one of several plans gets: few enough for all stages to be at work soon,
        and not fewer than a stage computes about as fast as many.
        """
        num_parts = self._max_in_flight * _PARTS_OF_PLAN
        return max(_MIN_PART, -(-self._roster.num_pending_tokens // num_parts))

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_left, self._max_chunk_tokens, budget)

    def _share_decodes(self, batch: Batch, decodes: list[Sequence]) -> None:
        """Give running sequences one token each. Few have anything to do with blocks for it."""
        batch.add_decodes(decodes)
        for sequence in self._cache.at_block_border(decodes):
            if self._find_blocks(batch, sequence, 1):
                batch.note_filled(sequence, self._cache.commit(sequence, 1))
            else:
                batch.drop(sequence)

    def _share(self, batch: Batch, sequence: Sequence, num_tokens: int) -> None:
        """Give a running sequence its share of the step, if there are blocks for it."""
        if self._find_blocks(batch, sequence, num_tokens):
            batch.add(sequence, num_tokens)
            batch.note_filled(sequence, self._cache.commit(sequence, num_tokens))

    def _find_blocks(self, batch: Batch, sequence: Sequence, num_tokens: int) -> bool:
        """Get a running sequence the blocks for its share of the step, preempting later ones for them.

        Without success it keeps what it has and is not in this step: later ones are in flight or needed in this step,
        or there are none and earlier ones will take its blocks or finish.
        """
        if sequence.slot == NO_SLOT:
            return False  # preempted a moment ago, for this step
        while not self._cache.allocate(sequence, num_tokens):
            if self._roster.drop_suspended():
                continue
            later = self._roster.later_than(sequence)
            candidates = (candidate for candidate in later if _may_yield(candidate, batch))
            victim = next(self._roster.in_yield_order(candidates), None)
            if victim is None:
                self._must_settle = self._stay_in_flight(later)
                return False
            self._suspend(batch, victim)  # the next turn takes its blocks
        return True

    def _stay_in_flight(self, sequences: list[Sequence]) -> bool:
        """Return whether there are some that are planned again before they are back."""
        return any(self._looks_ahead or sequence.num_in_flight > sequence.num_sampling for sequence in sequences)

    def _suspend(self, batch: Batch, sequence: Sequence) -> None:
        batch.drop(sequence)
        self._roster.suspend(sequence, batch.now_s)

    def _admit(self, batch: Batch, *, before_level: float = math.inf) -> None:
        """Start waiting sequences of earlier levels while there are slots, or running ones to displace, budget and
        memory. None overtakes one that has to wait.
        """
        roster = self._roster
        sequence = roster.next_to_start(before_level)
        if sequence is None or not batch.budget:
            return
        reserve = sum(self._cache.num_reserved_blocks(running) for running in roster.running)
        victims: Iterator[Sequence] | None = None  # who could be displaced
        while sequence is not None and batch.budget:
            victim = None
            displaces = not roster.has_free_slot
            if displaces:
                if victims is None:
                    if not roster.fits_displacing(sequence, reserve):
                        return  # before all that run are looked at
                    victims = roster.in_yield_order(roster.running)
                victim = next((candidate for candidate in victims if _may_yield(candidate, batch)), None)
            if displaces and not (victim and victim.order[0] > sequence.order[0]):
                # one could give way, which next_to_start has seen, but is in flight
                self._must_settle = self._stay_in_flight(roster.running) and roster.fits_displacing(sequence, reserve)
                return
            if victim is not None:
                self._cache.retract(victim)  # if it is in this step, nobody will compute what it would have filled
            if not roster.find_room(sequence, reserve, displaces=displaces):
                return
            if victim is not None:
                reserve -= self._cache.num_reserved_blocks(victim)
                self._suspend(batch, victim)
            roster.start(sequence, batch.now_s)
            batch.start(sequence)
            self._share(batch, sequence, self._chunk(sequence, batch.budget))
            reserve += self._cache.num_reserved_blocks(sequence)
            sequence = roster.next_to_start(before_level)

    def _launch(self, batch: Batch) -> StepPlan:
        launched = batch.launch(
            self._num_plans, self._roster.take_removed_slots(), self._cache.take_copies(), follows=self._has_had_work
        )
        self._num_plans += 1
        self._has_had_work = True
        self._in_flight.append(launched)
        return launched.plan

    # The end of a sequence

    def _end_with(self, sequence: Sequence, token_id: int, now_s: float) -> None:
        """End a sequence if this token, its last one, is where it ends."""
        reason = find_end(
            sequence.request,
            sequence.num_output_tokens,
            token_id,
            stop_token_ids=sequence.stop_token_ids,
            max_num_tokens=sequence.max_num_tokens,
        )
        if reason is not None:
            stop_token_id = token_id if reason is FinishReason.STOP else None
            self._finish(sequence, reason, now_s, stop_token_id=stop_token_id)

    def _watch_deadline(self, sequence: Sequence) -> None:
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None and (self._next_deadline_s is None or deadline_s < self._next_deadline_s):
            self._next_deadline_s = deadline_s

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        *,
        stop_string: str | None = None,
        stop_token_id: int | None = None,
    ) -> Finish:
        usage = sequence.usage(now_s)
        finish = Finish(reason=reason, usage=usage, stop_string=stop_string, stop_token_id=stop_token_id)
        sequence.finish = finish
        self._end(sequence)
        return finish

    def _end(self, sequence: Sequence) -> None:
        """Take an ended sequence off the books. What it holds is given back now, or when its step in flight returns."""
        del self._sequences[sequence.request_id]
        self._has_had_work = bool(self._sequences) and self._has_had_work
        self._roster.leave(sequence)


def _without_share(batch: Batch, prefills: list[Sequence]) -> list[Sequence]:
    """Return those that kept their slot, and are in no step: neither in this one nor in one in flight."""
    return [
        sequence
        for sequence in prefills
        if not (sequence in batch.shares or sequence.num_in_flight or sequence.slot == NO_SLOT)
    ]


def _may_yield(sequence: Sequence, batch: Batch) -> bool:
    """Whether a running sequence can give up its blocks or its slot now."""
    return not (sequence.num_in_flight or sequence in batch.needed)


def _can_run_ahead(sequence: Sequence) -> bool:
    """Whether one in flight can be in the next plan too: unless the token being sampled, if one is, is its last."""
    return sequence.num_tokens + sequence.num_sampling < sequence.max_num_tokens


def _has_more_chunks(sequence: Sequence) -> bool:
    """Whether one in flight has tokens left that are known, and that no plan computes yet."""
    return not sequence.num_sampling
