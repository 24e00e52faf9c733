"""From timed sections to what is reported: order, contention, medians, ratios, agreement. Pure arithmetic."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

BUSY_OTHERS = 0.1
"""Cores: a section during which other processes used more does not count."""

SMALL_GAP = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25, "int8": 0.5}
"""Log-probability, by dtype: where Weft's best two tokens are closer, another kernel may rightly choose the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One engine on one workload in one round."""

    round: int
    workload: str
    engine: str
    num_requests: int
    num_tokens: int
    """Tokens that were generated and asked for."""
    wall_s: float
    others_cores: float | None
    first_s: float | None

    @property
    def rate(self) -> float:
        """Output tokens a second, prefill included."""
        return self.num_tokens / self.wall_s

    @property
    def is_contended(self) -> bool:
        """Whether another process took a part of the machine meanwhile."""
        return self.others_cores is not None and self.others_cores > BUSY_OTHERS

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first, of a single request."""
        if self.first_s is None or self.num_requests != 1 or self.num_tokens < 2:
            return None
        return (self.wall_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine on one workload, over the rounds that were quiet."""

    workload: str
    engine: str
    rates: tuple[float, ...]
    """Output tokens a second of the quiet rounds."""
    dropped_rates: tuple[float, ...]
    """Output tokens a second of the contended rounds; they count for nothing."""
    median_rate: float | None
    """Median of `rates`; None: every round was contended."""
    ratio: float | None
    """The reference's rate to this one's: median over rounds in which both were quiet; None: there is none."""
    ttft_s: float | None
    """Median TTFT, of a workload with one request, where the engine tells."""
    tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How an engine's greedy tokens compare with the reference's."""

    num_requests: int
    num_same: int
    """Requests whose tokens are equal to the last."""
    num_close: int
    """Requests that are equal up to a token where the reference's best two were close."""
    num_far: int
    """Requests that differ where these were not close: another model, or a mistake."""
    mean_prefix: float
    """Equal first tokens, as a share of those asked for."""
    widest_gap: float
    """The largest gap at which one left the reference; 0: none did."""


def interleave(engines: Sequence[str], workloads: Sequence[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    """Yield (round, workload, engine) in the order of running: engines take turns on each workload of each round."""
    for index in range(1, rounds + 1):
        for workload in workloads:
            for engine in engines:
                yield index, workload, engine


def summarize(measured: Iterable[Measured], *, reference: str) -> list[Row]:
    """Return a row for each workload and engine, in the order in which they first ran."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.workload, each.engine), []).append(each)
    return [
        _row(workload, engine, sections, groups.get((workload, reference), []))
        for (workload, engine), sections in groups.items()
    ]


def compare_tokens(
    reference: Sequence[Sequence[int]],
    gaps: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    *,
    small_gap: float,
) -> Agreement:
    """Compare request by request up to the first difference; what follows it has another context.

    Args:
        reference: the reference's tokens by request.
        gaps: how far its best token was ahead of the second, same shape.
        tokens: another engine's, same shape.
        small_gap: below it, a difference is one of rounding.
    """
    prefixes = [_common_prefix(ours, theirs) for ours, theirs in zip(reference, tokens, strict=True)]
    left_at = [gap[prefix] for gap, prefix, ours in zip(gaps, prefixes, reference, strict=True) if prefix < len(ours)]
    num_far = sum(gap >= small_gap for gap in left_at)
    return Agreement(
        num_requests=len(reference),
        num_same=len(reference) - len(left_at),
        num_close=len(left_at) - num_far,
        num_far=num_far,
        mean_prefix=statistics.fmean(prefix / len(ours) for prefix, ours in zip(prefixes, reference, strict=True)),
        widest_gap=max(left_at, default=0.0),
    )


def _row(workload: str, engine: str, sections: Sequence[Measured], reference: Sequence[Measured]) -> Row:
    quiet = [each for each in sections if not each.is_contended]
    reference_rates = {each.round: each.rate for each in reference if not each.is_contended}
    return Row(
        workload=workload,
        engine=engine,
        rates=tuple(each.rate for each in quiet),
        dropped_rates=tuple(each.rate for each in sections if each.is_contended),
        median_rate=_median(each.rate for each in quiet),
        ratio=_median(reference_rates[each.round] / each.rate for each in quiet if each.round in reference_rates),
        ttft_s=_median(each.first_s for each in quiet if each.num_requests == 1),
        tpot_s=_median(each.tpot_s for each in quiet),
    )


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
