"""Plots of a rate sweep, as PNG files. Needs matplotlib, of the extra `bench`."""

import math
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.load.arrivals import ClosedLoop, Load, OpenLoop
from bench.load.serve_values import Point
from bench.load.statistics import Distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plots(folder: Path) -> None:
    """Make the folder. Raises BenchError, before hours of measuring, when it or matplotlib is not to be had."""
    if find_spec("matplotlib") is None:
        raise BenchError('--plot needs matplotlib: pip install "weft[bench]"')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise BenchError(f"{folder} cannot be written to")


def plot_sweep(points: Sequence[Point], folder: Path, *, title: str) -> Path:
    """Draw median and p99 of TTFT and TPOT, and the throughput, against the load; return the file.

    Loads without a number (all at once, times of a trace) are crosses at the rate at which they were answered.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    ttft_axes, tpot_axes, rate_axes = figure.subplots(1, 3)
    for axes, name, field in ((ttft_axes, "TTFT", "ttft_s"), (tpot_axes, "TPOT", "tpot_s")):
        for label, quantile in (("median", "p50"), ("p99", "p99")):
            _draw(axes, points, partial(_milliseconds, field=field, quantile=quantile), label)
        axes.set(ylabel=f"{name} (ms)")
    _draw(rate_axes, points, lambda point: point.summary.output_rate, "all")
    if all(point.summary.goodput is not None for point in points):
        _draw(rate_axes, points, _good_rate, "within the targets", linestyle="--")
    rate_axes.set(ylabel="output tokens/s")
    is_closed = all(isinstance(point.load, ClosedLoop) for point in points)
    has_crosses = any(_number(point.load) is None for point in points)
    for axes in (ttft_axes, tpot_axes, rate_axes):
        axes.set(
            xlabel="requests at a time"
            if is_closed
            else "request rate (arrivals/s" + ("; crosses: answers/s)" if has_crosses else ")"),
            ylim=(0, None),
        )
        if is_closed:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    file = folder / ("concurrency_sweep.png" if is_closed else "rate_sweep.png")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise BenchError(f"{file} cannot be written: {error.strerror}") from error
    return file


def _draw(
    axes: "Axes", points: Sequence[Point], value: Callable[[Point], float], label: str, *, linestyle: str = "-"
) -> None:
    """The loads that have a number as circles and a line through the mean of each, the others as crosses."""
    numbered = sorted((number, value(point)) for point in points if (number := _number(point.load)) is not None)
    others = [(point.summary.request_rate, value(point)) for point in points if _number(point.load) is None]
    means = [
        (number, statistics.fmean(y for _, y in places))
        for number, places in groupby(numbered, key=lambda each: each[0])
    ]
    (line,) = axes.plot(*_columns(means), linestyle=linestyle, label=label)
    for marker, places in (("o", numbered), ("x", others)):  # whole at the edges too
        if places:
            axes.plot(*_columns(places), marker=marker, linestyle="", color=line.get_color(), clip_on=False)


def _columns(places: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in places], [y for _, y in places]


def _number(load: Load) -> float | None:
    match load:
        case ClosedLoop():
            return load.concurrency
        case OpenLoop() if math.isfinite(load.rate):
            return load.rate
        case _:
            return None


def _milliseconds(point: Point, *, field: str, quantile: str) -> float:
    times: Distribution | None = getattr(point.summary, field)
    return math.nan if times is None else getattr(times, quantile) * 1000


def _good_rate(point: Point) -> float:
    return math.nan if point.summary.goodput is None else point.summary.goodput.output_rate
