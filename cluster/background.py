"""The process that `weft serve --detach` leaves behind: settings come as JSON on stdin, output goes to the log file."""

import json
import sys

from rich.console import Console

from cluster.cli import run_and_report
from cluster.config import build_spec
from cluster.serve import serve


def main() -> None:
    """Serve what stdin says, logging at the level of the first argument."""
    settings = json.load(sys.stdin)
    run_and_report(lambda: serve(build_spec(settings), Console(), log_level=sys.argv[1]))


if __name__ == "__main__":
    main()
