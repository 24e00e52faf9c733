"""When requests are sent: open loop by rate or by a trace's own times, closed loop by concurrency. No clock in here."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.errors import BenchConfigError

_MIN_BURSTINESS = 1e-3
"""Bursts have about one over it sessions, all of which are sent however short the duration is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Sessions begin at random times, whether earlier ones have been answered or not."""

    rate: float
    """Sessions a second, on average; infinity: all at once."""
    burstiness: float = 1.0
    """Shape of the gaps' gamma distribution, as in other tools. 1: Poisson; less: bursts; infinity: evenly spaced."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise BenchConfigError(f"--rate is {self.rate:g}; allowed: more than 0 (inf: all at once)")
        if not self.burstiness >= _MIN_BURSTINESS:
            allowed = f"at least {_MIN_BURSTINESS:g} (1: Poisson; less: bursts; inf: even)"
            raise BenchConfigError(f"--burstiness is {self.burstiness:g}; allowed: {allowed}")

    @property
    def is_at_once(self) -> bool:
        """Whether all sessions are due at the start."""
        return math.isinf(self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Sessions begin when they did in their trace."""

    speed: float = 1.0
    """How many seconds of the trace are sent in one second."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise BenchConfigError(f"--speed is {self.speed:g}; allowed: more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """So many sessions run at any time: the next begins when one ends."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise BenchConfigError(f"--concurrency is {self.concurrency}; allowed: 1 or more")


_EVEN = 1e9
"""A burstiness from which gaps are as good as equal; `random` never comes back from some 1e300 times as large ones."""

Load = OpenLoop | Replay | ClosedLoop


def draw_offsets(load: OpenLoop, rng: random.Random) -> Iterator[float]:
    """Seconds from the start to each arrival, the first at 0, without end.

    Gaps are gamma distributed: the shape is the burstiness, the mean 1 / rate. Their standard deviation over their mean
    is 1 / sqrt(burstiness).
    """
    shape, mean_s = load.burstiness, 1 / load.rate
    offset_s = 0.0
    while True:
        yield offset_s
        if mean_s:
            offset_s += mean_s if shape > _EVEN else rng.gammavariate(shape, mean_s / shape)
