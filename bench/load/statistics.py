"""From the records of a run to its numbers: latencies, throughput, goodput, errors. Pure arithmetic."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.errors import BenchConfigError
from bench.load.records import CallRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distribution of some times, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution | None":
        """Summarize the values that there are; None where there is none."""
        found = sorted(value for value in values if value is not None)
        if not found:
            return None
        p50, p90, p95, p99 = (percentile(found, share) for share in (0.5, 0.9, 0.95, 0.99))
        mean = math.fsum(found) / len(found)
        return cls(count=len(found), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=found[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request must keep to count as good."""

    ttft_s: float | None = None
    """Limit of the TTFT; None: any."""
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            target_s = getattr(self, f"{name}_s")
            if target_s is not None and not 0 < target_s < math.inf:
                raise BenchConfigError(f"--{name}-target is {target_s * 1000:g} ms; allowed: a number more than 0")

    def are_met(self, record: CallRecord) -> bool:
        """Return whether an answered request kept all. One without a second token has no TPOT to keep; where no token
        was seen, the end counts. An answer without tokens keeps nothing."""
        if record.num_out == 0:
            return False
        whole_s = record.end_s - record.sent_s
        ttft_s = whole_s if record.ttft_s is None else record.ttft_s
        e2e_s = whole_s if record.e2e_s is None else record.e2e_s
        seen = ((ttft_s, self.ttft_s), (record.tpot_s, self.tpot_s), (e2e_s, self.e2e_s))
        return all(_is_within(seen_s, target_s) for seen_s, target_s in seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What the requests that kept their targets make up."""

    targets: Targets
    num_requests: int
    request_rate: float
    output_rate: float
    """Output tokens a second of these requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Latencies and tokens are those of answered requests; rates are over the whole run."""

    num_requests: int
    num_answered: int
    num_short: int
    """Requests that were answered with fewer tokens than asked for."""
    asked_tokens: int
    """Output tokens that the answered requests asked for."""
    errors: dict[str, int]
    """How many errors there were of each kind."""
    first_messages: dict[str, str]
    """Message of the first error of each kind."""
    duration_s: float
    """Time from the first request sent to the end of the last, answered or failed."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    num_seen: int
    """Output tokens that were seen come; over HTTP pieces of text."""
    request_rate: float
    input_rate: float
    output_rate: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    lag_s: Distribution | None
    """How much later than due requests were sent; None: a closed loop."""
    goodput: Goodput | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share of ordered values lies, interpolated between neighbours as in numpy.

    Which is not there where `weft bench serve` runs in the image of routers.
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(records: Sequence[CallRecord], targets: Targets | None = None) -> Summary:
    """Return the numbers of a run with at least one request."""
    answered = [record for record in records if record.is_answered]
    errors = [record.error for record in records if record.error is not None]
    start_s, end_s = min(record.sent_s for record in records), max(record.end_s for record in records)
    duration_s = max(end_s - start_s, 1e-9)
    input_tokens = sum(record.num_in for record in answered)
    output_tokens = sum(record.num_out for record in answered)
    return Summary(
        num_requests=len(records),
        num_answered=len(answered),
        num_short=sum(record.num_out < record.num_asked for record in answered),
        asked_tokens=sum(record.num_asked for record in answered),
        errors=dict(Counter(str(error.kind) for error in errors)),
        first_messages={str(error.kind): str(error) for error in reversed(errors)},
        duration_s=duration_s,
        input_tokens=input_tokens,
        cached_tokens=sum(record.usage.cached_tokens for record in answered if record.usage is not None),
        output_tokens=output_tokens,
        num_seen=sum(record.num_seen for record in answered),
        request_rate=len(answered) / duration_s,
        input_rate=input_tokens / duration_s,
        output_rate=output_tokens / duration_s,
        ttft_s=Distribution.of(record.ttft_s for record in answered),
        tpot_s=Distribution.of(record.tpot_s for record in answered),
        itl_s=Distribution.of(gap_s for record in answered for gap_s in record.gaps_s),
        e2e_s=Distribution.of(record.e2e_s for record in answered),
        lag_s=Distribution.of(record.lag_s for record in records),
        goodput=None if targets is None else _goodput(answered, targets, duration_s),
    )


def describe_errors(*summaries: Summary) -> str:
    """Say how many errors of each kind there were in some runs, with the first message."""
    numbers: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for summary in summaries:
        numbers.update(summary.errors)
        messages = summary.first_messages | messages
    return "; ".join(f"{number} {kind} ({messages[kind]})" for kind, number in sorted(numbers.items()))


def _is_within(seen_s: float | None, target_s: float | None) -> bool:
    return seen_s is None or target_s is None or seen_s <= target_s


def _goodput(answered: Sequence[CallRecord], targets: Targets, duration_s: float) -> Goodput:
    good = [record for record in answered if targets.are_met(record)]
    return Goodput(
        targets=targets,
        num_requests=len(good),
        request_rate=len(good) / duration_s,
        output_rate=sum(record.num_out for record in good) / duration_s,
    )
