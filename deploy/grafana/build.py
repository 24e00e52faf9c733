"""Writes the dashboards as JSON beside this file, or elsewhere: `python deploy/grafana/build.py [OUTPUT_FOLDER]`."""

import sys
from pathlib import Path

from inside_boards import CLUSTER, REPLICAS, ROUTING
from panels import to_json
from service_boards import MODELS, OVERVIEW, TENANTS

BOARDS = (OVERVIEW, REPLICAS, ROUTING, CLUSTER, MODELS, TENANTS)


def build(output: Path) -> None:
    """Write one file for each dashboard."""
    for board in BOARDS:
        (output / f"{board.name}.json").write_text(to_json(board), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
