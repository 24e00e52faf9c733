"""Decides how many replicas a model should have, from what was observed of it lately.

Pure: observations and the time in, a number and its reason out. Who observes, and who starts and drains groups, is
the controller. Every observation asks for a number of replicas; the wanted number follows once all observations of a
delay agree, so that neither a burst nor a lull of a few seconds moves it:

    up    when the least that any observation of the last `upscale_delay_s` asks for is more than what is wanted
    down  when the most that any observation of the last `downscale_delay_s` asks for is less
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le
from weft.bounds import check_fields

from cluster.errors import ClusterConfigError

_MIN_FINISHED = 20
"""Requests that must have finished before the share that was on time means something."""
_GO_AT_A_TIME = 0.25
"""Share of the replicas that may go at a time where latency counts, but one always."""
_ROUNDING_DIGITS = 6
"""3 replicas with 80 % of their blocks in use ask for 3 at a target of 0.8; floats make 3.0000000000000004 of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig:
    """When a model gets more or fewer replicas, between its `min_replicas` and `max_replicas`."""

    target_requests: Annotated[float, Gt(0)] = 32.0
    """Requests, running and waiting, that each replica should have."""
    target_kv_usage: Annotated[float, Gt(0), Le(1)] = 0.8
    """Share of the KV blocks that should be in use."""
    target_goodput: Annotated[float, Ge(0), Le(1)] = 0.95
    """Share of the finished requests that should have met both latency targets; 0: latency does not count."""
    target_ttft_s: Annotated[float, Gt(0)] | None = None
    """Target of the time to the first token; null: `router.metrics.slo_ttft_s`. Goodput is counted by it too."""
    target_tpot_s: Annotated[float, Gt(0)] | None = None
    """Target of the mean time of each further token; null: `router.metrics.slo_tpot_s`."""
    window_s: Annotated[float, Gt(0)] = 30.0
    """An observation asks for what the mean of this time before it needs."""
    upscale_delay_s: Annotated[float, Ge(0)] = 15.0
    downscale_delay_s: Annotated[float, Ge(0)] = 300.0
    idle_s: Annotated[float, Ge(0)] = 900.0
    """Time without any request before the last replica goes, where `min_replicas` is 0."""

    def __post_init__(self) -> None:
        check_fields(self, ClusterConfigError)
        for name in ("upscale_delay_s", "downscale_delay_s", "idle_s"):
            if math.isinf(getattr(self, name)):
                raise ClusterConfigError(f"{name} is {getattr(self, name)}; allowed: a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look at a model: what its READY replicas and its routers have now, and what ended since the look before."""

    time_s: float
    """When it was made, on the clock that `decide` is given."""
    num_ready: int
    num_running: int
    num_waiting: int
    """Requests in the queues of replicas and routers, those held because there is no replica included."""
    kv_usage: float
    """Mean usage of the READY replicas' KV blocks, 0 to 1."""
    num_finished: int
    num_on_time: int
    """How many of `num_finished` were within the targets of both TTFT and TPOT."""

    @property
    def num_requests(self) -> int:
        """How many requests run or wait."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas there should be."""

    replicas: int
    reason: str
    """Why, for the log and `weft status`; empty when nothing changes."""


class Autoscaler:
    """Holds the rules of one model; `decide` is a pure function of its arguments."""

    def __init__(self, config: AutoscalerConfig, *, min_replicas: int, max_replicas: int) -> None:
        """Bounds: 0 <= min_replicas <= max_replicas, and max_replicas at least 1."""
        assert 0 <= min_replicas <= max_replicas >= 1, (min_replicas, max_replicas)
        self._config = config
        self._min_replicas = min_replicas
        self._max_replicas = max_replicas

    @property
    def horizon_s(self) -> float:
        """Observations older than this are never looked at."""
        config = self._config
        return max(config.upscale_delay_s, config.downscale_delay_s, config.idle_s) + config.window_s

    def decide(self, observations: Sequence[Observation], wanted: int, now_s: float) -> Decision:
        """Return what follows from these observations, oldest first and the last one of now, for `wanted` replicas.

        A delay counts only when the observations reach back so far: after a restart nothing shrinks too early.
        """
        config = self._config
        if not self._min_replicas <= wanted <= self._max_replicas:
            bounded = min(max(wanted, self._min_replicas), self._max_replicas)
            return Decision(replicas=bounded, reason=f"{wanted} is out of bounds")
        latest = observations[-1]
        if wanted == 0:
            if latest.num_requests:
                return Decision(replicas=1, reason=f"{latest.num_requests} requests wait for the first replica")
            return Decision(replicas=0, reason="")
        first_s = now_s - max(config.upscale_delay_s, config.downscale_delay_s) - config.window_s
        asked = list(self._asked(each for each in observations if each.time_s > first_s))
        least = min(_since(asked, now_s - config.upscale_delay_s), key=_replicas)
        if least.replicas > wanted and _reaches(observations, now_s - config.upscale_delay_s):
            return least
        most = max(_since(asked, now_s - config.downscale_delay_s), key=_replicas)
        if most.replicas < wanted and _reaches(observations, now_s - config.downscale_delay_s):
            return most
        if self._min_replicas == 0 and wanted == 1 and self._is_idle(observations, now_s):
            return Decision(replicas=0, reason=f"no request for {config.idle_s:g} s")
        return Decision(replicas=wanted, reason="")

    def _asked(self, observations: Iterable[Observation]) -> Iterable[tuple[float, Decision]]:
        """Yield what each observation asks for, with the window before it."""
        window: deque[Observation] = deque()
        for observation in observations:
            window.append(observation)
            while window[0].time_s <= observation.time_s - self._config.window_s:
                window.popleft()
            yield observation.time_s, self._ask(window)

    def _ask(self, window: deque[Observation]) -> Decision:
        config, latest = self._config, window[-1]
        requests = sum(each.num_requests for each in window) / len(window)
        asked = Decision(
            replicas=_ceil(requests / config.target_requests),
            reason=f"{requests:.1f} requests at {config.target_requests:g} a replica",
        )
        usage = sum(each.kv_usage for each in window) / len(window)
        by_cache = _ceil(latest.num_ready * usage / config.target_kv_usage)
        if by_cache > asked.replicas:
            asked = Decision(replicas=by_cache, reason=f"{usage:.0%} of the KV blocks in use")
        # requests that were served by fewer or more replicas tell nothing of those that are here now
        same = [each for each in window if each.num_ready == latest.num_ready]
        finished, on_time = sum(each.num_finished for each in same), sum(each.num_on_time for each in same)
        if config.target_goodput and finished >= _MIN_FINISHED:
            share = on_time / finished
            by_latency = _by_latency(latest.num_ready, config.target_goodput - share)
            if by_latency > asked.replicas:
                asked = Decision(replicas=by_latency, reason=f"{share:.0%} of the requests on time")
        replicas = min(max(asked.replicas, self._min_replicas, 1), self._max_replicas)
        return Decision(replicas=replicas, reason=asked.reason)

    def _is_idle(self, observations: Sequence[Observation], now_s: float) -> bool:
        since_s = now_s - self._config.idle_s
        is_quiet = not any(each.num_requests or each.num_finished for each in observations if each.time_s > since_s)
        return is_quiet and _reaches(observations, since_s)


def _by_latency(num_ready: int, missed: float) -> int:
    """Return what these replicas ask for, who missed the target by this share of the requests; 0 or less: they met it.

    How few would have met it is not known, so a part of them goes, and the next one when the others have met it too.
    """
    return num_ready + _ceil(num_ready * missed) if missed > 0 else num_ready - max(1, int(num_ready * _GO_AT_A_TIME))


def _ceil(replicas: float) -> int:
    return math.ceil(round(replicas, _ROUNDING_DIGITS))


def _replicas(decision: Decision) -> int:
    return decision.replicas


def _since(asked: Iterable[tuple[float, Decision]], time_s: float) -> Iterable[Decision]:
    return (decision for asked_s, decision in asked if asked_s >= time_s)


def _reaches(observations: Sequence[Observation], time_s: float) -> bool:
    return observations[0].time_s <= time_s
