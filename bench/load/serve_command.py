"""`weft bench serve` around the measuring: bars, tables, the line of JSON and the plot, also after Ctrl-C."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.errors import BenchError
from bench.load.plots import check_plots, plot_sweep
from bench.load.progress import ServeProgress
from bench.load.report import append_line, check_line_file, print_sweep, serve_line, warn_idle
from bench.load.serve import Outcome, ServeOptions, measure
from workers.cores import give_way


def run_serve(options: ServeOptions, *, idle: Sequence[str], json_file: Path | None, plot: Path | None) -> None:
    """Measure, and tell what was measured; `idle` are flags that say nothing about it.

    Raises what `measure` raises, and BenchError when no request was answered or a file cannot be written.
    """
    if json_file is not None:
        check_line_file(json_file)
    if plot is not None:
        check_plots(plot)
    console, outcome = Console(), Outcome()
    warn_idle(console, idle)
    give_way()  # to a service on the same cores, which is what is measured
    try:
        with ServeProgress(console) as watcher:
            asyncio.run(measure(options, watcher, outcome))
    finally:
        if outcome.points:
            _tell(options, outcome, console, json_file=json_file, plot=plot)
    if not any(point.summary.num_answered for point in outcome.points):
        raise BenchError("no request was answered")


def _tell(
    options: ServeOptions, outcome: Outcome, console: Console, *, json_file: Path | None, plot: Path | None
) -> None:
    print_sweep(console, outcome.points)
    if json_file is not None:
        append_line(serve_line(options, outcome), json_file)
    if plot is not None:
        name = "" if outcome.model is None else outcome.model.name
        title = f"{name} over {options.target.protocol}, {options.dataset.kind} prompts"
        console.print(f"Plot: {plot_sweep(outcome.points, plot, title=title)}", highlight=False)
