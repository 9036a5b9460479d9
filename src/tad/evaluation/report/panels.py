"""What all charts share: a panel is drawn on given axes, so that a page gets panels that wrap and a PNG gets a row of them.

Sizes are those of a panel about 350 CSS pixels wide, which a phone shows whole and a laptop shows three abreast.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tad.evaluation.report.palette import LIGHT, Look
from tad.evaluation.report.svg import fit_for_page

WIDTH, HEIGHT = 4.5, 3.2  # inches, at 72 to the inch
_STYLE: Any = {
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
class Panel:
    """A chart to be: how it is drawn, and what it shows in words."""

    name: str  # letters, digits and dashes, unique on the page
    title: str
    alt: str
    draw: Callable[[Axes], None]
    n: float = math.inf  # examples behind it; of training, no limit
    height: float = HEIGHT


def as_svg(panel: Panel) -> str:
    """The panel as an `<svg>` element for the page, which has its own heading for the title."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": panel.name}):
        figure = Figure(figsize=(WIDTH, panel.height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        panel.draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return fit_for_page(file.getvalue(), panel.name, panel.alt)


def as_png(panels: Sequence[Panel], path: Path, foot: str, looks: Mapping[str, Look] | None = None) -> Path:
    """Panels in rows of up to three, with a legend of `looks` above and a line of facts below."""
    columns = min(len(panels), 4 if len(panels) == 4 else 3)
    rows = -(-len(panels) // columns)
    height = max(panel.height for panel in panels)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(columns * WIDTH, rows * height + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        figure.patch.set_facecolor(LIGHT["raised"])
        head = _add_legend(figure, looks) if looks else 0.0
        figure.set_size_inches(columns * WIDTH, rows * height + head + 0.3)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, axes in zip(panels, grid, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.supxlabel(
            textwrap.fill(foot, int(20 * figure.get_figwidth())), fontsize=8.5, color=LIGHT["quiet"]
        )
        figure.savefig(path, format="png", dpi=144, metadata={"Software": None})
    return path


def _add_legend(figure: Figure, looks: Mapping[str, Look]) -> float:
    """A legend in as few rows as fit into the figure's width; returns its height in inches."""
    longest = int(11 * figure.get_figwidth())  # letters
    handles = [_handle(look, textwrap.fill(label, longest)) for label, look in looks.items()]
    for columns in range(len(handles), 0, -1):
        legend = figure.legend(handles=handles, loc="outside upper center", ncols=columns)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= 0.98 * figure.bbox.width:
            break
        legend.remove()
    return float(box.height) / figure.dpi + 0.05


def _handle(look: Look, label: str) -> Line2D:
    return Line2D([], [], label=label, **line_style(look), **marker_style(look))


def line_style(look: Look) -> dict[str, Any]:
    return {"color": LIGHT[look.colour], "linestyle": (0, (4, 2)) if look.dashed else "-"}


def marker_style(look: Look, hollow: bool = False) -> dict[str, Any]:
    face = LIGHT["raised"] if look.hollow or hollow else LIGHT[look.colour]
    return {
        "marker": look.marker,
        "markersize": 4.6,
        "markerfacecolor": face,
        "markeredgecolor": LIGHT[look.colour],
        "markeredgewidth": 1.1,
    }
