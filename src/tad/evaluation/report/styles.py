"""How the report looks: the colours of its two themes, how each method is drawn everywhere, and matplotlib's settings.

On the page, colours are CSS variables, so that it can be light or dark; what matplotlib draws has those of the light theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.rcsetup import cycler

from tad.evaluation.analysis import ResultTable

# Six hues that stay apart for readers with any of the common colour deficiencies; a seventh method repeats the first hue
# with a dashed line and hollow markers, so colour is never the only difference. One token at a time is ink.
LIGHT = {
    "paper": "#fbfaf8",
    "raised": "#ffffff",
    "ink": "#1d1c22",
    "quiet": "#5d5b66",
    "line": "#dedbe3",
    "slot-1": "#3c48b9",
    "slot-2": "#bf8b00",
    "slot-3": "#14826d",
    "slot-4": "#65125c",
    "slot-5": "#7293cd",
    "slot-6": "#873600",
}
DARK = {
    "paper": "#16161a",
    "raised": "#1e1e24",
    "ink": "#ececf1",
    "quiet": "#a6a4b2",
    "line": "#3b3a46",
    "slot-1": "#9187fb",
    "slot-2": "#fcc43a",
    "slot-3": "#459469",
    "slot-4": "#d67bb3",
    "slot-5": "#66cafc",
    "slot-6": "#e85112",
}
HUES, _MARKERS = 6, "os^vPX"
_LETTERS = {"o": "●○", "s": "■□", "^": "▲△", "v": "▼▽", "P": "✚✛", "X": "✖✕", "D": "◆◇"}  # filled, hollow
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": LIGHT["quiet"],
    "axes.labelcolor": LIGHT["quiet"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=[LIGHT["ink"]]),
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "xtick.color": LIGHT["quiet"],
    "ytick.color": LIGHT["quiet"],
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "text.color": LIGHT["ink"],
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may hold dollar signs
}


@dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere."""

    colour: str  # a name in LIGHT and DARK
    marker: str  # matplotlib's letter
    dashed: bool = False
    hollow: bool = False

    @property
    def letter(self) -> str:
        """The marker in text."""
        return _LETTERS[self.marker][self.hollow]

    def line(self) -> dict[str, Any]:
        return {"color": LIGHT[self.colour], "linestyle": (0, (4, 2)) if self.dashed else "-"}

    def points(self, hollow: bool = False) -> dict[str, Any]:
        face = LIGHT["raised"] if self.hollow or hollow else LIGHT[self.colour]
        edge = {"markeredgecolor": LIGHT[self.colour], "markeredgewidth": 1.1}
        return {"marker": self.marker, "markersize": 4.6, "markerfacecolor": face, **edge}


FIRST_STYLE = Style("ink", "D")


def get_style(slot: int) -> Style:
    """Of the method that came `slot`-th, from 0. Eighteen differ; after that they repeat."""
    cycle = slot // HUES
    marker = _MARKERS[(slot + cycle) % len(_MARKERS)]
    return Style(f"slot-{slot % HUES + 1}", marker, dashed=cycle % 3 > 0, hollow=cycle % 3 == 1)


def assign_styles(tables: Sequence[ResultTable]) -> dict[str, Style]:
    """Title -> style, the same in every chart of the page."""
    styles: dict[str, Style] = {}
    for table in tables:
        for row in (row for row in table.rows if row.scopes and row.title not in styles):
            taken = sum(style != FIRST_STYLE for style in styles.values())
            styles[row.title] = FIRST_STYLE if row.method == table.base else get_style(taken)
    return styles


def css_name(label: str) -> str:
    """A name for the parts of a chart that belong to a label."""
    return "slot-" + "".join(c if c.isalnum() else "-" for c in label.lower())


def css_variables(theme: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in theme.items())
