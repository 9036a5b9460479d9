"""The charts: what is drawn on axes, and how that becomes SVG for the page and PNG beside it. Colours are in `styles`.

A chart is drawn on given axes, so that the page gets charts that wrap and a PNG gets a row of them. Sizes are those of a
chart about 350 CSS pixels wide, which a phone shows whole and a laptop shows three abreast.
"""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tad.evaluation.analysis import CurvePoint, Estimate, ResultTable
from tad.evaluation.report.gather import StoreData, TrainingData
from tad.evaluation.report.styles import HUES, LIGHT, RC, Style, css_name
from tad.evaluation.tables import describe_seeds, shorten
from tad.trajectories.window_picture import draw_decay

WIDTH, HEIGHT = 4.5, 3.2  # inches, at 72 to the inch
_WRAP = 26  # letters in front of a bar


@dataclass(frozen=True)
class Chart:
    """A chart to be: how it is drawn, and what it shows in words."""

    name: str  # letters, digits and dashes, unique on the page
    title: str
    alt: str
    draw: Callable[[Axes], None]
    n: float = math.inf  # examples behind it; of training, no limit
    height: float = HEIGHT


# Results


def chart_curves(table: ResultTable, scope: str, styles: Mapping[str, Style], name: str) -> Chart:
    """Accuracy against tokens per forward of every method in one scope."""
    rows = [row for row in table.rows if scope in row.scopes]
    n = rows[0].scopes[scope].n
    title = f"{shorten(scope)} (n = {n:,})"

    def draw(axes: Axes) -> None:
        for row in rows:
            points, style, gid = row.scopes[scope].points, styles[row.title], css_name(row.title)
            if row.method == table.base:
                _draw_points(axes, points[:1], style, gid, 6)
                level = points[0].accuracy.value
                axes.axhline(level, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
            else:
                _draw_curve(axes, points, style, gid)
        axes.set_xlabel("tokens per forward (TPF)")
        axes.set_ylabel("accuracy, %")
        axes.set_xlim(left=0)
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(high, 100 + 0.03 * (high - low)))  # a marker at 100 % is whole
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))

    fastest = [(row, max(row.scopes[scope].points, key=lambda point: point.tpf.value)) for row in rows]
    spoken = "; ".join(
        f"{row.title} up to TPF {p.tpf.value:.1f} at {p.accuracy.value:.0f} %" for row, p in fastest
    )
    return Chart(name, title, f"Accuracy against tokens per forward, {title}: {spoken}", draw, n)


def _draw_curve(axes: Axes, points: Sequence[CurvePoint], style: Style, gid: str) -> None:
    """A thin line through all points, a strong one through those that count, and markers with error bars."""
    kept = [point for point in points if not point.dropped]
    for part, look in ((points, {"linewidth": 1.0, "alpha": 0.45, "zorder": 2}), (kept, {"zorder": 3})):
        if len(part) > 1:
            values = [point.tpf.value for point in part], [point.accuracy.value for point in part]
            axes.plot(*values, **style.line(), **look)[0].set_gid(gid)
    _draw_points(axes, kept, style, gid, 4)
    _draw_points(axes, [point for point in points if point.dropped], style, gid, 4, hollow=True)


def _draw_points(
    axes: Axes, points: Sequence[CurvePoint], style: Style, gid: str, zorder: int, hollow: bool = False
) -> None:
    if not points:
        return
    errors = np.array([_error_bar(point.accuracy) for point in points]).T
    bars = axes.errorbar(
        [point.tpf.value for point in points],
        [point.accuracy.value for point in points],
        xerr=np.array([_error_bar(point.tpf) for point in points]).T,
        yerr=errors,
        linestyle="none",
        ecolor=LIGHT[style.colour],
        elinewidth=0.9,
        zorder=zorder,
        **style.points(hollow),
    )
    for artist in (bars[0], *bars[2]):
        artist.set_gid(gid)


def _error_bar(one: Estimate) -> tuple[float, float]:
    """Below and above: the spread over training seeds where there are several, else the standard error over problems; where
    that misleads, half of the 95 % interval's arms, which is about one standard error."""
    if one.sd is None and one.few and one.interval is not None:
        return max(0.0, one.value - one.interval[0]) / 1.96, max(0.0, one.interval[1] - one.value) / 1.96
    error = one.se if one.sd is None else one.sd
    error = 0.0 if error is None or math.isnan(error) else error
    return error, error


@dataclass(frozen=True)
class Bar:
    """A bar with its whisker, and what stands behind it."""

    label: str
    value: float
    interval: tuple[float, float]
    text: str
    style: Style


def chart_accuracies(table: ResultTable, styles: Mapping[str, Style], name: str) -> Chart | None:
    """Accuracy of each method at its default setting, with its tokens per forward."""
    bars = []
    for row in (row for row in table.rows if row.scopes):
        found = row.scopes[table.scope]
        one, tpf = found.accuracy, found.tpf.value
        interval = one.interval or (one.value, one.value)
        bars.append(Bar(row.title, one.value, interval, f"{one.value:.1f} @ {tpf:.2f}", styles[row.title]))
    title = f"Accuracy @ TPF, {shorten(table.scope)}"
    return _chart_bars(table, bars, title, "accuracy, %", name, ticks=range(0, 101, 20))


def chart_speeds(table: ResultTable, styles: Mapping[str, Style], name: str) -> Chart | None:
    """Tokens per forward of each method at the target accuracy."""
    if table.scope not in table.targets or table.targets[table.scope] <= 0:
        return None
    bars = []
    for row in (row for row in table.rows if row.scopes):
        found = row.scopes[table.scope]
        assert found.tpf_at_target is not None
        tpf = found.tpf_at_target.tpf
        interval = (0.0, 0.0) if tpf is None else found.tpf_at_target_interval
        text = str(found.tpf_at_target).replace(">=", "≥")
        bars.append(Bar(row.title, tpf or 0.0, interval, text, styles[row.title]))
    title = f"TPF at {table.targets[table.scope]:.1f} % (base − {table.tolerance:g})"
    return _chart_bars(table, bars, title, "tokens per forward (TPF)", name)


def chart_areas(table: ResultTable, styles: Mapping[str, Style], name: str) -> Chart | None:
    """AUP of each method."""
    bars = []
    for row in (row for row in table.rows if row.scopes and row.method != table.base):
        area = row.scopes[table.scope].aup
        if area is not None and area.interval is not None:
            short = f", {describe_seeds(row)} seeds" if len(row.seeds) < row.planned_seeds else ""
            bars.append(
                Bar(row.title, area.value, area.interval, f"{area.value:.0f}{short}", styles[row.title])
            )
    if len(bars) < 2:  # nothing to compare
        return None
    title = f"AUP, {shorten(table.scope)}"
    return _chart_bars(table, bars, title, "AUP (weighted area under accuracy)", name)


def _chart_bars(
    table: ResultTable,
    bars: list[Bar],
    title: str,
    label: str,
    name: str,
    ticks: Sequence[float] | None = None,
) -> Chart | None:
    """Longest first."""
    if not bars:
        return None
    bars.sort(key=lambda bar: bar.value)
    labels = [textwrap.fill(bar.label, _WRAP) for bar in bars]
    whiskers = np.array([(bar.value - bar.interval[0], bar.interval[1] - bar.value) for bar in bars]).T

    def draw(axes: Axes) -> None:
        drawn = axes.barh(
            range(len(bars)),
            [bar.value for bar in bars],
            xerr=np.maximum(0, np.nan_to_num(whiskers)),
            height=0.62,
            color=[LIGHT[bar.style.colour] for bar in bars],
            ecolor=LIGHT["ink"],
            capsize=3,
        )
        for patch, bar in zip(drawn, bars, strict=True):
            patch.set_gid(css_name(bar.label))
        axes.bar_label(drawn, [bar.text for bar in bars], padding=4, fontsize=9.5)
        axes.set_yticks(range(len(bars)), labels)
        axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(False)
        room = 1.2 + 0.03 * max(len(bar.text) for bar in bars)  # for the text behind the longest
        axes.set_xlim(0, room * max(max(bar.value, bar.interval[1]) for bar in bars) or 1.0)
        if ticks is not None:
            axes.set_xticks(ticks)
        axes.set_ylim(-0.6, len(bars) - 0.4)
        axes.set_xlabel(label)

    spoken = "; ".join(f"{bar.label} {bar.text}" for bar in reversed(bars))
    height = 1.0 + (0.34 + 0.14 * max(text.count("\n") for text in labels)) * len(bars)
    return Chart(name, title, f"{title}: {spoken}", draw, sum(table.tasks.values()), height)


# How a student came about


def chart_decay(store: StoreData, name: str) -> Chart | None:
    """The student's confidence by distance, with both windows; None where no window was measured."""
    report = store.window
    if report is None:
        return None
    colours = {
        "answer": "slot-1",
        "filler": "quiet",
        "quality": "slot-3",
        "speed": "slot-2",
        "level": "quiet",
        "text": "ink",
    }

    def draw(axes: Axes) -> None:
        draw_decay(axes, report, {key: LIGHT[colour] for key, colour in colours.items()})

    windows = ", ".join(f"{key} window {window}" for key, window in report.windows.items())
    n = report.decay.trajectories
    alt = f"Confidence decay of {store.name}, {n} trajectories: {windows}"
    return Chart(name, f"{store.name} (n = {n})", alt, draw, n)


def chart_teacher(store: StoreData, name: str) -> Chart | None:
    """The teacher's mean confidence by step; None where no teacher ran."""
    found = store.summary
    if not found.per_step:
        return None

    def draw(axes: Axes) -> None:
        step = np.arange(1, len(found.per_step) + 1)
        mean, error = np.array(found.per_step), np.nan_to_num(np.array(found.per_step_se))
        fill: dict[str, Any] = {"color": LIGHT["slot-4"], "alpha": 0.22, "linewidth": 0}
        axes.fill_between(step, mean - error, np.minimum(1, mean + error), **fill)
        axes.plot(step, mean, color=LIGHT["slot-4"], linewidth=1.3)
        counts = found.per_step_count
        half = next((s for s, count in enumerate(counts, 1) if count < counts[0] / 2), None)
        if half is not None:
            axes.axvline(half, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (1, 2)))
            at: dict[str, Any] = {
                "textcoords": "offset points",
                "xycoords": ("data", "axes fraction"),
                "fontsize": 8.5,
            }
            axes.annotate("half have ended", (half, 0), (3, 4), color=LIGHT["quiet"], **at)
        axes.set_xlabel("step of the rollout")
        axes.set_ylabel("teacher's mean confidence")
        axes.set_xlim(1, None)
        axes.set_ylim(None, 1.005)

    alt = f"Teacher's confidence by step, {store.name}, {found.kept} trajectories, mean {found.mean_confidence:.3f}"
    return Chart(name, f"{store.name} (n = {found.kept})", alt, draw, found.kept)


def chart_loss(runs: Sequence[TrainingData], label: str, name: str) -> Chart | None:
    """Training runs that differ in their seed alone: loss, its terms, and held-out loss; None without any step."""
    lines = [line for run in runs for line in run.log]
    if not any("loss" in line for line in lines):
        return None
    terms = list(dict.fromkeys(key for line in lines for key in line if key.startswith("loss_")))
    colours = {"loss": "ink", **{term: f"slot-{1 + i % HUES}" for i, term in enumerate(terms)}}

    def draw(axes: Axes) -> None:
        for run in runs:
            first = run is runs[0]  # which the legend is of
            for key, colour in colours.items():
                step, value = _series(run, key)
                if not len(step):
                    continue
                if len(runs) == 1:
                    axes.plot(step, value, color=LIGHT[colour], linewidth=0.6, alpha=0.3)
                text = "total" if key == "loss" else key.removeprefix("loss_")
                axes.plot(
                    step, _smoothed(value), color=LIGHT[colour], linewidth=1.4, label=text if first else None
                )
            step, value = _series(run, "held_out_loss")
            if len(step):
                face: dict[str, Any] = {"markerfacecolor": LIGHT["raised"], "markersize": 4}
                axes.plot(step, value, "D", color=LIGHT["ink"], label="held out" if first else None, **face)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss")
        axes.set_ylim(bottom=0 if axes.dataLim.y0 >= 0 else None)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 4}
        axes.legend(**below, handlelength=1.4, columnspacing=1.2)

    title = label + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")
    last = next((line["loss"] for line in reversed(runs[0].log) if "loss" in line), math.nan)
    return Chart(name, title, f"Loss of {title} by optimizer step, {last:.3f} at the end", draw)


def _series(run: TrainingData, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one number of the log, thinned to a thousand."""
    found = [(line["step"], line[key]) for line in run.log if line.get(key) is not None]
    thin = found[:: max(1, len(found) // 1000)]
    return np.array([step for step, _ in thin]), np.array([value for _, value in thin], dtype=float)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """A running mean over a twentieth of the run, centred, shorter at the ends."""
    kernel = np.ones(2 * (len(values) // 40) + 1)
    smooth: np.ndarray = np.convolve(values, kernel, "same") / np.convolve(
        np.ones(len(values)), kernel, "same"
    )
    return smooth


# Files


def as_png(charts: Sequence[Chart], path: Path, foot: str, styles: Mapping[str, Style] | None = None) -> Path:
    """Charts in rows of up to three, with a legend above and a line of facts below."""
    columns = min(len(charts), 4 if len(charts) == 4 else 3)
    rows = -(-len(charts) // columns)
    height = max(chart.height for chart in charts)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(columns * WIDTH, rows * height + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        figure.patch.set_facecolor(LIGHT["raised"])
        head = _add_legend(figure, styles) if styles else 0.0
        figure.set_size_inches(columns * WIDTH, rows * height + head + 0.3)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for chart, axes in zip(charts, grid, strict=False):
            chart.draw(axes)
            axes.set_title(chart.title)
        for axes in grid[len(charts) :]:
            axes.set_visible(False)
        text = textwrap.fill(foot, int(20 * figure.get_figwidth()))
        figure.supxlabel(text, fontsize=8.5, color=LIGHT["quiet"])
        figure.savefig(path, format="png", dpi=144, metadata={"Software": None})
    return path


def _add_legend(figure: Figure, styles: Mapping[str, Style]) -> float:
    """A legend above the charts; returns its height in inches."""
    longest = int(11 * figure.get_figwidth())  # letters
    labels = [textwrap.fill(label, longest) for label in styles]
    handles = [
        Line2D([], [], label=label, **style.line(), **style.points())
        for label, style in zip(labels, styles.values(), strict=True)
    ]
    columns = max(1, longest // (max(map(len, labels)) + 6))
    legend = figure.legend(handles=handles, loc="outside upper center", ncols=columns)
    return float(legend.get_window_extent().height) / figure.dpi + 0.05


def as_svg(chart: Chart) -> Markup:
    """The chart as an `<svg>` element for the page, which has its own heading for the title."""
    with matplotlib.rc_context({**RC, "svg.hashsalt": chart.name}):
        figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        chart.draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _fit_for_page(file.getvalue(), chart.alt)


_VARIABLES = {value: f"var(--{name})" for name, value in LIGHT.items()}


def _fit_for_page(text: str, alt: str) -> Markup:
    """matplotlib's SVG inside an HTML page: colours become CSS variables, fonts are the page's, and only the ids stay that
    are referred to, which the hash salt makes unique. Artists whose gid starts with `slot-` have it as their class, for
    scripts and styles."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: _VARIABLES.get(found[0], found[0]), text)
    text = re.sub(r"font:\s*((?:\d00 |bold )?[\d.]+px)[^;\"]*", r"font: \1 var(--sans)", text)
    text = text.replace(' id="slot-', ' class="slot-')
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"|xlink:(?=href)', "", text)
    head, _, rest = text.partition(">")
    (box,) = re.findall(r'viewBox="[^"]*"', head)
    return Markup(f'<svg {box} role="img" aria-label="{html.escape(alt)}">{rest}')
