"""What `weft bench serve` is told, and what it measured. Plain values, for those who measure and those who report."""

from dataclasses import dataclass, field

from bench.load.arrivals import Load
from bench.load.datasets import DatasetOptions
from bench.load.sender import ServedModel, Target
from bench.load.statistics import Summary, Targets
from bench.load.utilization import Peak, Utilization


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Which loads on which service."""

    target: Target
    loads: tuple[Load, ...]
    """Loads, one after the other, each with the same prompts and none of the cached prefixes of those before it."""
    dataset: DatasetOptions
    num_requests: int | None
    """Requests of each load; None: all of the dataset, or as many as begin within the duration."""
    duration_s: float | None
    """Nothing is sent later than this, turns of sessions included."""
    num_warmup: int
    """Requests sent before, and not counted."""
    vocab_size: int | None
    """Random token ids are below it; None: the model's, or SMALL_VOCAB_SIZE where the service does not tell."""
    targets: Targets | None
    seed: int
    peak: Peak = field(default_factory=Peak)
    """What is known of the ranks' machines; the rest is measured, where it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load and what it gave."""

    load: Load
    summary: Summary
    cpu_share: float
    """Share of one core that the load generator took."""
    num_unsent: int = 0
    """Calls that never were sent: later ones of sessions that ended with a failure."""
    is_short: bool = False
    """The dataset ended before the number of requests or the duration that was asked for."""
    utilization: Utilization | None = None
    """What the ranks did; None: not known, or the load was interrupted."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was measured. Filled load by load, so that who is interrupted keeps what there is."""

    model: ServedModel | None = None
    """The model that answers; None: the service was not reached yet."""
    peak: Peak | None = None
    """What the ranks' machines can; None: nobody looked yet."""
    ranks_unknown: str = ""
    """Why it is not known of some loads what the ranks did; empty: it is known, or nobody asked."""
    points: list[Point] = field(default_factory=list)
    is_complete: bool = False
    """Whether all loads were run to their end; else the last point may be a part of one."""
