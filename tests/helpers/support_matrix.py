"""The table of docs/models.md: which families are proven against their original, and over which ranks.

It is made from the ids of the tests that prove it; after a change to those, in tests/:
python -m helpers.support_matrix
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers import packed_models
from parallel.families.registry import FAMILIES

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "models.md"
PROOF = "tests/distributed/test_models_match_transformers.py"

_BEGIN, _END = "<!-- support matrix: generated -->\n", "<!-- end of support matrix -->"
_FAMILY_TEST = re.compile(r"family_equals_transformers\[(?P<name>\w+)-(?P<tp>\d+)-(?P<pp>\d+)\]$")
_EXPERT_TEST = re.compile(r"expert_parallel_equals_transformers\[(?P<name>\w+)-(?P<tp>\d+)-\d+\]$")
_OPTION_TEST = re.compile(r"option\w*_equals_transformers\[(?P<name>[a-z0-9_]+)-(?P<option>[\w-]+)\]$")


def collect_test_ids() -> list[str]:
    """The ids of all tests that compare a tiny model with its original."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", PROOF]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600)
    return [line for line in result.stdout.splitlines() if "::" in line]


def render(test_ids: Sequence[str]) -> str:
    """The table, one row per family that Weft knows."""
    shapes: dict[str, set[tuple[int, int]]] = {}
    expert_parallel: dict[str, set[int]] = {}
    options: dict[str, list[str]] = {}
    for test_id in test_ids:
        if match := _FAMILY_TEST.search(test_id):
            shapes.setdefault(match["name"], set()).add((int(match["tp"]), int(match["pp"])))
        elif match := _EXPERT_TEST.search(test_id):
            expert_parallel.setdefault(match["name"], set()).add(int(match["tp"]))
        elif match := _OPTION_TEST.search(test_id):
            options.setdefault(match["name"], []).append(match["option"])
    columns = ["`model_type`", "TP", "EP", "PP", "quantised", "also proven", "notes"]
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for name in sorted(FAMILIES):
        tps, pps = (sorted({shape[axis] for shape in shapes.get(name, ())}) for axis in (0, 1))
        eps = sorted(expert_parallel.get(name, ()))
        packed = [option for option in options.get(name, ()) if f"{name}-{option}" in packed_models.NAMES]
        others = [option for option in options.get(name, ()) if option not in packed]
        columns = [f"`{name}`", _join(tps), _join(eps), _join(pps), _join(packed), _join(others), _note(name)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def embed(document: str, table: str) -> str:
    """The document with this table in place of the one that it has."""
    begin, end = document.index(_BEGIN) + len(_BEGIN), document.index(_END)
    return document[:begin] + table + document[end:]


def _join(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _note(name: str) -> str:
    """What the family's file says of itself."""
    summary = (sys.modules[FAMILIES[name].describe.__module__].__doc__ or "").partition("\n")[0]
    return summary.replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(embed(DOCUMENT.read_text(), render(collect_test_ids())))
