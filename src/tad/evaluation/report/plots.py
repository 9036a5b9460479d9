"""The charts of the scores of single runs. What all charts share is in `panels`, what curves and bars share in `marks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from tad.evaluation.curves import Question
from tad.evaluation.report.board import POOLED, Board, Line, Method, deviation
from tad.evaluation.report.marks import (
    AREA,
    Bar,
    Spot,
    bars_height,
    css_name,
    draw_bars,
    draw_curve,
    draw_first,
    label_curves,
)
from tad.evaluation.report.names import BASE, shorten
from tad.evaluation.report.palette import Look
from tad.evaluation.report.panels import Panel

# Accuracy against tokens per forward


def curve_panel(board: Board, question: Question, looks: Mapping[Method, Look], name: str) -> Panel:
    """Every method on one question; error bars are one standard error."""
    lines = board.of(question)

    def draw(axes: Axes) -> None:
        for line in lines:
            if not line.method.is_first:
                _draw_line(axes, line, looks[line.method])
        _draw_base(axes, board, question, looks)
        label_curves(axes)

    n = ", ".join(str(count) for count in board.examples(question))
    title = question_title(question)
    alt = f"Accuracy against tokens per forward, {title}, n = {n}: " + "; ".join(
        _spoken(line) for line in lines
    )
    return Panel(name, f"{title} (n = {n})", alt, draw, min(board.examples(question)))


def question_title(question: Question) -> str:
    task, template = question
    return shorten(task) if template == "tad" else f"{shorten(task)} ({template})"


def _draw_line(axes: Axes, line: Line, look: Look) -> None:
    points = line.curve.points
    # The first point is everyone's: the base's marker stands there.
    own = [p for p in points if p.setting is not None] or points
    spots = [Spot(p.tpf, p.accuracy, p.tpf_se, p.se, p.dropped, p in own) for p in points]
    draw_curve(axes, spots, look, css_class(line.method))


def _draw_base(axes: Axes, board: Board, question: Question, looks: Mapping[Method, Look]) -> None:
    for line in board.of(question):
        if line.method.is_first:
            point = line.curve.points[0]
            spot = Spot(point.tpf, point.accuracy, point.tpf_se, point.se)
            gid = css_class(line.method)
            draw_first(axes, spot, looks[line.method], gid, is_base=line.method.model == BASE)


def css_class(method: Method) -> str:
    """A name for the method's parts of a chart."""
    return css_name(method.label)


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

    bars = [_bar(method, lines, looks[method]) for method, lines in ordered]

    def draw(axes: Axes) -> None:
        draw_bars(axes, bars, AREA)

    title, key = question_title(question), "/".join(question)
    n = ", ".join(str(count) for count in board.examples(question))
    spoken = "; ".join(f"{method.label} {_area(lines):.0f}" for method, lines in reversed(ordered))
    return Panel(
        name,
        f"{title} (n = {n}, y_max = {board.y_max[key]:.1f} %)",
        f"AUP on {title}: {spoken}",
        draw,
        min(board.examples(question)),
        bars_height(bars),
    )


def _bar(method: Method, lines: Sequence[Line], look: Look) -> Bar:
    value, (low, high) = _area(lines), _area_span(lines)
    points = max(len(line.curve.points) for line in lines)
    return Bar(
        label=method.label,
        value=value,
        low=low,
        high=high,
        text=f"{value:.0f}, {points} {'point' if points == 1 else 'points'}",
        colour=look.colour,
        gid=css_class(method),
        dots=tuple(line.curve.aup or 0.0 for line in lines) if len(lines) > 1 else (),
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
