"""The charts of the scores, and what all charts share: a panel is drawn on given axes, so that a page gets panels that wrap
and a PNG gets a row of them.

Sizes are those of a panel about 350 CSS pixels wide, which a phone shows whole and a laptop shows three abreast.
"""

from __future__ import annotations

import io
import math
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
from matplotlib.ticker import MaxNLocator

from tad.evaluation.curves import Question
from tad.evaluation.report.board import POOLED, Board, Line, Method, deviation
from tad.evaluation.report.names import BASE
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
    handles = [_handle(look, label) for label, look in (looks or {}).items()]
    per_line = max(1, int(columns * WIDTH / 2.2))
    head = 0.26 * -(-len(handles) // per_line)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(columns * WIDTH, rows * height + head + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        figure.patch.set_facecolor(LIGHT["raised"])
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, axes in zip(panels, grid, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        if handles:
            figure.legend(handles=handles, loc="outside upper center", ncols=min(per_line, len(handles)))
        figure.supxlabel(foot, fontsize=8.5, color=LIGHT["quiet"])
        figure.savefig(path, format="png", dpi=144, metadata={"Software": None})
    return path


def _handle(look: Look, label: str) -> Line2D:
    return Line2D([], [], label=label, **_line_style(look), **_marker_style(look))


def _line_style(look: Look) -> dict[str, Any]:
    return {"color": LIGHT[look.colour], "linestyle": (0, (4, 2)) if look.dashed else "-"}


def _marker_style(look: Look, hollow: bool = False) -> dict[str, Any]:
    face = LIGHT["raised"] if look.hollow or hollow else LIGHT[look.colour]
    return {
        "marker": look.marker,
        "markersize": 4.6,
        "markerfacecolor": face,
        "markeredgecolor": LIGHT[look.colour],
        "markeredgewidth": 1.1,
    }


# Accuracy against tokens per forward


def curve_panel(board: Board, question: Question, looks: Mapping[Method, Look], name: str) -> Panel:
    """Every method on one question; error bars are one standard error."""
    lines = board.of(question)

    def draw(axes: Axes) -> None:
        for number, line in enumerate(lines):
            if not line.method.is_first:
                _draw_line(axes, line, looks[line.method], number)
        _draw_base(axes, board, question, looks)
        axes.set_xlabel("tokens per forward (TPF)")
        axes.set_ylabel("accuracy, %")
        axes.set_xlim(left=0)
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(high, 100 + 0.03 * (high - low)))  # a marker at 100 % is whole
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))

    n = ", ".join(str(count) for count in board.examples(question))
    title = question_title(question)
    alt = f"Accuracy against tokens per forward, {title}, n = {n}: " + "; ".join(
        _spoken(line) for line in lines
    )
    return Panel(name, f"{title} (n = {n})", alt, draw, min(board.examples(question)))


def question_title(question: Question) -> str:
    task, template = question
    short = Path(task.partition(":")[2]).name if task.startswith("jsonl:") else task
    return short if template == "tad" else f"{short} ({template})"


def _draw_line(axes: Axes, line: Line, look: Look, order: int) -> None:
    points = line.curve.points
    speed, accuracy = [p.tpf for p in points], [p.accuracy for p in points]
    gid = css_class(line.method)
    kept = [(p.tpf, p.accuracy) for p in points if not p.dropped]
    if len(points) > 1:
        (thread,) = axes.plot(speed, accuracy, linewidth=1.0, alpha=0.45, zorder=2, **_line_style(look))
        thread.set_gid(gid)
        (strong,) = axes.plot(*zip(*kept, strict=True), zorder=3, **_line_style(look))
        strong.set_gid(gid)
    # The first point is everyone's: the base's marker stands there.
    own = [p for p in points if p.setting is not None] or points
    for part, hollow in (([p for p in own if not p.dropped], False), ([p for p in own if p.dropped], True)):
        if not part:
            continue
        bars = axes.errorbar(
            [p.tpf for p in part],
            [p.accuracy for p in part],
            xerr=[_number(p.tpf_se) for p in part],
            yerr=[_number(p.se) for p in part],
            linestyle="none",
            ecolor=LIGHT[look.colour],
            elinewidth=0.9,
            zorder=4,
            **_marker_style(look, hollow),
        )
        for artist in (bars[0], *bars[2]):
            artist.set_gid(gid)


def _draw_base(axes: Axes, board: Board, question: Question, looks: Mapping[Method, Look]) -> None:
    for line in board.of(question):
        if not line.method.is_first:
            continue
        point, look = line.curve.points[0], looks[line.method]
        bars = axes.errorbar(
            [point.tpf],
            [point.accuracy],
            xerr=[_number(point.tpf_se)],
            yerr=[_number(point.se)],
            linestyle="none",
            ecolor=LIGHT[look.colour],
            elinewidth=0.9,
            zorder=6 if line.method.model == BASE else 5,
            **_marker_style(look),
        )
        for artist in (bars[0], *bars[2]):
            artist.set_gid(css_class(line.method))
        if line.method.model == BASE:
            axes.axhline(point.accuracy, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)


def css_class(method: Method) -> str:
    """A name for the method's parts of a chart."""
    return "slot-" + "".join(c if c.isalnum() else "-" for c in method.label.lower())


def _number(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _spoken(line: Line) -> str:
    fast = max(line.curve.points, key=lambda point: point.tpf)
    return f"{line.method.label} up to TPF {fast.tpf:.1f} at {fast.accuracy:.0f} %"


# Area under the curve


def area_panel(board: Board, question: Question, looks: Mapping[Method, Look], name: str) -> Panel | None:
    """AUP bars, longest first; None where no method has an area."""
    groups: dict[Method, list[Line]] = {}
    for line in board.of(question):
        if line.curve.aup is not None and not line.method.is_first:
            groups.setdefault(line.method, []).append(line)
    if not groups or question[0] == POOLED:
        return None
    ordered = sorted(groups.items(), key=lambda entry: _area(entry[1]))

    def draw(axes: Axes) -> None:
        for place, (method, lines) in enumerate(ordered):
            value, (low, high) = _area(lines), _area_span(lines)
            (bar,) = axes.barh(place, value, height=0.62, color=LIGHT[looks[method].colour], alpha=0.85)
            bar.set_gid(css_class(method))
            axes.plot([low, high], [place, place], color=LIGHT["ink"], linewidth=1.1, solid_capstyle="butt")
            for end in (low, high):
                axes.plot([end, end], [place - 0.12, place + 0.12], color=LIGHT["ink"], linewidth=1.1)
            if len(lines) > 1:
                for line in lines:
                    axes.plot(line.curve.aup, place, "o", color=LIGHT["ink"], markersize=2.6)
            points = max(len(line.curve.points) for line in lines)
            axes.annotate(
                f"{value:.0f}, {points} {'point' if points == 1 else 'points'}",
                (max(value, high), place),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9.5,
            )
        axes.set_yticks(range(len(ordered)), [method.label for method, _ in ordered])
        axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, 1.42 * max(max(_area(lines), _area_span(lines)[1]) for _, lines in ordered))
        axes.set_xlabel("AUP (area under accuracy, %, over TPF)")

    title, key = question_title(question), "/".join(question)
    n = ", ".join(str(count) for count in board.examples(question))
    spoken = "; ".join(f"{method.label} {_area(lines):.0f}" for method, lines in reversed(ordered))
    return Panel(
        name,
        f"{title} (n = {n}, y_max = {board.y_max[key]:.1f} %)",
        f"AUP on {title}: {spoken}",
        draw,
        min(board.examples(question)),
        1.0 + 0.34 * len(ordered),
    )


def _area(lines: Sequence[Line]) -> float:
    """The mean over training seeds."""
    areas = [line.curve.aup for line in lines if line.curve.aup is not None]
    return sum(areas) / len(areas)


def _area_span(lines: Sequence[Line]) -> tuple[float, float]:
    """The 95 % interval over examples of one line; of several seeds, one standard deviation to each side."""
    if len(lines) > 1:
        spread = deviation([line.curve.aup for line in lines if line.curve.aup is not None])
        return _area(lines) - spread, _area(lines) + spread
    found = lines[0].curve.aup_interval
    return found if found is not None else (_area(lines), _area(lines))
