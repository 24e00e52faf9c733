"""What `weft simulate` tells of its policies: a table with a column for each, and a line of JSON for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.plain_json import to_plain
from bench.result_line import make_line


def print_outcomes(console: Console, outcomes: Sequence[Mapping[str, str]]) -> None:
    """Print a column for each outcome, headed by its first value; a terminal of 80 columns shows all policies."""
    head, *rows = ((name, *(each[name] for each in outcomes)) for name in outcomes[0])
    table = Table(*head, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)


def outcomes_line(options: Any, outcomes: Sequence[Any]) -> str:
    """Return everything about a simulation, as one line of JSON."""
    return make_line("simulate", {"arguments": to_plain(options), "outcomes": to_plain(outcomes)})
