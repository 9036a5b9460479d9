"""How a curve of points and a chart of bars are drawn, whatever they are of."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tad.evaluation.report.palette import LIGHT, Look
from tad.evaluation.report.panels import line_style, marker_style

AREA = "AUP (area under accuracy, %, over TPF)"
_WRAP = 26  # letters in front of a bar


@dataclass(frozen=True)
class Spot:
    """A point of a curve with its errors. `faint`: too far down to count; without `marked` only the line passes it."""

    tpf: float
    accuracy: float
    tpf_error: float | None
    error: float | None
    faint: bool = False
    marked: bool = True


@dataclass(frozen=True)
class Bar:
    """A bar with its whisker, what stands behind it, and dots on it."""

    label: str
    value: float
    low: float
    high: float
    text: str
    colour: str
    gid: str
    dots: tuple[float, ...] = ()

    @property
    def wrapped(self) -> str:
        return textwrap.fill(self.label, _WRAP)

    @property
    def end(self) -> float:
        return max(self.value, self.high)


def css_name(label: str) -> str:
    """A name for the parts of a chart that belong to a label."""
    return "slot-" + "".join(c if c.isalnum() else "-" for c in label.lower())


def draw_curve(axes: Axes, spots: Sequence[Spot], look: Look, gid: str) -> None:
    """A thin line through all points, a strong one through those that count, and markers with error bars."""
    if len(spots) > 1:
        every, kept = list(spots), [spot for spot in spots if not spot.faint]
        for part, style in ((every, {"linewidth": 1.0, "alpha": 0.45, "zorder": 2}), (kept, {"zorder": 3})):
            (line,) = axes.plot(
                [spot.tpf for spot in part], [spot.accuracy for spot in part], **line_style(look), **style
            )
            line.set_gid(gid)
    for faint in (False, True):
        part = [spot for spot in spots if spot.marked and spot.faint == faint]
        if part:
            _draw_spots(axes, part, look, gid, 4, hollow=faint)


def draw_first(axes: Axes, spot: Spot, look: Look, gid: str, is_base: bool) -> None:
    """One token at a time; the base's accuracy is a line across the chart."""
    _draw_spots(axes, [spot], look, gid, 6 if is_base else 5)
    if is_base:
        axes.axhline(spot.accuracy, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)


def _draw_spots(
    axes: Axes, spots: Sequence[Spot], look: Look, gid: str, zorder: int, hollow: bool = False
) -> None:
    bars = axes.errorbar(
        [spot.tpf for spot in spots],
        [spot.accuracy for spot in spots],
        xerr=[_number(spot.tpf_error) for spot in spots],
        yerr=[_number(spot.error) for spot in spots],
        linestyle="none",
        ecolor=LIGHT[look.colour],
        elinewidth=0.9,
        zorder=zorder,
        **marker_style(look, hollow),
    )
    for artist in (bars[0], *bars[2]):
        artist.set_gid(gid)


def _number(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def label_curves(axes: Axes) -> None:
    axes.set_xlabel("tokens per forward (TPF)")
    axes.set_ylabel("accuracy, %")
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0, low), min(high, 100 + 0.03 * (high - low)))  # a marker at 100 % is whole
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))


def draw_bars(axes: Axes, bars: Sequence[Bar], label: str) -> None:
    """From the bottom up, in the order given."""
    for place, one in enumerate(bars):
        (bar,) = axes.barh(place, one.value, height=0.62, color=LIGHT[one.colour], alpha=0.85)
        bar.set_gid(one.gid)
        if one.high > one.low:
            axes.plot(
                [one.low, one.high], [place, place], color=LIGHT["ink"], linewidth=1.1, solid_capstyle="butt"
            )
            for end in (one.low, one.high):
                axes.plot([end, end], [place - 0.12, place + 0.12], color=LIGHT["ink"], linewidth=1.1)
        for value in one.dots:
            axes.plot(value, place, "o", color=LIGHT["ink"], markersize=2.6)
        axes.annotate(
            one.text, (one.end, place), (4, 0), textcoords="offset points", va="center", fontsize=9.5
        )
    axes.set_yticks(range(len(bars)), [bar.wrapped for bar in bars])
    axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 1.42 * max(bar.end for bar in bars) or 1.0)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_xlabel(label)


def bars_height(bars: Sequence[Bar]) -> float:
    """In inches; labels of several lines need more."""
    lines = max((bar.wrapped.count("\n") for bar in bars), default=0)
    return 1.0 + (0.34 + 0.14 * lines) * len(bars)
