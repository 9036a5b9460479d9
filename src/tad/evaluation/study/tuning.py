"""Tuning: how trials on validation problems are scored, which one is taken, and the record of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tad.evaluation.study.numbers import Answers, Draws, measure
from tad.evaluation.study.recipe import Values
from tad.files import create_folder, write_json, write_whole


@dataclass(frozen=True)
class Trial:
    """A method's trial: what it changes, and what came of it; None while it has not been run."""

    method: str
    number: int
    changes: Values
    score: float | None
    accuracy: float | None  # at its best setting
    tpf: float | None  # at the base's accuracy less the study's margin; None where it is not reached
    chosen: bool = False


def score_trial(answers: Answers, base: Answers, below: float) -> tuple[float, float, float | None]:
    """Score, best accuracy, and tokens per forward at the base's accuracy less `below`.

    The score is that speed; for a curve that is never that accurate, minus the points it lacks. Only tasks that are graded count.
    """
    tasks = sorted(answers.graded & base.graded)
    chosen = np.isin(base.runs[0][0].task, tasks)
    draws = Draws(max(1, int(chosen.sum())), resamples=1)
    found, bar = measure(answers, chosen, draws), measure(base, chosen, draws).accuracy[0, 0] - below
    best = float(found.accuracy.max())
    speed = found.reach(float(bar)).tpf
    return (speed if speed is not None else best - float(bar)), best, speed


def choose_trial(trials: Sequence[Trial]) -> int | None:
    """The best of them, the first of equals; None while one is missing."""
    if any(trial.score is None for trial in trials):
        return None
    return max(range(len(trials)), key=lambda i: trials[i].score or 0.0)


def as_markdown(trials: Sequence[Trial], seed: int, tasks: str, below: float) -> str:
    """Every trial of every method."""
    lines = [
        "### Tuning",
        "",
        f"| method | trial | changes | best accuracy | TPF at base - {below:g} | chosen |",
        "|---" * 6 + "|",
    ]
    for trial in trials:
        changes = json.dumps(trial.changes)
        if trial.score is None:
            lines.append(f"| {trial.method} | {trial.number} | {changes} | not run yet | | |")
            continue
        speed = "not reached" if trial.tpf is None else f"{trial.tpf:.2f}"
        mark = "yes" if trial.chosen else ""
        lines.append(
            f"| {trial.method} | {trial.number} | {changes} | {trial.accuracy:.1f} | {speed} | {mark} |"
        )
    count = max((trial.number + 1 for trial in trials), default=0)
    lines += [
        "",
        f"{count} trials for each method, seed {seed}, on {tasks}; the test problems were not used.",
    ]
    return "\n".join(lines) + "\n"


def write_trials(trials: Sequence[Trial], folder: Path, seed: int, tasks: str, below: float) -> None:
    create_folder(folder)
    write_whole(folder / "tuning.md", as_markdown(trials, seed, tasks, below))
    write_json(folder / "tuning.json", [trial.__dict__ for trial in trials])
