"""`weft bench serve` around the measuring: bars, tables, the line of JSON and the plot, also after Ctrl-C."""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Sequence
from pathlib import Path

from rich.console import Console

from bench.errors import BenchError
from bench.load.flag_groups import RankFlags
from bench.load.flags import find_control
from bench.load.plots import check_plots, plot_sweep
from bench.load.progress import ServeProgress
from bench.load.report import print_limits, print_sweep, serve_line, warn_idle
from bench.load.serve import measure
from bench.load.serve_values import Outcome, ServeOptions
from bench.load.service_ranks import ServiceRanks
from bench.result_line import append_line, check_line_file
from cluster.cli_connection import connect
from cluster.control_client import ControlClient
from workers.cores import give_way


def run_serve(
    options: ServeOptions, ranks: RankFlags, *, idle: Sequence[str], json_file: Path | None, plot: Path | None
) -> None:
    """Measure, and tell what was measured; `ranks` says who knows them, `idle` are flags that say nothing about it.

    Raises what `measure` raises, and BenchError when no request was answered or a file cannot be written.
    """
    if json_file is not None:
        check_line_file(json_file)
    if plot is not None:
        check_plots(plot)
    console, outcome = Console(), Outcome()
    warn_idle(console, idle)
    give_way()  # to a service on the same cores, which is what is measured
    control, router_port = find_control(ranks, options.target)
    try:
        with ServeProgress(console) as watcher, _connect(control, ranks) as client:
            source = ServiceRanks(client, router_port=router_port)
            asyncio.run(_until_terminated(measure(options, watcher, outcome, ranks=source)))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        if outcome.points:
            _tell(options, outcome, console, json_file=json_file, plot=plot)
    if not any(point.summary.num_answered for point in outcome.points):
        raise BenchError("no request was answered")


async def _until_terminated(measuring: Awaitable[Outcome]) -> None:
    """Let SIGTERM end the measuring as Ctrl-C does: what was measured is told."""
    measured = asyncio.ensure_future(measuring)
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, measured.cancel)
    await measured


def _tell(
    options: ServeOptions, outcome: Outcome, console: Console, *, json_file: Path | None, plot: Path | None
) -> None:
    if json_file is not None:  # first: whoever reads the tables may have closed the pipe
        append_line(serve_line(options, outcome), json_file)
    print_sweep(console, outcome.points)
    print_limits(console, outcome)
    if plot is not None:
        name = "" if outcome.model is None else outcome.model.name
        title = f"{name} over {options.target.protocol}, {options.dataset.kind} prompts"
        console.print(f"Plot: {plot_sweep(outcome.points, plot, title=title)}", highlight=False)


def _connect(control: str, ranks: RankFlags) -> ControlClient:
    """Connect to the controller. Raises ClusterConfigError when the TLS files cannot be used."""
    cert, key, ca = (
        None if file is None else str(file)
        for file in (ranks.control_tls_cert, ranks.control_tls_key, ranks.control_tls_ca)
    )
    return connect(control=control, tls_cert=cert, tls_key=key, tls_ca=ca, tls_name=ranks.control_tls_name)
