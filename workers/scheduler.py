"""Decides what each step computes: which sequences, how many tokens of each, in which blocks. Pure; the clock is an argument.

There is no prefill phase and no decode phase. A sequence has `num_computed_tokens` and catches up with `num_tokens`
inside the token budget of a step; chunked prefill, prefix hits and preemption by recompute are this one loop.
Tensors are built in inputs.py from the plans made here.
"""

from dataclasses import dataclass

import msgspec

from workers.config import SchedulerConfig
from workers.kv_cache_manager import KVCacheManager
from workers.plan import ModelOutput, StepPlan
from workers.request import Finish, FinishReason, Request, RequestId, TokenLogprobs
from workers.sequence import Sequence


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class Scheduler:
    """The step loop's decisions for one replica. One thread; every method is synchronous and fast.

    A step of the engine is

        for sequence in scheduler.expire(now): tell its client (sequence.finish is set)
        plan = scheduler.schedule(now)                    # may be called until it returns None: plans in flight
        outputs = scheduler.update(plan, model output, now)         # oldest plan first

    A sequence ends exactly once: with a TokenOutput that has `finish` or `error`, or in abort(), finish() or expire(),
    which return at once also while its step is in flight. No output follows; its blocks and its slot are given back when the
    step returns, or at once if it is in none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        max_context: int,
        eos_token_ids: frozenset[int],
        max_in_flight: int,
    ) -> None: ...

    def add(self, request: Request, now_s: float) -> Sequence:
        """Queue a request.

        Raises:
            InvalidRequestError: no token to start from, no room for one more within max_context or max_tokens, an id in
                use, or a request that cannot fit into the pool even alone.
            QueueFullError: max_waiting requests wait already.
        """
        raise NotImplementedError

    def abort(self, request_id: RequestId, now_s: float) -> Sequence | None:
        """End a sequence on its client's wish and return it, `finish` set to ABORT; None when the id is not known (any more)."""
        raise NotImplementedError

    def expire(self, now_s: float) -> list[Sequence]:
        """End the sequences whose deadline has passed, with ABORT, and return them."""
        raise NotImplementedError

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, *, stop_string: str | None = None
    ) -> Finish:
        """End an unfinished sequence for a reason that the engine found (a stop string); returns its new `finish`."""
        raise NotImplementedError

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step; None when there is nothing to do or everything that could be done is in flight."""
        raise NotImplementedError

    def update(self, plan: StepPlan, output: ModelOutput, now_s: float) -> list[TokenOutput]:
        """Take the output of the oldest plan in flight: append tokens, commit full blocks, finish or go on.

        Raises:
            GroupFailedError: the output is not that plan's.
        """
        raise NotImplementedError

    @property
    def has_unfinished(self) -> bool:
        """Whether there is a reason to step: an unfinished sequence or a plan in flight."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and have not ended."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        raise NotImplementedError

    @property
    def num_in_flight(self) -> int:
        """Plans whose output has not come back."""
        raise NotImplementedError

    @property
    def num_pending_tokens(self) -> int:
        """Tokens known but not computed, over waiting and running sequences, less the one that each decode always has."""
        raise NotImplementedError

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since the start."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks, slots, queues or plans contradict each other. Slow; for tests and idle moments."""
        raise NotImplementedError
