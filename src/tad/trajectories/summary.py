"""What a store holds, in numbers, and the decay curve as a picture."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

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
    sums, counts, lengths = np.zeros(length), np.zeros(length), []
    for row in (row for table in tables for row in table.to_pylist()):
        lengths.append(row["n_real"])
        step, sure = np.array(row["reveal"]), np.array(row["teacher_confidence"], dtype=float)
        use = ~np.isnan(sure)
        np.add.at(sums, step[use] - 1, sure[use])
        np.add.at(counts, step[use] - 1, 1)
    rows, size = len(lengths), sum(path.stat().st_size for path in store.folder.glob("shard-*.parquet"))
    with np.errstate(invalid="ignore"):
        per_step = (sums / counts)[: int((counts > 0).sum())]
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
        bytes_per_row=size / rows if rows else float("nan"),
    )


def plot_decay(report: WindowReport, stem: Path) -> list[Path]:
    """The decay curve with its interval and both windows, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for decay, label, colour in (
        (report.decay, "answer", "#4053d3"),
        (report.with_filler, "with end filler", "#9aa0b5"),
    ):
        distance = np.arange(1, len(decay.mean) + 1)
        axes.plot(distance, decay.mean, color=colour, label=label, linewidth=2)
        axes.fill_between(distance, decay.low, decay.high, color=colour, alpha=0.18, linewidth=0)
    for name, window in report.windows.items():
        axes.axhline(window.level, color="#777777", linewidth=0.8, linestyle=":")
        if math.isnan(window.crossing):
            axes.annotate(f"{name}: not reached", (1, window.level), (6, 4), textcoords="offset points")
            continue
        axes.axvline(window.window, color="#b51d14", linewidth=1, linestyle="--")
        axes.annotate(
            f"{name}: {window.window}", (window.window, window.level), (6, 8), textcoords="offset points"
        )
    axes.set_xlabel("steps until the teacher reveals the token")
    axes.set_ylabel("student's probability of that token")
    axes.set_title(
        f"Confidence decay, order: {report.order} ({report.decay.trajectories} trajectories, "
        f"{report.decay.states} states; bands: 95 %)",
        fontsize=10,
    )
    axes.set_ylim(0, 1)
    axes.set_xlim(1, None)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return paths
