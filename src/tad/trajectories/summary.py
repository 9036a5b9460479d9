"""What a store holds, in numbers, and the decay curve as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window import WindowReport


@dataclass(frozen=True)
class StoreSummary:
    """Counts over the shards that are there."""

    shards: int
    shards_planned: int
    attempted: int
    kept: int
    correct: int
    graded: int
    by_task: dict[str, tuple[int, int]]  # graded, correct
    reasons: dict[str, int]
    mean_length: float  # real steps per kept trajectory
    mean_confidence: float  # teacher's, over kept real steps; nan where no teacher ran
    unsure: float  # share of steps revealed with the teacher's confidence below one half
    per_step: list[float]  # teacher's mean confidence at step 1, 2, ...
    per_step_se: list[float]  # its standard error
    per_step_count: list[int]  # reveals behind it
    bytes_per_row: float


def summarise(store: TrajectoryStore) -> StoreSummary:
    """Read every shard's record and rows."""
    tables, stats = [], []
    for table, entry in store.shards():
        tables.append(table.select(["reveal", "n_real", "teacher_confidence"]))
        stats.append(entry)
    by_task: dict[str, tuple[int, int]] = {}
    reasons: Counter[str] = Counter()
    for entry in stats:
        reasons.update(entry.reasons)
        for task, (graded, correct) in entry.by_task.items():
            before = by_task.get(task, (0, 0))
            by_task[task] = (before[0] + graded, before[1] + correct)
    length = store.meta.gen_length
    sums, squares, counts = (np.zeros(length) for _ in range(3))
    lengths = []
    for row in (row for table in tables for row in table.to_pylist()):
        lengths.append(row["n_real"])
        step, sure = np.array(row["reveal"]), np.array(row["teacher_confidence"], dtype=float)
        use = ~np.isnan(sure)
        np.add.at(sums, step[use] - 1, sure[use])
        np.add.at(squares, step[use] - 1, sure[use] ** 2)
        np.add.at(counts, step[use] - 1, 1)
    rows, size = len(lengths), sum(path.stat().st_size for path in store.folder.glob("shard-*.parquet"))
    reached = int((counts > 0).sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        per_step = (sums / counts)[:reached]
        spread = np.maximum(0, (squares / counts)[:reached] - per_step**2)
        per_step_se = np.sqrt(spread / (counts[:reached] - 1))
        mean = float(sums.sum() / counts.sum()) if counts.sum() else float("nan")
    steps = sum(entry.steps for entry in stats)
    return StoreSummary(
        shards=len(stats),
        shards_planned=store.meta.shards,
        attempted=sum(entry.attempted for entry in stats),
        kept=rows,
        correct=sum(entry.correct for entry in stats),
        graded=sum(entry.attempted - entry.ungraded for entry in stats),
        by_task=by_task,
        reasons=dict(reasons.most_common(8)),
        mean_length=float(np.mean(lengths)) if lengths else float("nan"),
        mean_confidence=mean,
        unsure=sum(entry.unsure for entry in stats) / steps if steps else float("nan"),
        per_step=per_step.tolist(),
        per_step_se=per_step_se.tolist(),
        per_step_count=counts[:reached].astype(int).tolist(),
        bytes_per_row=size / rows if rows else float("nan"),
    )


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
        colour, reached = colours.get(name, colours["level"]), not math.isnan(window.crossing)
        axes.axhline(window.level, color=colours["level"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        if reached and not math.isnan(window.low):
            axes.axvspan(window.low, window.high, color=colour, alpha=0.25, linewidth=0, zorder=1)
        if reached:
            axes.axvline(window.window, color=colour, linewidth=1.3, zorder=2)
        axes.annotate(
            f"{name} {window.window}" if reached else f"{name}: not reached",
            (window.window, 1.0) if reached else (len(report.decay.mean), window.level),
            (3, -2) if reached else (-2, 3),
            textcoords="offset points",
            va="top" if reached else "bottom",
            ha="left" if reached else "right",
            color=colours["text"],
            fontsize=9.5,
        )
    axes.set_xlabel("steps until the teacher reveals the token")
    axes.set_ylabel("student's probability of it")
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
