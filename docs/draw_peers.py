"""Draw docs/images/peers.png from the table "On the Zen 4" of docs/performance.md; nothing is measured here.

    python docs/draw_peers.py [OUT]      OUT: default docs/images

Needs matplotlib (`pip install "weft[bench]"`).
"""

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
SECTION = "### On the Zen 4"
DTYPES = ("bf16", "8 bits")
COLUMNS = ("110 M: W1", "110 M: W2", "110 M: W3", "0.5 B: W1", "0.5 B: W2", "0.5 B: W3")
COLOURS = {"Weft": "tab:blue", "OpenVINO": "tab:gray", "vLLM": "tab:orange", "llama.cpp": "tab:green"}


def main(out: Path) -> None:
    """Draw a row of six panels for each dtype: tokens per second of each engine."""
    rates = _read_rates((DOCS / "performance.md").read_text())
    figure = Figure(figsize=(16, 6), layout="constrained")
    for row, dtype in enumerate(DTYPES):
        for column, title in enumerate(COLUMNS):
            place = row * len(COLUMNS) + column
            axes = figure.add_subplot(len(DTYPES), len(COLUMNS), place + 1)
            labels = [rates[engine][place] for engine in COLOURS]
            heights = [float(label.replace(",", "") or 0) for label in labels]  # who did not take part has none
            axes.bar_label(axes.bar(list(COLOURS), heights, color=COLOURS.values()), labels, fontsize=8)
            axes.set_title(f"{dtype}, {title}", fontsize=10)
            axes.tick_params(labelsize=7)
            axes.margins(y=0.15)
            if column == 0:
                axes.set_ylabel("output tokens/s")
    figure.savefig(out / "peers.png", dpi=100)


def _read_rates(page: str) -> dict[str, list[str]]:
    """Return the tokens per second of each engine: of each dtype, in the order of COLUMNS."""
    table = page.partition(f"\n{SECTION}\n")[2].partition("| engine |")[2]
    rates = {}
    for engine in COLOURS:
        cells = re.search(rf"^\| {re.escape(engine)} \|(.*)\|$", table, re.MULTILINE)
        if cells is None:
            sys.exit(f"no row of {engine} in the table below {SECTION!r}")
        rates[engine] = [cell.strip() for cell in cells[1].split("|")]
    return rates


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images")
