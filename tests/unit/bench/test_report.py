"""What people see of a benchmark: each number under its name, in its unit."""

import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench.load.arrivals import ClosedLoop, Load, OpenLoop, Replay
from bench.load.hardware import Ceiling
from bench.load.offline import OfflineResult, Repeat
from bench.load.report import load_name, print_offline, print_point, print_sweep, warn_idle, warnings
from bench.load.serve_values import Point
from bench.load.statistics import Distribution, Goodput, Summary, Targets
from bench.load.utilization import Utilization
from bench.machine import Span


def times(mean_s: float) -> Distribution:
    """200 times: the mean, and a thousandth more for each of the others."""
    p50, p90, p95, p99, most = (mean_s + number / 1000 for number in range(1, 6))
    return Distribution(count=200, mean=mean_s, p50=p50, p90=p90, p95=p95, p99=p99, max=most)


SUMMARY = Summary(
    num_requests=10,
    num_answered=8,
    num_short=0,
    asked_tokens=80,
    errors={},
    first_messages={},
    duration_s=4.0,
    input_tokens=400,
    cached_tokens=100,
    output_tokens=80,
    num_seen=80,
    request_rate=2.0,
    input_rate=100.0,
    output_rate=20.0,
    ttft_s=times(0.01),
    tpot_s=times(0.02),
    itl_s=times(0.03),
    e2e_s=times(2.0),
    lag_s=times(0.001),
    goodput=Goodput(targets=Targets(), num_requests=5, request_rate=1.25, output_rate=12.5),
)
RANKS = Utilization(
    num_ranks=2,
    busy_share=0.5,
    read_bytes_per_s=12e9,
    flops_per_s=45e9,
    mbu=0.3,
    flop_utilization=0.1,
    peak_memory_bytes=1.5e9,
    energy_j=160.0,
)
POINT = Point(load=ClosedLoop(concurrency=4), summary=SUMMARY, cpu_share=0.5, utilization=RANKS)


def shown(show: Callable[[Console], None]) -> str:
    """Return what it prints, without the lines of tables."""
    out = StringIO()
    show(Console(file=out, width=300))
    return " ".join(re.sub(r"[^\x00-\x7f]", " ", out.getvalue()).split())


def test_a_load_is_told_in_milliseconds_rates_and_shares() -> None:
    text = shown(lambda console: print_point(console, POINT))
    assert "4 at a time ms mean p50 p90 p95 p99 max of" in text
    for row in (
        "TTFT 10.0 11.0 12.0 13.0 14.0 15.0 200",
        "TPOT 20.0 21.0 22.0 23.0 24.0 25.0 200",
        "ITL 30.0 31.0 32.0 33.0 34.0 35.0 200",
        "end to end 2000 2001 2002 2003 2004 2005 200",
        "send lag 1.0 2.0 3.0 4.0 5.0 6.0 200",
        "p99 of fewer than 100 requests is about their slowest",
    ):
        assert row in text
    assert (
        "8 of 10 requests in 4.00 s: 2.00 requests/s, 100.0 input tokens/s, 20.0 output tokens/s, 25.0% of the input "
        "cached, goodput 1.25 requests/s, 12.5 output tokens/s (50% of the requests within the targets)"
    ) in text
    assert (
        "2 ranks: the model computed for 50% of the time, at 12.0 GB/s and 45 GFLOP/s each; MBU 30.0%; FLOPs 10.0%; "
        "peak memory 1.50 GB since the start; 2.00 J per output token"
    ) in text


def test_a_load_of_which_nothing_was_answered_has_no_latencies() -> None:
    summary = replace(SUMMARY, num_answered=0, cached_tokens=0, goodput=None, ttft_s=None, tpot_s=None)
    point = replace(POINT, summary=summary, utilization=None)
    text = shown(lambda console: print_point(console, point))
    assert text.startswith("0 of 10 requests in 4.00 s")
    assert text.endswith("20.0 output tokens/s")
    assert "4 at a time 2.00 20.0 - - - - 10" in shown(lambda console: print_sweep(console, [point, point]))


def test_what_ranks_do_not_tell_is_left_out() -> None:
    untold = Utilization(
        num_ranks=1,
        busy_share=0.5,
        read_bytes_per_s=None,
        flops_per_s=None,
        mbu=None,
        flop_utilization=None,
        peak_memory_bytes=None,
        energy_j=None,
    )
    text = shown(lambda console: print_point(console, replace(POINT, utilization=untold)))
    assert text.endswith(" 1 rank: the model computed for 50% of the time")


def test_a_sweep_has_a_row_for_each_load() -> None:
    points = [replace(POINT, load=load) for load in (POINT.load, OpenLoop(rate=2.5), OpenLoop(rate=float("inf")))]
    text = shown(lambda console: print_sweep(console, points))
    assert "load req/s tokens/s good req/s TTFT p50 p99 TPOT p50 p99 failed" in text
    for name in ("4 at a time", "2.5/s", "at once"):
        assert f"{name} 2.00 20.0 1.25 11.0 14.0 21.0 24.0 2" in text
    assert shown(lambda console: print_sweep(console, points[:1])) == ""


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (OpenLoop(rate=4), "4 arrivals/s, Poisson"),
        (OpenLoop(rate=4, burstiness=float("inf")), "4 arrivals/s, evenly"),
        (OpenLoop(rate=4, burstiness=0.5), "4 arrivals/s, gamma, burstiness 0.5"),
        (OpenLoop(rate=float("inf")), "all at once"),
        (Replay(), "times of the trace"),
        (Replay(speed=2), "times of the trace, 2 times as fast"),
        (ClosedLoop(concurrency=4), "4 at a time"),
    ],
)
def test_loads_are_named(load: Load, name: str) -> None:
    assert load_name(load) == name


def test_a_load_that_came_as_asked_needs_no_warning() -> None:
    late, busy = replace(SUMMARY, lag_s=times(0.1)), {"cpu_share": 0.9}
    assert warnings(POINT) == []
    assert warnings(replace(POINT, summary=replace(SUMMARY, lag_s=None))) == []
    assert warnings(replace(POINT, load=OpenLoop(rate=float("inf")), summary=late)) == []
    assert warnings(replace(POINT, summary=replace(SUMMARY, duration_s=0.5), **busy)) == []
    assert len(warnings(replace(POINT, load=OpenLoop(rate=4), summary=late, **busy))) == 2


def test_a_workload_of_an_engine_is_told_by_medians_of_its_repeats() -> None:
    def repeat(number: int, others_cores: float | None) -> Repeat:
        return Repeat(
            summary=replace(
                SUMMARY,
                output_rate=20.0 * number,
                ttft_s=times(0.01 * number),
                tpot_s=times(0.02 * number),
                goodput=Goodput(targets=Targets(), num_requests=5, request_rate=1.0, output_rate=12.5 * number),
            ),
            span=Span(wall_s=4.0, others_cores=others_cores),
            num_steps=9,
            mbu=0.1 * number,
            flop_utilization=0.05 * number,
            peak_memory_bytes=number * 10**9,
            model_idle_share=0.015 * number,
            energy_j=80.0 * number,
        )

    result = OfflineResult(
        model=Path("m"),
        dtype="bfloat16",
        device="cpu",
        num_parameters=110_000_000,
        load_s=1.5,
        load_peak_memory_bytes=1,
        ceiling=Ceiling(read_bytes_per_s=20e9, flops_per_s=400e9),
        repeats={"W1": [repeat(1, None), repeat(2, 0.5), repeat(4, 0.05)]},
    )
    text = shown(lambda console: print_offline(console, "m", result))
    assert "m: 110.0 M parameters in bfloat16 on cpu, loaded in 1.5 s" in text
    assert "This machine reads 20.0 GB/s and multiplies 400 GFLOP/s." in text
    assert "W1 tokens/s 40.0 good tokens/s 25.0 each repeat 20.0, 40.0*, 80.0 TTFT ms 21.0 TPOT ms 41.0 MBU" in text
    assert (
        "MBU 20% FLOPs 10% idle 3.0% GB 4.00 J/token 2.0 * other processes kept more than a tenth of a core busy"
        in text
    )
    result.repeats = {"W1": [replace(repeat(1, None), energy_j=None)]}
    text = shown(lambda console: print_offline(console, "m", result))
    assert text.endswith("TPOT ms 21.0 MBU 10% FLOPs 5% idle 1.5% GB 1.00"), "nothing tells of energy"
    result.repeats = {f"W{number}": [repeat(1000, None)] * 3 for number in range(1, 5)}
    out = StringIO()
    print_offline(Console(file=out, width=80), "m", result)
    assert "…" not in out.getvalue()
    assert out.getvalue().count("12500.0") == 4


def test_flags_that_nothing_looks_at_are_named() -> None:
    assert shown(lambda console: warn_idle(console, ["--turns"])) == "Warning: nothing looks at --turns here"
    assert shown(lambda console: warn_idle(console, [])) == ""
