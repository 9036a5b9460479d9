"""The answers of one model to a set of questions at one setting, kept small: a study has hundreds of such runs.

A run here is a run of `tad eval` on disk, but for two things. Its rows are without prompts, token ids and reveal steps, which no
table needs. And what cannot be graded on this machine is left without a verdict, to be graded on another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.evaluation.questions import Questions
from tad.evaluation.recipe import EvalRecipe
from tad.evaluation.results import SUMMARY, Results
from tad.evaluation.row import Row
from tad.evaluation.run import Identity, Progress, Report, Runner
from tad.models import LM


def slim(row: Row) -> Row:
    return replace(row, prompt="", ids=[], steps=[])


def find_gradable(questions: Questions) -> set[str]:
    """Names of the tasks whose answers can be graded here: programs need a sandbox."""
    found = set()
    for label in dict.fromkeys(item.label for item in questions.items):
        item = next(item for item in questions.items if item.label == label)
        try:
            item.task.grade_many([(item.example, "")], 1)
        except TadError:  # the same error meets whoever grades the run; here it only sorts tasks
            continue
        found.add(label)
    return found


def answer(
    lm: LM,
    recipe: EvalRecipe,
    out: Path,
    questions: Questions,
    identity: Identity,
    gradable: set[str],
    report: Report | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Do what is missing of a run; whether every row is there now."""
    runner = Runner(lm, recipe, identity)
    results = Results.open_or_create(out, runner.meta(questions))
    order = [item.key for item in questions.items]
    with results.writing():
        found = {row.key for row in results.rows()}
        missing = [item for item in questions.items if item.key not in found]
        progress = Progress(len(order), rows=len(found))
        if missing:
            results.record(recipe.model_dump(mode="json"), rows_before=len(found))
        for rows in runner.run(missing) if missing else ():
            judged = grade_able(questions, rows, gradable, recipe.graders)
            results.add([slim(row) for row in judged])
            progress.take(judged)
            if report is not None:
                report(progress)
            if stopping():
                break
        if missing:
            results.close(order)
    return progress.rows == len(order)


def grade_able(
    questions: Questions, rows: Sequence[Row], gradable: set[str], workers: int | None = None
) -> list[Row]:
    """The rows, those of gradable tasks with verdicts; verdicts that are there stay."""
    able = [row for row in rows if row.task in gradable and row.correct is None]
    judged = {row.key: row for row in questions.grade(able, workers)}
    return [judged.get(row.key, row) for row in rows]


def grade_missing(folder: Path, questions: Questions, gradable: set[str], workers: int | None = None) -> int:
    """Add verdicts to the rows of a complete run that have none and can be graded here; how many."""
    results = Results.open(folder)
    if results.meta.tasks != questions.facts:
        raise TadError(
            f"{folder}: was asked other questions than the study's recipe has; use another directory"
        )
    with results.writing():
        rows = results.rows()
        judged = grade_able(questions, rows, gradable, workers)
        changed = sum(a.correct is not b.correct for a, b in zip(rows, judged, strict=True))
        if changed:
            results.settle([item.key for item in questions.items], judged)
    return changed


def is_whole(folder: Path) -> bool:
    """Whether every row of a run is there, without reading them."""
    return _summary(folder).get("complete", False)


def list_ungraded(folder: Path) -> set[str]:
    """The tasks of a run that have answers without a verdict."""
    tasks = _summary(folder).get("tasks", {})
    return {
        task
        for task, templates in tasks.items()
        if any(found["graded"] < found["n"] for found in templates.values())
    }


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
