"""What a store holds, in numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tad.tasks import CANNOT_JUDGE, Score
from tad.trajectories.store import TrajectoryStore


@dataclass(frozen=True)
class StoreSummary:
    """Counts over the shards that are there."""

    shards: int
    shards_planned: int
    attempted: int
    kept: int
    correct: int
    graded: int
    pending: int  # of those that are not graded, the ones that wait for a verdict
    unaided: int  # without a reference, where it is shown where needed only
    rollouts: int  # all that were made, with those that failed without a reference
    forwards: int  # of all rollouts, one row each: what collection cost
    by_task: dict[str, tuple[int, int]]  # graded, correct
    unjudged: int  # of those that are not correct, the ones that their tests could not judge
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
    unjudged = sum(reasons.pop(reason) for reason in list(reasons) if reason.startswith(CANNOT_JUDGE))
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
        pending=sum(entry.pending for entry in stats),
        unaided=sum(entry.unaided for entry in stats),
        rollouts=sum(entry.attempted + entry.failed for entry in stats),
        forwards=steps + sum(entry.failed_steps for entry in stats),
        by_task=by_task,
        unjudged=unjudged,
        reasons=dict(reasons.most_common(8)),
        mean_length=float(np.mean(lengths)) if lengths else float("nan"),
        mean_confidence=mean,
        unsure=sum(entry.unsure for entry in stats) / steps if steps else float("nan"),
        per_step=per_step.tolist(),
        per_step_se=per_step_se.tolist(),
        per_step_count=counts[:reached].astype(int).tolist(),
        bytes_per_row=size / rows if rows else float("nan"),
    )


def describe_store(store: TrajectoryStore) -> Iterator[str]:
    """What a store holds, in lines."""
    summary = summarise(store)
    yield (
        f"{store.folder}: {summary.kept} trajectories of {summary.attempted} rollouts, "
        f"{summary.shards} of {summary.shards_planned} shards, {summary.bytes_per_row / 1000:.1f} KB a row"
    )
    for task, (graded, correct) in summary.by_task.items():
        score = Score(graded, correct)
        yield (
            f"  {task:12s} {100 * score.accuracy:5.1f} % correct (s.e. {100 * score.standard_error:.1f}, n = {graded})"
        )
    if summary.unaided:
        yield (
            f"  {summary.unaided} right without the reference; {summary.rollouts} rollouts and {summary.forwards} forwards in all"
        )
    if ungraded := summary.attempted - summary.graded - summary.pending:
        yield (f"  {ungraded} rollouts of tasks that are not graded")
    if summary.pending:
        yield (f"  {summary.pending} rollouts wait for a verdict: tad regrade {store.folder} --model MODEL")
    if summary.unjudged:
        yield (f"  {summary.unjudged} rollouts cannot be judged by their tests and count as wrong")
    for reason, count in summary.reasons.items():
        yield (f"  wrong: {count:5d} x {reason}")
    sure = f"teacher's mean confidence {summary.mean_confidence:.3f}, below 0.5 at {100 * summary.unsure:.1f} % of the steps"
    known = not math.isnan(summary.mean_confidence)
    yield (f"  mean length {summary.mean_length:.1f} steps; {sure if known else 'confidences are not known'}")
    if summary.per_step:
        marks = [s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256) if s <= len(summary.per_step)]
        yield ("  step             " + "".join(f"{s:>7d}" for s in marks))
        yield ("  mean confidence  " + "".join(f"{summary.per_step[s - 1]:>7.3f}" for s in marks))
