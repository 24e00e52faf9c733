"""Decides how many replicas a model should have, from what was observed of it lately.

Pure: observations in, a number and its reason out. Who observes, and who starts and drains groups, is the controller.
Every observation asks for a number of replicas; the wanted number follows once all observations of a delay agree, so
that neither a burst nor a lull of a few seconds moves it:

    up    when the least that any observation of the last `upscale_delay_s` asks for is more than what is wanted
    down  when the most that any observation of the last `downscale_delay_s` asks for is less
"""

import math
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from annotated_types import Ge, Gt, Le
from weft.bounds import check_fields

from cluster.errors import ClusterConfigError

_MIN_FINISHED = 20
"""Requests that must have finished before the share that was on time means something."""
_GO_AT_A_TIME = 0.25
"""Share of the replicas that may go at a time where latency counts, but one always."""
_RATE_MARGIN = 0.1
"""Part by which the rate of requests on a replica must differ from one that was late to be another."""
_LATE_KNOWN_S = 4 * 3600.0
"""Time for which a rate that was late is not tried again: requests may cost less by then."""
_ROUNDING_DIGITS = 6
"""3 replicas with 80 % of their blocks in use ask for 3 at a target of 0.8; floats make 3.0000000000000004 of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig:
    """When a model gets more or fewer replicas, between its `min_replicas` and `max_replicas`."""

    target_requests: Annotated[float, Ge(1e-6)] = 32.0
    """Requests, running and waiting, that each replica should have."""
    target_kv_usage: Annotated[float, Ge(1e-6), Le(1)] = 0.8
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
    """Holds the rules of one model, and what it must know of the observations before: little, however long the delays.

    The same observations always give the same decisions.
    """

    def __init__(self, config: AutoscalerConfig, *, min_replicas: int, max_replicas: int) -> None:
        """Bounds: 0 <= min_replicas <= max_replicas, and max_replicas at least 1."""
        assert 0 <= min_replicas <= max_replicas >= 1, (min_replicas, max_replicas)
        self._config = config
        self._min_replicas = min_replicas
        self._max_replicas = max_replicas
        self._window: deque[Observation] = deque()
        self._least = _Extreme(config.upscale_delay_s, operator.le)
        self._most = _Extreme(config.downscale_delay_s, operator.ge)
        self._first_s = math.inf
        self._busy_s = -math.inf
        """When there was a request last."""
        self._late_rate = _LateRate()

    def decide(self, observation: Observation, wanted: int) -> Decision:
        """Return what follows from this observation, of now, and those before it for `wanted` replicas.

        A delay counts only when the observations reach back so far: after a restart nothing shrinks too early.
        """
        config, now_s = self._config, observation.time_s
        self._note(observation)
        asked = self._ask()
        least, most = self._least.add(now_s, asked), self._most.add(now_s, asked)
        if not self._min_replicas <= wanted <= self._max_replicas:
            bounded = min(max(wanted, self._min_replicas), self._max_replicas)
            return Decision(replicas=bounded, reason=f"{wanted} is out of bounds")
        if wanted == 0:
            if observation.num_requests:
                return Decision(replicas=1, reason=f"{observation.num_requests} requests wait for the first replica")
            return Decision(replicas=0, reason="")
        watched_s = now_s - self._first_s
        if least.replicas > wanted and watched_s >= config.upscale_delay_s:
            return least
        if most.replicas < wanted and watched_s >= config.downscale_delay_s:
            return most
        is_idle = min(watched_s, now_s - self._busy_s) >= config.idle_s
        if self._min_replicas == 0 and wanted == 1 and is_idle:
            return Decision(replicas=0, reason=f"no request for {config.idle_s:g} s")
        return Decision(replicas=wanted, reason="")

    def _note(self, observation: Observation) -> None:
        now_s = observation.time_s
        self._first_s = min(self._first_s, now_s)
        if observation.num_requests or observation.num_finished:
            self._busy_s = now_s
        self._window.append(observation)
        while len(self._window) > 1 and self._window[0].time_s <= now_s - self._config.window_s:
            self._window.popleft()

    def _ask(self) -> Decision:
        """Return what the latest observation asks for, with the window before it."""
        config, window, latest = self._config, self._window, self._window[-1]
        requests = sum(each.num_requests for each in window) / len(window)
        asked = Decision(
            replicas=_ceil(requests / config.target_requests),
            reason=f"{requests:.1f} requests at {config.target_requests:g} a replica",
        )
        # what another number of replicas did, full or late, tells nothing of those that are here now
        same = [each for each in window if each.num_ready == latest.num_ready]
        usage = sum(each.kv_usage for each in same) / len(same)
        by_cache = _ceil(latest.num_ready * usage / config.target_kv_usage)
        if by_cache > asked.replicas:
            asked = Decision(replicas=by_cache, reason=f"{usage:.0%} of the KV blocks in use")
        finished, on_time = sum(each.num_finished for each in same), sum(each.num_on_time for each in same)
        if config.target_goodput and finished >= _MIN_FINISHED:
            share = on_time / finished
            rate = _rate(window) if len(same) == len(window) else 0.0
            by_latency = self._by_latency(latest, config.target_goodput - share, rate)
            if by_latency > asked.replicas:
                asked = Decision(replicas=by_latency, reason=f"{share:.0%} of the requests on time")
        replicas = min(max(asked.replicas, self._min_replicas, 1), self._max_replicas)
        return Decision(replicas=replicas, reason=asked.reason)

    def _by_latency(self, latest: Observation, missed: float, rate: float) -> int:
        """Return what these replicas ask for, who missed the target by this share of the requests; 0 or less: met it.

        How few would have met it is not known, so a part of them goes, and the next one when the others have met it
        too; but not so many that the others would have a rate of requests that was late before.
        """
        num_ready, now_s = latest.num_ready, latest.time_s
        if missed > 0:
            if rate and num_ready:
                self._late_rate.note_late(rate / num_ready, now_s)
            return num_ready + _ceil(num_ready * missed)
        fewest = num_ready - max(1, int(num_ready * _GO_AT_A_TIME))
        if rate and num_ready:
            self._late_rate.note_on_time(rate / num_ready, now_s)
            fewest = max(fewest, _ceil(rate / self._late_rate.allowed))
        return min(num_ready, fewest)


class _LateRate:
    """How many requests a second are too many for one replica: as many as were late the last time that any were."""

    def __init__(self) -> None:
        self._rate = math.inf
        self._time_s = 0.0
        self._is_late = False

    @property
    def allowed(self) -> float:
        """Requests a second that a replica may have; infinite where none are known to be too many."""
        return self._rate * (1 - _RATE_MARGIN)

    def note_late(self, rate: float, now_s: float) -> None:
        """So many were late. The most of one such time count: replicas that come to help have fewer, late as well."""
        self._rate = max(self._rate, rate) if self._is_late else rate
        self._time_s, self._is_late = now_s, True

    def note_on_time(self, rate: float, now_s: float) -> None:
        """So many were on time; those that were late are forgotten when they are fewer, or were long ago."""
        self._is_late = False
        if rate > self._rate * (1 + _RATE_MARGIN) or now_s - self._time_s > _LATE_KNOWN_S:
            self._rate = math.inf


class _Extreme:
    """What was asked for within a delay that beats all else, the most or the least; of equals, the latest."""

    def __init__(self, delay_s: float, beats: Callable[[int, int], bool]) -> None:
        self._delay_s = delay_s
        self._beats = beats
        self._asked: deque[tuple[float, Decision]] = deque()
        """Each beats all after it, so that there are no more than numbers of replicas."""

    def add(self, time_s: float, decision: Decision) -> Decision:
        """Take note of what is asked for now, and return the extreme."""
        asked = self._asked
        while asked and self._beats(decision.replicas, asked[-1][1].replicas):
            asked.pop()
        asked.append((time_s, decision))
        while asked[0][0] < time_s - self._delay_s:
            asked.popleft()
        return asked[0][1]


def _rate(observations: deque[Observation]) -> float:
    """Return how many requests ended a second, by observations of one number of replicas; 0.0: one look cannot say."""
    time_s = observations[-1].time_s - observations[0].time_s
    return sum(each.num_finished for each in islice(observations, 1, None)) / time_s if time_s else 0.0


def _ceil(replicas: float) -> int:
    return math.ceil(round(replicas, _ROUNDING_DIGITS))
