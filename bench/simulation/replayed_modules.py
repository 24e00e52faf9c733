"""The modules whose decisions are recorded, each told again what it was told: in virtual time, by the clock values of
the recording.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import msgspec
from weft.recording import FrameSink

import cluster.recording
import router.recording
import workers.recording
from cluster.autoscaler import Autoscaler
from cluster.recording import AutoscalerMade, Decided, ScalingCall, ScalingRecording, ScalingSetup
from router.breaker import Breaker
from router.policy import Policy
from router.prefix_policy import make_policy
from router.recording import (
    BreakerCalled,
    BreakerMade,
    Entered,
    Left,
    PolicyMade,
    Routed,
    RouterCall,
    RouterRecording,
    RouterSetup,
    Started,
)
from workers.plan import StepPlan
from workers.recording import (
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


class RouterReplay:
    """A router's places, policies and circuit breakers, without streams and clients."""

    def __init__(self, setup: RouterSetup, sink: FrameSink) -> None:
        self._setup = setup
        self._now_s = 0.0
        self._recording = RouterRecording(setup, sink, clock=lambda: self._now_s)
        self._places = self._recording.places()
        self._policies: dict[int, Policy] = {}
        self._breakers: dict[int, Breaker] = {}

    def repeat(self, call: RouterCall) -> None:
        """Call what was called, with what it was told."""
        self._now_s = call.now_s
        match call:
            case PolicyMade():
                policy = make_policy(self._setup.policy, self._setup.prefix, random.Random(call.seed))
                self._policies[call.number] = self._recording.policy(call.model, call.seed, policy)
            case Routed():
                self._policies[call.number].choose(call.request, call.replicas)
            case BreakerMade():
                self._breakers[call.number] = self._recording.breaker(call.replica_id)
            case BreakerCalled():
                self._call_breaker(self._breakers[call.number], call.call, call.now_s)
            case Entered():
                self._places.enter()
            case Started():
                self._places.start(call.ticket)
            case Left():
                self._places.leave(call.ticket, call.now_s)
            case _:
                assert_never(call)

    @staticmethod
    def _call_breaker(breaker: Breaker, call: str, now_s: float) -> None:
        match call:
            case "allows":
                breaker.allows(now_s)
            case "begin":
                breaker.begin(now_s)
            case "succeed":
                breaker.succeed()
            case "fail":
                breaker.fail(now_s)
            case "release":
                breaker.release()
            case _:
                raise ValueError(f"a breaker has no {call!r}")


class ScalingReplay:
    """The autoscaler of each model, without groups."""

    def __init__(self, setup: ScalingSetup, sink: FrameSink) -> None:
        self._recording = ScalingRecording(sink)
        self._autoscalers: dict[int, Autoscaler] = {}

    def repeat(self, call: ScalingCall) -> None:
        """Let the autoscaler look at what it looked at."""
        match call:
            case AutoscalerMade():
                self._autoscalers[call.number] = self._recording.autoscaler(
                    call.model, call.config, min_replicas=call.min_replicas, max_replicas=call.max_replicas
                )
            case Decided():
                self._autoscalers[call.number].decide(call.observation, call.wanted)
            case _:
                assert_never(call)


KINDS = {
    workers.recording.KIND: ReplayedKind(header=SchedulerSetup, call=SchedulerCall, build=SchedulerReplay),
    router.recording.KIND: ReplayedKind(header=RouterSetup, call=RouterCall, build=RouterReplay),
    cluster.recording.KIND: ReplayedKind(header=ScalingSetup, call=ScalingCall, build=ScalingReplay),
}
