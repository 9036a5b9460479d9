"""The window as a picture: the decay curve with its interval and the levels, as PNG and SVG or on given axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tad.trajectories.window_report import WindowReport

_COLOURS = {
    "answer": "#4053d3", "filler": "#9aa0b5", "quality": "#14826d", "speed": "#bf8b00", "level": "#777777", "text": "#222222",
}  # fmt: skip


def draw_decay(axes: Any, report: WindowReport, colours: Mapping[str, str] = _COLOURS) -> None:
    """The decay curve with its interval and both windows, on matplotlib's axes."""
    for decay, label, colour, at, is_below in (
        (report.with_filler, "with end filler", colours["filler"], 3 / 4, False),
        (report.decay, "answer", colours["answer"], 1 / 3, True),
    ):
        distance = np.arange(1, len(decay.mean) + 1)
        axes.fill_between(distance, decay.low, decay.high, color=colour, alpha=0.18, linewidth=0, zorder=2)
        axes.plot(distance, decay.mean, color=colour, zorder=3)
        place = int(at * len(decay.mean))
        rising = decay.mean[-1] > decay.mean[place]
        axes.annotate(
            label,
            (place + 1, decay.mean[place]),
            (-4, -12) if is_below else (0, 8),
            textcoords="offset points",
            ha="right" if is_below or rising else "left",  # to the side on which the line makes room
            color=colour,
            fontsize=9.5,
        )
    for name, window in report.windows.items():
        colour, reached = colours.get(name, colours["level"]), window.reached
        axes.axhline(window.level, color=colours["level"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        if reached and not math.isnan(window.low):
            axes.axvspan(window.low, window.high, color=colour, alpha=0.25, linewidth=0, zorder=1)
        if reached:
            axes.axvline(window.window, color=colour, linewidth=1.3, zorder=2)
        axes.annotate(
            f"{name} {window.window}" if reached else f"{name} {window.window}, the cap: not reached",
            (window.window, 1.0) if reached else (len(report.decay.mean), window.level),
            (3, -2) if reached else (-2, 3),
            textcoords="offset points",
            va="top" if reached else "bottom",
            ha="left" if reached else "right",
            color=colours["text"],
            fontsize=9.5,
        )
    drafts = report.of == "acceptance"
    axes.set_xlabel("position in a draft" if drafts else "steps until the teacher reveals the token")
    axes.set_ylabel("share of drafts kept so far" if drafts else "student's probability of it")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(1, None)


def plot_decay(report: WindowReport, stem: Path) -> list[Path]:
    """The decay curve as PNG and SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_decay(axes, report)
    axes.set_title(
        f"Confidence decay, order: {report.order} ({report.decay.trajectories} trajectories, "
        f"{report.decay.states} states; bands: 95 %)",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
