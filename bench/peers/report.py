"""Tables for people and one JSON value for programs, of a comparison with peers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.peers.catalog import WEFT
from bench.peers.comparison import Row, summarize
from bench.peers.measure import Options, Outcome, describe_agreement


def make_report(options: Options, outcome: Outcome) -> dict[str, Any]:
    """Return everything that was seen and computed; every round is in it, the contended ones marked."""
    rows = summarize(outcome.measured, reference=WEFT)
    return {
        "model": options.model.name,
        "dtype": options.dtype,
        "device": options.device,
        "sampling": asdict(options.sampling),
        "weft_kv_cache_dtype": options.weft_kv_cache_dtype,
        "rounds": options.rounds,
        "was_interrupted": outcome.was_interrupted,
        "seed": options.seed,
        "num_threads": options.num_threads,
        "engines": {name: asdict(loaded) for name, loaded in outcome.loaded.items()},
        "skipped": outcome.skipped,
        "rows": [asdict(row) for row in rows],
        "best_peer": {workload: asdict(row) for workload, row in _best_peers(rows).items()},
        "agreement": {
            workload: {name: asdict(agreement) for name, agreement in peers.items()}
            for workload, peers in outcome.agreements.items()
        },
        "sections": [{**asdict(each), "is_contended": each.is_contended} for each in outcome.measured],
    }


def print_report(console: Console, outcome: Outcome) -> None:
    """Print rates and ratios by workload, how the tokens compare, and who is missing."""
    rows = summarize(outcome.measured, reference=WEFT)
    best = _best_peers(rows)
    for workload in dict.fromkeys(row.workload for row in rows):
        table = Table("engine", "tokens/s", "of rounds", "Weft / it", "TTFT ms", "TPOT ms", title=workload)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in (row for row in rows if row.workload == workload):
            table.add_row(*_cells(row), style="bold" if row is best.get(workload) else None)
        console.print(table)
    console.print("* contended: another process was busy; not in any median", highlight=False, soft_wrap=True)
    for workload, agreements in outcome.agreements.items():
        for name, agreement in agreements.items():
            console.print(
                f"{workload} {name}: {describe_agreement(agreement)}", markup=False, highlight=False, soft_wrap=True
            )
    for name, reason in outcome.skipped.items():
        console.print(f"{name} is missing: {reason}", markup=False, highlight=False, soft_wrap=True)


def _best_peers(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the peer with the highest median of each workload; none where all its rounds were contended."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.engine != WEFT and row.median_rate is not None:
            leader = best.get(row.workload)
            if leader is None or leader.median_rate is None or row.median_rate > leader.median_rate:
                best[row.workload] = row
    return best


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.engine,
        _number(row.median_rate, "{:.1f}"),
        ", ".join([f"{rate:.1f}" for rate in row.rates] + [f"{rate:.1f}*" for rate in row.dropped_rates]),
        _number(row.ratio, "{:.2f}"),
        _number(None if row.ttft_s is None else row.ttft_s * 1000, "{:.0f}"),
        _number(None if row.tpot_s is None else row.tpot_s * 1000, "{:.1f}"),
    )


def _number(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)
