"""What people see of a benchmark: tables. And one line of JSON for programs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.load.arrivals import ClosedLoop, Load, OpenLoop, Replay
from bench.load.serve_values import Outcome, Point, ServeOptions
from bench.load.statistics import Distribution, Summary, describe_errors
from bench.load.utilization import Peak, Utilization
from bench.plain_json import to_plain
from bench.result_line import make_line

if TYPE_CHECKING:
    from bench.load.offline import OfflineOptions, OfflineResult, Repeat  # torch

MAX_LAG_S = 0.010
"""Requests later than this, at the 99th percentile, are a load that differs from what was asked for."""
MAX_CPU_SHARE = 0.8
"""Share of a core: a load generator beyond it may be what is measured. Of no account in less than a second."""

MIN_FOR_P99 = 100

MIN_SEEN = 0.5
"""Share of the tokens: with fewer pieces of text, times of text say little about tokens."""

_LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "ITL": "itl_s", "end to end": "e2e_s"}


def load_name(load: Load) -> str:
    """Return a load in a few words."""
    match load:
        case OpenLoop():
            shape = {math.inf: "evenly", 1.0: "Poisson"}.get(load.burstiness, f"gamma, burstiness {load.burstiness:g}")
            return "all at once" if load.is_at_once else f"{load.rate:g} arrivals/s, {shape}"
        case Replay():
            return "times of the trace" + ("" if load.speed == 1 else f", {load.speed:g} times as fast")
        case ClosedLoop():
            return f"{load.concurrency} at a time"


def warn(console: Console, warning: str) -> None:
    """Print something that is doubtful."""
    console.print(f"Warning: {warning}", style="yellow", highlight=False, markup=False)


def warn_idle(console: Console, flags: Sequence[str]) -> None:
    """Tell of flags that say nothing about what is measured."""
    if flags:
        warn(console, f"nothing looks at {', '.join(flags)} here")


def print_point(console: Console, point: Point) -> None:
    """Print one load in detail."""
    if point.summary.num_answered:
        console.print(_latency_table(point))
    console.print(_throughput_line(point.summary), highlight=False)
    if point.utilization is not None:
        console.print(_utilization_line(point.utilization, point.summary.output_tokens), highlight=False)
    for warning in warnings(point):
        warn(console, warning)


def print_sweep(console: Console, points: Sequence[Point]) -> None:
    """Print all loads together, where there are several."""
    if len(points) > 1:
        console.print(_sweep_table(points))


def print_limits(console: Console, outcome: Outcome) -> None:
    """Print what MBU and FLOPs are shares of; and what is missing from what was told of the ranks, and why."""
    peak = outcome.peak or Peak()
    rates = {"MBU": (peak.read_bytes_per_s, "GB/s"), "FLOPs": (peak.flops_per_s, "GFLOP/s")}
    known = [f"{name} of {rate / 1e9:.1f} {unit}" for name, (rate, unit) in rates.items() if rate is not None]
    if known and any(point.utilization is not None for point in outcome.points):
        console.print(f"Shares: {', '.join(known)}", highlight=False)
    if outcome.ranks_unknown:
        num_unknown = sum(point.utilization is None for point in outcome.points)
        missing, why = f"what the ranks did in {num_unknown} of {len(outcome.points)} loads", outcome.ranks_unknown
    elif peak.unknown:
        missing, why = " and ".join(name for name, (rate, _) in rates.items() if rate is None), peak.unknown
    else:
        return
    console.print(f"Not known: {missing}: {why}", highlight=False, markup=False)


def warnings(point: Point) -> list[str]:
    """Return what makes the numbers of a load doubtful."""
    summary = point.summary
    found = []
    lag = summary.lag_s
    is_at_once = isinstance(point.load, OpenLoop) and point.load.is_at_once
    if lag is not None and lag.p99 > MAX_LAG_S and not is_at_once:
        found.append(
            f"the load generator fell behind: requests were sent up to {_ms(lag.max)} ms late (p99 {_ms(lag.p99)} ms)"
        )
    if point.cpu_share > MAX_CPU_SHARE and summary.duration_s > 1:
        found.append(
            f"the load generator took {point.cpu_share:.0%} of a core: latencies may be its own; "
            "run several with a part of the load each"
        )
    found += _missing([summary])
    if point.num_unsent:
        found.append(f"{point.num_unsent} later turns of failed sessions were not sent, and count nowhere")
    if point.is_short:
        found.append(short_dataset(summary.num_requests + point.num_unsent))
    if summary.num_seen < MIN_SEEN * summary.output_tokens:
        found.append(
            f"{summary.output_tokens} tokens came as {summary.num_seen} pieces of text: TTFT, TPOT and ITL over HTTP "
            "are those of text; most tokens here have none of their own, or the service sends several at once"
        )
    return found


def short_dataset(num_calls: int) -> str:
    """Return a warning of a dataset that has no more requests, though more are asked for."""
    return f"the dataset has only {num_calls} request{'' if num_calls == 1 else 's'}: less was sent than is asked for"


def _missing(runs: Sequence[Summary]) -> list[str]:
    """Return what was asked for in some runs and did not come."""
    found = []
    num_requests, num_answered = sum(run.num_requests for run in runs), sum(run.num_answered for run in runs)
    if any(run.errors for run in runs):
        found.append(f"{num_requests - num_answered} of {num_requests} requests failed: {describe_errors(*runs)}")
    if num_short := sum(run.num_short for run in runs):
        output_tokens, asked_tokens = sum(run.output_tokens for run in runs), sum(run.asked_tokens for run in runs)
        found.append(
            f"{num_short} of {num_answered} answers ended with fewer tokens than asked for: "
            f"{output_tokens} of {asked_tokens} tokens came"
        )
    return found


def print_offline(console: Console, model: str, result: "OfflineResult") -> None:
    """Print every workload: medians over its repeats, and the speeds of each."""
    ceiling = result.ceiling
    console.print(
        f"{model}: {result.num_parameters / 1e6:.1f} M parameters in {result.dtype} on {result.device}, "
        f"loaded in {result.load_s:.1f} s. This machine reads {ceiling.read_bytes_per_s / 1e9:.1f} GB/s and multiplies "
        f"{ceiling.flops_per_s / 1e9:.0f} GFLOP/s.",
        highlight=False,
    )
    cells = {name: _offline_cells(result, name) for name in result.repeats}
    table = Table("", *cells, title="output tokens, medians of the repeats", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in _OFFLINE_ROWS:
        if any(column[title] != "-" for column in cells.values()):
            table.add_row(title, *(column[title] for column in cells.values()))
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    if any(_is_contended(repeat) for repeats in result.repeats.values() for repeat in repeats):
        console.print("* other processes kept more than a tenth of a core busy", highlight=False)
    for name, repeats in result.repeats.items():
        for warning in _missing([repeat.summary for repeat in repeats]):
            warn(console, f"{name}: {warning}")


def serve_line(options: ServeOptions, outcome: Outcome) -> str:
    """Return everything about a serving benchmark, as one line of JSON."""
    points = [
        {"name": load_name(point.load), **to_plain(point), "warnings": warnings(point)} for point in outcome.points
    ]
    model = None if outcome.model is None else outcome.model.name
    ranks = {"peak": to_plain(outcome.peak), "ranks_unknown": outcome.ranks_unknown}
    fields = {"model": model, "complete": outcome.is_complete, "arguments": to_plain(options)}
    return make_line("serve", {**fields, "points": points, **ranks})


def offline_line(options: "OfflineOptions", result: "OfflineResult") -> str:
    """Return everything about an offline benchmark, as one line of JSON."""
    fields = {"complete": result.is_complete, "arguments": to_plain(options), "result": to_plain(result)}
    return make_line("offline", fields, has_torch=True)


def _latency_table(point: Point) -> Table:
    table = Table("ms", "mean", "p50", "p90", "p95", "p99", "max", "of", title=load_name(point.load))
    for name, field in {**_LATENCIES, "send lag": "lag_s"}.items():
        times: Distribution | None = getattr(point.summary, field)
        if times is not None:
            count, *seconds = dataclasses.astuple(times)
            table.add_row(name, *map(_ms, seconds), str(count))
    if point.summary.num_answered < MIN_FOR_P99:
        table.caption = f"p99 of fewer than {MIN_FOR_P99} requests is about their slowest"
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _throughput_line(summary: Summary) -> str:
    parts = [
        f"{summary.num_answered} of {summary.num_requests} requests in {summary.duration_s:.2f} s: "
        f"{summary.request_rate:.2f} requests/s",
        f"{summary.input_rate:.1f} input tokens/s",
        f"{summary.output_rate:.1f} output tokens/s",
    ]
    if summary.cached_tokens:
        parts.append(f"{summary.cached_tokens / summary.input_tokens:.1%} of the input cached")
    if summary.goodput is not None:
        good = summary.goodput
        parts.append(
            f"goodput {good.request_rate:.2f} requests/s, {good.output_rate:.1f} output tokens/s "
            f"({good.num_requests / summary.num_requests:.0%} of the requests within the targets)"
        )
    return ", ".join(parts)


def _utilization_line(ranks: Utilization, output_tokens: int) -> str:
    rates = [
        f"{rate / 1e9:.{digits}f} {unit}"
        for rate, digits, unit in ((ranks.read_bytes_per_s, 1, "GB/s"), (ranks.flops_per_s, 0, "GFLOP/s"))
        if rate is not None
    ]
    who = "rank" if ranks.num_ranks == 1 else "ranks"
    parts = [f"{ranks.num_ranks} {who}: the model computed for {ranks.busy_share:.0%} of the time"]
    if rates:
        parts[0] += f", at {' and '.join(rates)}{'' if ranks.num_ranks == 1 else ' each'}"
    shares = (("MBU", ranks.mbu), ("FLOPs", ranks.flop_utilization))
    parts += [f"{name} {share:.1%}" for name, share in shares if share is not None]
    if ranks.peak_memory_bytes is not None:
        parts.append(f"peak memory {ranks.peak_memory_bytes / 1e9:.2f} GB since the start")
    if ranks.energy_j is not None:
        parts.append(f"{ranks.energy_j / max(1, output_tokens):.2f} J per output token")
    return "; ".join(parts)


def _sweep_table(points: Sequence[Point]) -> Table:
    has_goals = any(point.summary.goodput is not None for point in points)
    table = Table(
        *("load", "req/s", "tokens/s", *(("good req/s",) if has_goals else ())),
        *("TTFT p50", "p99", "TPOT p50", "p99", "failed"),
        title="all loads: answered requests, output tokens, latencies in ms",
        box=SIMPLE_HEAD,  # narrow: a terminal of 80 columns shows every number
        padding=(0, 1, 0, 0),
    )
    for point in points:
        summary = point.summary
        table.add_row(
            _short_name(point.load),
            f"{summary.request_rate:.2f}",
            f"{summary.output_rate:.1f}",
            *(() if summary.goodput is None else (f"{summary.goodput.request_rate:.2f}",)),
            *(_ms(each) for times in (summary.ttft_s, summary.tpot_s) for each in _p50_and_p99(times)),
            str(summary.num_requests - summary.num_answered),
        )
    for column in table.columns:
        column.no_wrap = " " not in str(column.header)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _short_name(load: Load) -> str:
    match load:
        case OpenLoop():
            return "at once" if load.is_at_once else f"{load.rate:g}/s"
        case Replay():
            return "trace"
        case ClosedLoop():
            return f"{load.concurrency} at a time"


_OFFLINE_ROWS = (
    *("tokens/s", "good tokens/s", "each repeat", "TTFT ms", "TPOT ms"),
    *("MBU", "FLOPs", "idle", "GB", "J/token"),
)


def _offline_cells(result: "OfflineResult", name: str) -> dict[str, str]:
    """Return one workload's column: "-" where nothing tells or nobody asks."""
    repeats = result.repeats[name]
    cells = (
        _number(result.median(name, lambda repeat: repeat.summary.output_rate)),
        _number(result.median(name, _goodput)),
        ", ".join(_each(repeat) for repeat in repeats),
        _ms(result.median(name, lambda repeat: _p50(repeat.summary.ttft_s))),
        _ms(result.median(name, lambda repeat: _p50(repeat.summary.tpot_s))),
        _share(result.median(name, lambda repeat: repeat.mbu)),
        _share(result.median(name, lambda repeat: repeat.flop_utilization)),
        f"{result.median(name, lambda repeat: repeat.model_idle_share):.1%}",
        f"{max(repeat.peak_memory_bytes for repeat in repeats) / 1e9:.2f}",
        _number(result.median(name, _joules_per_token)),
    )
    return dict(zip(_OFFLINE_ROWS, cells, strict=True))


def _each(repeat: "Repeat") -> str:
    return f"{repeat.summary.output_rate:.1f}" + ("*" if _is_contended(repeat) else "")


def _is_contended(repeat: "Repeat") -> bool:
    return (repeat.span.others_cores or 0.0) > 0.1


def _goodput(repeat: "Repeat") -> float | None:
    return None if repeat.summary.goodput is None else repeat.summary.goodput.output_rate


def _joules_per_token(repeat: "Repeat") -> float | None:
    return None if repeat.energy_j is None else repeat.energy_j / max(1, repeat.summary.output_tokens)


def _p50_and_p99(times: Distribution | None) -> tuple[float | None, float | None]:
    return (None, None) if times is None else (times.p50, times.p99)


def _p50(times: Distribution | None) -> float | None:
    return None if times is None else times.p50


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
