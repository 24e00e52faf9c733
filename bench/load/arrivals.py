"""When requests are sent: open loop by rate or by a trace's own times, closed loop by concurrency. No clock in here."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.errors import BenchConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Sessions begin at random times, whether earlier ones have been answered or not."""

    rate: float
    """Sessions a second, on average; infinity: all at once."""
    burstiness: float = 1.0
    """Standard deviation of the gaps over their mean. 1: Poisson; more: bursts; 0: evenly spaced."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise BenchConfigError(f"--rate is {self.rate:g}; allowed: more than 0 (inf: all at once)")
        if not 0 <= self.burstiness < math.inf:
            raise BenchConfigError(f"--burstiness is {self.burstiness:g}; allowed: 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Sessions begin when they did in their trace."""

    speed: float = 1.0
    """Seconds of the trace in one of now."""

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


Load = OpenLoop | Replay | ClosedLoop


def draw_offsets(load: OpenLoop, rng: random.Random) -> Iterator[float]:
    """Seconds from the start to each arrival, the first at 0, without end.

    Gaps are gamma distributed: the shape is 1 / burstiness**2, the mean 1 / rate.
    """
    spread = load.burstiness**2
    offset_s = 0.0
    while True:
        yield offset_s
        if math.isinf(load.rate):
            continue
        mean_s = 1 / load.rate
        offset_s += rng.gammavariate(1 / spread, mean_s * spread) if spread else mean_s
