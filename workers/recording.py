"""Writes down every call of a replica's scheduler, and what it decided.

bench/simulation/replayed_modules.py decides it again. A frame has what the scheduler was told, and its answer: the
whole plan, the ends, the refusal. One that raises answers with the name of the exception. The block hash's key is left
out, for nothing that is decided depends on it.
"""

import msgspec
from weft.recording import FrameSink

from workers.block_pool import BlockPool
from workers.config import SchedulerConfig
from workers.kv_cache_manager import KVCacheManager
from workers.plan import ModelOutput, StepPlan
from workers.request import Finish, FinishReason, Request, RequestId
from workers.scheduler import Scheduler, TokenOutput
from workers.sequence import Sequence

KIND = "scheduler"


class SchedulerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a recording: what a scheduler and its view of memory are made from."""

    config: SchedulerConfig
    max_context: int
    eos_token_ids: list[int]
    max_in_flight: int
    looks_ahead: bool
    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...]
    num_host_blocks: int
    has_prefix_caching: bool


class Added(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A request came."""

    now_s: float
    request: Request
    refusal: str | None = None
    """Name of the exception."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A client went away."""

    now_s: float
    request_id: RequestId
    is_found: bool


class Expired(msgspec.Struct, frozen=True, array_like=True, tag="expire"):
    """A deadline may have passed."""

    now_s: float
    request_ids: list[RequestId]


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """The engine found an end: a stop string, or a text that cannot be made."""

    now_s: float
    request_id: RequestId
    reason: FinishReason
    stop_string: str | None
    finish: Finish


class Scheduled(msgspec.Struct, frozen=True, array_like=True, tag="schedule"):
    """A step was asked for."""

    now_s: float
    plan: StepPlan | None
    failure: str | None = None
    """Name of the exception."""


class Updated(msgspec.Struct, frozen=True, array_like=True, tag="update"):
    """The output of the oldest plan in flight came."""

    now_s: float
    output: ModelOutput
    num_outputs: int
    ends: list[tuple[RequestId, Finish | str]]
    """Sequences that ended: how each did, or its error."""
    failure: str | None = None
    """Name of the exception."""


SchedulerCall = Added | Aborted | Expired | Finished | Scheduled | Updated


class RecordingScheduler(Scheduler):
    """A scheduler that hands each call with its decision to a sink."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        max_context: int,
        eos_token_ids: frozenset[int],
        max_in_flight: int,
        looks_ahead: bool = False,
        sink: FrameSink,
    ) -> None:
        """Take what Scheduler takes, and where to record."""
        super().__init__(
            config,
            cache,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            max_in_flight=max_in_flight,
            looks_ahead=looks_ahead,
        )
        self._sink = sink
        setup = SchedulerSetup(
            config=config,
            max_context=max_context,
            eos_token_ids=sorted(eos_token_ids),
            max_in_flight=max_in_flight,
            looks_ahead=looks_ahead,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            windows=cache.layout.windows,
            num_host_blocks=cache.pool.host.num_slots,
            has_prefix_caching=cache.pool.enable_prefix_caching,
        )
        sink.begin(KIND, setup)

    def add(self, request: Request, now_s: float) -> Sequence:
        """Queue a request; raises as Scheduler.add."""
        try:
            sequence = super().add(request, now_s)
        except Exception as error:
            self._sink.write(Added(now_s, request, type(error).__name__))
            raise
        self._sink.write(Added(now_s, request))
        return sequence

    def abort(self, request_id: RequestId, now_s: float) -> Sequence | None:
        """End a sequence for its client."""
        sequence = super().abort(request_id, now_s)
        self._sink.write(Aborted(now_s, request_id, sequence is not None))
        return sequence

    def expire(self, now_s: float) -> list[Sequence]:
        """End the sequences whose deadline has passed."""
        expired = super().expire(now_s)
        self._sink.write(Expired(now_s, [sequence.request_id for sequence in expired]))
        return expired

    def finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, *, stop_string: str | None = None
    ) -> Finish:
        """End a sequence for a reason that the caller found."""
        finish = super().finish(sequence, reason, now_s, stop_string=stop_string)
        self._sink.write(Finished(now_s, sequence.request_id, reason, stop_string, finish))
        return finish

    def schedule(self, now_s: float) -> StepPlan | None:
        """Return the next step."""
        try:
            plan = super().schedule(now_s)
        except Exception as error:
            self._sink.write(Scheduled(now_s, None, type(error).__name__))
            raise
        self._sink.write(Scheduled(now_s, plan))
        return plan

    def update(self, plan: StepPlan, output: ModelOutput, now_s: float) -> list[TokenOutput]:
        """Take the output of the oldest plan in flight; raises as Scheduler.update."""
        try:
            outputs = super().update(plan, output, now_s)
        except Exception as error:
            self._sink.write(Updated(now_s, output, 0, [], type(error).__name__))
            raise
        self._sink.write(Updated(now_s, output, len(outputs), _ends(outputs)))
        return outputs


def build_scheduler(setup: SchedulerSetup, sink: FrameSink) -> tuple[RecordingScheduler, BlockPool]:
    """Return a scheduler as the recorded one was before its first call, and its blocks."""
    cache = KVCacheManager.with_pool(
        setup.num_blocks,
        block_size=setup.block_size,
        hash_key=b"",
        windows=setup.windows,
        max_tokens_in_flight=setup.config.max_chunk_tokens * setup.max_in_flight,
        num_host_blocks=setup.num_host_blocks,
        enable_prefix_caching=setup.has_prefix_caching,
    )
    scheduler = RecordingScheduler(
        setup.config,
        cache,
        max_context=setup.max_context,
        eos_token_ids=frozenset(setup.eos_token_ids),
        max_in_flight=setup.max_in_flight,
        looks_ahead=setup.looks_ahead,
        sink=sink,
    )
    return scheduler, cache.pool


def _ends(outputs: list[TokenOutput]) -> list[tuple[RequestId, Finish | str]]:
    return [
        (output.sequence.request_id, output.finish or str(output.error))
        for output in outputs
        if output.finish is not None or output.error is not None
    ]
