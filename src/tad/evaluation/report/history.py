"""The charts of how a student came about: the decay of its confidence, its teacher's confidence, its losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tad.evaluation.report.data import Store, Training
from tad.evaluation.report.palette import LIGHT
from tad.evaluation.report.panels import Panel

# Trajectories


def decay_panel(store: Store, name: str) -> Panel | None:
    """The student's confidence by distance, with both windows; None where no window was measured."""
    report = store.window
    if report is None:
        return None
    looks = {"quality": "slot-3", "speed": "slot-2"}

    def draw(axes: Axes) -> None:
        for decay, label, colour, at, below in (
            (report.with_filler, "with end filler", "quiet", 3 / 4, False),
            (report.decay, "answer", "slot-1", 1 / 3, True),
        ):
            distance = np.arange(1, len(decay.mean) + 1)
            axes.fill_between(
                distance, decay.low, decay.high, color=LIGHT[colour], alpha=0.18, linewidth=0, zorder=2
            )
            axes.plot(distance, decay.mean, color=LIGHT[colour], zorder=3)
            place = int(at * len(decay.mean))
            rising = decay.mean[-1] > decay.mean[place]
            axes.annotate(
                label,
                (place + 1, decay.mean[place]),
                (-4, -12) if below else (0, 8),
                textcoords="offset points",
                ha="right" if below or rising else "left",  # to the side on which the line makes room
                color=LIGHT[colour],
                fontsize=9.5,
            )
        for window_name, window in report.windows.items():
            colour = LIGHT[looks.get(window_name, "quiet")]
            reached = not math.isnan(window.crossing)
            axes.axhline(window.level, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
            if reached and not math.isnan(window.low):
                axes.axvspan(window.low, window.high, color=colour, alpha=0.25, linewidth=0, zorder=1)
            if reached:
                axes.axvline(window.window, color=colour, linewidth=1.3, zorder=2)
            text = f"{window_name} {window.window}" if reached else f"{window_name}: not reached"
            corner = (window.window, 1.0) if reached else (len(report.decay.mean), window.level)
            axes.annotate(
                text,
                corner,
                (3, -2) if reached else (-2, 3),
                textcoords="offset points",
                va="top" if reached else "bottom",
                ha="left" if reached else "right",
                color=LIGHT["ink"],
                fontsize=9.5,
            )
        axes.set_xlabel("steps until the teacher reveals the token")
        axes.set_ylabel("student's probability of it")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(1, None)

    windows = ", ".join(f"{key} window {window.window}" for key, window in report.windows.items())
    n = report.decay.trajectories
    return Panel(
        name,
        f"{store.name} (n = {n})",
        f"Confidence decay of {store.name}, {n} trajectories: {windows}",
        draw,
        n,
    )


def teacher_panel(store: Store, name: str) -> Panel | None:
    """The teacher's mean confidence by step; None where no teacher ran."""
    found = store.confidence
    if not found.mean:
        return None

    def draw(axes: Axes) -> None:
        step = np.arange(1, len(found.mean) + 1)
        mean, error = np.array(found.mean), np.nan_to_num(np.array(found.se))
        axes.fill_between(
            step, mean - error, np.minimum(1, mean + error), color=LIGHT["slot-4"], alpha=0.22, linewidth=0
        )
        axes.plot(step, mean, color=LIGHT["slot-4"], linewidth=1.3)
        thin = next((s for s, count in enumerate(found.count, 1) if count < found.count[0] / 2), None)
        if thin is not None:
            axes.axvline(thin, color=LIGHT["quiet"], linewidth=0.8, linestyle=(0, (1, 2)))
            axes.annotate(
                "half have ended",
                (thin, 0),
                (3, 4),
                textcoords="offset points",
                xycoords=("data", "axes fraction"),
                fontsize=8.5,
                color=LIGHT["quiet"],
            )
        axes.set_xlabel("step of the rollout")
        axes.set_ylabel("teacher's mean confidence")
        axes.set_xlim(1, None)
        axes.set_ylim(None, 1.005)

    n = store.summary.kept
    alt = f"Teacher's confidence by step, {store.name}, {n} trajectories, mean {store.summary.mean_confidence:.3f}"
    return Panel(name, f"{store.name} (n = {n})", alt, draw, n)


# Training


def loss_panel(runs: Sequence[Training], label: str, name: str) -> Panel | None:
    """Training runs that differ in their seed alone: loss, its terms, and held-out loss; None without any step."""
    if not any("loss" in line for run in runs for line in run.log):
        return None
    terms = list(dict.fromkeys(key for run in runs for line in run.log for key in line if _is_term(key)))
    colours = {"loss": "ink", **{term: f"slot-{1 + i % 6}" for i, term in enumerate(terms)}}

    def draw(axes: Axes) -> None:
        seen: set[str] = set()
        smallest = math.inf
        for run in runs:
            for key, colour in colours.items():
                step, value = _series(run, key)
                if not len(step):
                    continue
                smooth = _smoothed(value)
                smallest = min(smallest, float(smooth.min()))
                if len(runs) == 1:
                    axes.plot(step, value, color=LIGHT[colour], linewidth=0.6, alpha=0.3)
                label = None if key in seen else ("total" if key == "loss" else key.removeprefix("loss_"))
                axes.plot(step, smooth, color=LIGHT[colour], linewidth=1.4, label=label)
                seen.add(key)
            step, value = _series(run, "held_out_loss")
            if len(step):
                label = None if "held_out" in seen else "held out"
                axes.plot(
                    step,
                    value,
                    "D",
                    color=LIGHT["ink"],
                    markerfacecolor=LIGHT["raised"],
                    markersize=4,
                    label=label,
                )
                seen.add("held_out")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss")
        axes.set_ylim(bottom=0 if smallest >= 0 else None)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, handlelength=1.4, columnspacing=1.2
        )

    title = label + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")
    last = next((line["loss"] for line in reversed(runs[0].log) if "loss" in line), math.nan)
    return Panel(name, title, f"Loss of {title} by optimizer step, {last:.3f} at the end", draw)


def _is_term(key: str) -> bool:
    return key.startswith("loss_")


def _series(run: Training, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one number of the log, thinned to a thousand."""
    found = [(line["step"], line[key]) for line in run.log if line.get(key) is not None]
    thin = found[:: max(1, len(found) // 1000)]
    return np.array([step for step, _ in thin]), np.array([value for _, value in thin], dtype=float)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """A running mean over a twentieth of the run, centred, shorter at the ends."""
    half = len(values) // 40
    if half < 1:
        return values
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(0, index - half), np.minimum(len(values), index + half + 1)
    smooth: np.ndarray = (total[high] - total[low]) / (high - low)
    return smooth
