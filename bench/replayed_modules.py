"""The modules whose decisions are recorded, each told again what it was told: in virtual time, by the clock values of
the recording.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import msgspec
from weft.recording import FrameSink

from workers.plan import StepPlan
from workers.recording import (
    KIND,
    Aborted,
    Added,
    Expired,
    Finished,
    Scheduled,
    SchedulerCall,
    SchedulerSetup,
    Updated,
    build_scheduler,
)
from workers.request import RequestId
from workers.sequence import Sequence


class Replay(Protocol):
    """A production module over a sink, to which it hands each call with its decision as it did when recorded."""

    def repeat(self, call: Any) -> None:
        """Call the module as it was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedKind:
    """What a recording of one kind holds, and how it is replayed."""

    header: type[msgspec.Struct]
    call: Any
    """Union of the frames."""
    build: Callable[[Any, FrameSink], Replay]


class SchedulerReplay:
    """A replica's scheduler, without engine and ranks."""

    def __init__(self, setup: SchedulerSetup, sink: FrameSink) -> None:
        self._scheduler, self._pool = build_scheduler(setup, sink)
        self._sequences: dict[RequestId, Sequence] = {}  # not ended
        self._plans: deque[StepPlan] = deque()  # in flight

    def repeat(self, call: SchedulerCall) -> None:
        """Call the scheduler as it was called; what it raised then it raises now."""
        scheduler = self._scheduler
        match call:
            case Added():
                self._sequences[call.request.request_id] = scheduler.add(call.request, call.now_s)
            case Aborted():
                scheduler.abort(call.request_id, call.now_s)
                self._sequences.pop(call.request_id, None)
            case Expired():
                for sequence in scheduler.expire(call.now_s):
                    del self._sequences[sequence.request_id]
            case Finished():
                sequence = self._sequences.pop(call.request_id)
                scheduler.finish(sequence, call.reason, call.now_s, stop_string=call.stop_string)
            case Scheduled():
                plan = scheduler.schedule(call.now_s)
                if plan is not None:
                    self._plans.append(plan)
            case Updated():
                self._update(call)
            case _:
                assert_never(call)

    def _update(self, call: Updated) -> None:
        for output in self._scheduler.update(self._plans.popleft(), call.output, call.now_s):
            if output.finish is not None or output.error is not None:
                del self._sequences[output.sequence.request_id]
        self._pool.take_events()  # else they would pile up


KINDS = {KIND: ReplayedKind(header=SchedulerSetup, call=SchedulerCall, build=SchedulerReplay)}
