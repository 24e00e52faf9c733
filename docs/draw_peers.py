"""Draw docs/images/peers.png from the tables of docs/performance.md, "Beside other engines"; nothing is measured here.

    python docs/draw_peers.py [OUT]      OUT: default docs/images

Needs matplotlib (`pip install "weft[bench]"`).
"""

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
SECTIONS = ("bf16", "8 bits")
COLUMNS = ("110 M: W1", "110 M: W2", "110 M: W3", "0.5 B: W1", "0.5 B: W2", "0.5 B: W3")
COLOURS = {"Weft": "tab:blue", "OpenVINO": "tab:gray", "vLLM": "tab:orange"}


def main(out: Path) -> None:
    """Draw a row of six panels for each section: tokens per second of each engine."""
    page = (DOCS / "performance.md").read_text()
    figure = Figure(figsize=(14, 6), layout="constrained")
    for row, section in enumerate(SECTIONS):
        rates = _read_rates(page, section)
        for column, title in enumerate(COLUMNS):
            axes = figure.add_subplot(len(SECTIONS), len(COLUMNS), row * len(COLUMNS) + column + 1)
            labels = [rates[engine][column] for engine in COLOURS]
            heights = [float(label.replace(",", "")) for label in labels]
            axes.bar_label(axes.bar(list(COLOURS), heights, color=COLOURS.values()), labels, fontsize=8)
            axes.set_title(f"{section}, {title}", fontsize=10)
            axes.tick_params(labelsize=8)
            axes.margins(y=0.15)
            if column == 0:
                axes.set_ylabel("output tokens/s")
    figure.savefig(out / "peers.png", dpi=100)


def _read_rates(page: str, section: str) -> dict[str, list[str]]:
    """Return the tokens per second of each engine, in the order of COLUMNS, as the table below a heading has them."""
    table = page.partition(f"\n### {section}\n")[2].partition("| engine |")[2]
    rates = {}
    for engine in COLOURS:
        cells = re.search(rf"^\| {engine} \|(.*)\|$", table, re.MULTILINE)
        if cells is None:
            sys.exit(f"no row of {engine} in the table of {section}")
        rates[engine] = [cell.strip() for cell in cells[1].split("|")]
    return rates


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images")
