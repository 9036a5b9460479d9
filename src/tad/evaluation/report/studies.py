"""Directories of `tad study`, read as their studies see them: methods by title, training seeds together, tuning apart.

The numbers are those of the study's own tables; of the answers only the records are read here. A directory whose study cannot
be made out (its recipe is of another version, its data are not on this machine) is read like any other, run by run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tad.config import parse_recipe
from tad.errors import TadError
from tad.evaluation.report.data import (
    Gathered,
    Origin,
    Run,
    Store,
    Training,
    last_call,
    read_object,
    read_origin,
    read_store,
    read_training,
    take_inside,
)
from tad.evaluation.report.names import path_name, shorten
from tad.evaluation.results import META, Results
from tad.evaluation.study.plan import DONE, STUDY, Plan
from tad.evaluation.study.recipe import StudyRecipe
from tad.evaluation.study.tables import Table
from tad.evaluation.study.tables import as_record as table_record
from tad.evaluation.study.tuning import Trial
from tad.training.distill import LOG
from tad.training.record import RECORD
from tad.trajectories.store import META as STORE_META


@dataclass(frozen=True)
class Tried:
    """A trial of tuning, by its method's title."""

    title: str
    trial: Trial


@dataclass(frozen=True)
class Tuning:
    """Everything that was tried on problems which are not the test's."""

    trials: list[Tried]
    seed: int
    tasks: str  # with their splits
    below: float


@dataclass(frozen=True)
class StudyPart:
    """A study in the report."""

    folder: Path
    name: str
    base: str  # the model's name
    family: str
    asked: list[dict[str, Any]]  # per task of the tables: its name, split, examples, templates, ...
    tables: list[Table]
    tuning: Tuning | None
    runs: list[Run]  # without their rows
    calls: list[Origin]

    @property
    def main(self) -> Table:
        """The first table, which is the one that is not folded."""
        return self.tables[0]

    @property
    def split(self) -> str:
        return "/".join(dict.fromkeys(str(entry["split"]) for entry in self.asked))

    def examples(self, task: str) -> int:
        """How many answers of a task each run has."""
        return sum(
            entry["examples"] * len(entry["templates"]) for entry in self.asked if entry["name"] == task
        )


def read_studies(found: Gathered, say: Callable[[str], None] = lambda _: None) -> list[StudyPart]:
    """The studies among what was gathered; their stores and training runs join those of `found`."""
    parts = []
    for folder in found.studies:
        say(f"{folder.name}: tables of the study")
        try:
            part, stores, trainings = read_study(folder, found.notes, several=len(found.studies) > 1)
        except (
            TadError,
            OSError,
        ) as error:  # a study keeps numbers beside its answers: it may not be allowed to
            found.notes.append(f"{folder}: is shown run by run, since its study cannot be made out: {error}")
            take_inside(folder, found)
            continue
        parts.append(part)
        found.stores += stores
        found.trainings += trainings
    return parts


def read_study(
    folder: Path, notes: list[str], several: bool = False
) -> tuple[StudyPart, list[Store], list[Training]]:
    """A study, its stores and its training runs. With `several` studies, names say whose they are."""
    record = read_object(folder / STUDY)
    recipe = parse_recipe(StudyRecipe, record.get("recipe", {}), where=str(folder / STUDY))
    if not recipe.tables:
        raise TadError(f"{folder / STUDY}: its recipe names no tables")
    plan = Plan(recipe, folder)
    whose = f", {recipe.name}" if several else ""
    part = StudyPart(
        folder=folder,
        name=recipe.name,
        base=path_name(recipe.model),
        family=plan.base.family,
        asked=plan.hashes.questions(recipe.evaluate.tasks).facts,
        tables=plan.tables(),
        tuning=_tuning(plan),
        runs=_runs(folder),
        calls=[read_origin(call) for call in record.get("calls", [])],
    )
    states = [entry.state for entry in plan.entries()]
    left = sum(state != DONE for state in states)
    if left:
        notes.append(
            f"{recipe.name}: {left} of {len(states)} cells are not done; run the same 'tad study' again to go on"
        )
    return part, _stores(plan, whose, notes), _trainings(plan, whose, notes)


def _tuning(plan: Plan) -> Tuning | None:
    section = plan.recipe.tuning
    if section is None:
        return None
    trials = [
        Tried(plan.methods[name].title, trial) for name in section.methods for trial in plan.trials(name)
    ]
    tasks = ", ".join(f"{shorten(task.name)} ({task.split})" for task in section.tasks)
    return Tuning(trials, section.seed, tasks, plan.recipe.below)


def _runs(folder: Path) -> list[Run]:
    """What the runs of the answers say of themselves."""
    found = []
    for path in sorted((folder / "answers").glob(f"*/*/{META}")):
        record = read_object(path.parent / RECORD) if (path.parent / RECORD).is_file() else {}
        found.append(Run(path.parent, Results.open(path.parent).meta, [], read_origin(last_call(record))))
    return found


def _stores(plan: Plan, whose: str, notes: list[str]) -> list[Store]:
    found = []
    for name in plan.recipe.stores:
        folder = plan.store_folder(name)
        if not (folder / STORE_META).is_file():
            continue
        trouble: list[str] = []
        found.append(replace(read_store(folder, trouble), name=f"{name}{whose}"))
        if trouble:
            notes.append(
                f"{plan.recipe.name}: store '{name}' is not complete; run the same 'tad study' again"
            )
    return found


def _trainings(plan: Plan, whose: str, notes: list[str]) -> list[Training]:
    """Named by method; what only a trial was trained for says so and comes last."""
    found: dict[Path, str] = {}
    tried: dict[Path, str] = {}
    for _, name, _, get in plan.plan():
        cell = get()
        folder = None if cell is None else plan.student_folder(cell)
        if cell is None or folder is None or not (folder / LOG).is_file():
            continue
        title = plan.methods[name].title
        if cell.trial is None:
            found.setdefault(folder, title)
        else:
            tried.setdefault(folder, f"{title}, trial {cell.trial}")
    trainings = []
    for folder, title in {**{path: tried[path] for path in tried if path not in found}, **found}.items():
        trouble: list[str] = []
        trainings.append(
            replace(read_training(folder, trouble), title=f"{title}{whose}", trial=folder not in found)
        )
        if trouble:
            notes.append(
                f"{plan.recipe.name}: the training of {title} has not ended; run the same 'tad study' again"
            )
    return sorted(trainings, key=lambda training: (training.trial, training.title or ""))


def as_record(part: StudyPart) -> dict[str, Any]:
    """The study's numbers for machines."""
    return {
        "study": part.name,
        "base": part.base,
        "tables": [table_record(table) for table in part.tables],
        "tuning": [asdict(tried.trial) for tried in part.tuning.trials] if part.tuning else [],
    }
