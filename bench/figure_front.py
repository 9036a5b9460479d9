"""The figure of the README: tokens per forward at equal accuracy on three bases, from the tables of docs/lab/rounds.md.

    python bench/figure_front.py            # writes docs/images/front.png

Nothing is typed in here: a row of those tables that is renamed or missing is an error.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "lab" / "rounds.md", ROOT / "docs" / "images" / "front.png"
BASES = {"small-llada": "small-llada, 26M", "nano-llada": "nano-llada, 3M", "nano-dream": "nano-dream, 3M"}
# Section of a table, its row, what it is called in the figure, colour.
ROWS = (
    ("base", "base, multi-block", "base, TAD's decoder", "#9a96a8"),
    ("leftmost", "base", "base, tad-leftmost", "#6d6880"),
    ("base", "TAD-S", "TAD-S, TAD's decoder", "#6aa9d8"),
    ("leftmost", "TAD-S", "TAD-S, tad-leftmost", "#2f78b3"),
    ("leftmost", "left to right, four rounds", "left to right, four rounds", "#b58a1b"),
    ("leftmost", "the last round parallel", "... the last one parallel", "#7b3fb5"),
)


def read_tables(text: str) -> dict[str, dict[tuple[str, str], tuple[float, float, float]]]:
    """Base -> (section, row) -> tokens per forward at equal accuracy with its interval."""
    found: dict[str, dict[tuple[str, str], tuple[float, float, float]]] = {}
    base = section = ""
    for line in text.splitlines():
        cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
        if head := re.match(r"([\w-]+) \(base [\d.]+", cells[0]):
            base, section = head[1], "base"
            found[base] = {}
        if base not in found or len(cells) < 7:
            continue
        name = cells[0]
        if name.startswith("*"):
            kind, _, name = name.strip("*").partition("*: ")
            section = "leftmost" if "leftmost" in kind else "sequential"
        if value := re.match(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", cells[4]):
            found[base][section, name] = (float(value[1]), float(value[2]), float(value[3]))
    return found


def draw(out: Path = OUT) -> None:
    tables = read_tables(PAGE.read_text(encoding="utf-8"))
    plt.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(1, len(BASES), figsize=(8.3, 3.1), sharey=True, dpi=160)
    for axis, (base, title) in zip(axes, BASES.items(), strict=True):
        for place, (section, row, _, colour) in enumerate(reversed(ROWS)):
            value, low, high = tables[base][section, row]
            axis.barh(place, value, color=colour, height=0.7)
            axis.plot([low, high], [place, place], color="#222", linewidth=1.2)
            axis.text(0.25, place, f"{value:.1f}", va="center", color="white", fontsize=10)
        axis.set_title(title, fontsize=11)
        axis.set_xlim(0, 15)
        axis.set_xticks([0, 5, 10, 15])
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_yticks(range(len(ROWS)), [label for _, _, label, _ in reversed(ROWS)])
    axes[1].set_xlabel("tokens per forward at equal accuracy (lines: 95 % intervals)")
    figure.tight_layout(pad=0.5)
    figure.savefig(out)


if __name__ == "__main__":
    draw()
