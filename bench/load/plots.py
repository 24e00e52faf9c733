"""Plots of a rate sweep, as PNG files. Needs matplotlib, of the extra `bench`."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.errors import BenchError
from bench.load.arrivals import ClosedLoop, OpenLoop
from bench.load.serve import Point


def check_plots(folder: Path) -> None:
    """Make the folder. Raises BenchError, before hours of measuring, when it or matplotlib is not to be had."""
    if find_spec("matplotlib") is None:
        raise BenchError('--plot needs matplotlib: pip install "weft[bench]"')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder} cannot be made: {error.strerror}") from error


def plot_sweep(points: Sequence[Point], folder: Path, *, title: str) -> Path:
    """Draw median and p99 of TTFT and TPOT, and the throughput, against the load; return the file.

    Loads without a number (all at once, times of a trace) are drawn at the rate at which they were answered.
    """
    from matplotlib.figure import Figure

    ordered = sorted(points, key=_place)
    places = [_place(point) for point in ordered]
    figure = Figure(figsize=(12, 4), layout="constrained")
    ttft_axes, tpot_axes, rate_axes = figure.subplots(1, 3)
    for axes, name, field in ((ttft_axes, "TTFT", "ttft_s"), (tpot_axes, "TPOT", "tpot_s")):
        for label, quantile in (("median", "p50"), ("p99", "p99")):
            times = [getattr(point.summary, field) for point in ordered]
            values = [math.nan if time is None else getattr(time, quantile) * 1000 for time in times]
            axes.plot(places, values, marker="o", label=label)
        axes.set(ylabel=f"{name} (ms)", ylim=(0, None))
    rate_axes.plot(places, [point.summary.output_rate for point in ordered], marker="o", label="all")
    if all(point.summary.goodput is not None for point in ordered):
        good = [point.summary.goodput.output_rate for point in ordered if point.summary.goodput is not None]
        rate_axes.plot(places, good, marker="o", linestyle="--", label="within the targets")
    rate_axes.set(ylabel="output tokens/s", ylim=(0, None))
    is_closed = all(isinstance(point.load, ClosedLoop) for point in points)
    for axes in (ttft_axes, tpot_axes, rate_axes):
        axes.set(xlabel="requests at a time" if is_closed else "request rate (arrivals/s)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    file = folder / ("concurrency_sweep.png" if is_closed else "rate_sweep.png")
    figure.savefig(file, dpi=120)
    return file


def _place(point: Point) -> float:
    match point.load:
        case ClosedLoop():
            return point.load.concurrency
        case OpenLoop() if math.isfinite(point.load.rate):
            return point.load.rate
        case _:
            return point.summary.request_rate
