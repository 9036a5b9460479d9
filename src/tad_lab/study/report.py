"""A study as a part of a report: its tables, its trials, its stores and training runs under the names it has for them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from tad.errors import TadError
from tad.evaluation.labels import path_name
from tad.evaluation.report.gather import (
    Gathered,
    Part,
    StoreData,
    TrainingData,
    Trials,
    read_store,
    read_training,
)
from tad.evaluation.results import META as RUN_META
from tad.evaluation.results import Results
from tad.runs.record import LOG
from tad.trajectories.store import META as STORE_META
from tad_lab.study.cells import Source
from tad_lab.study.plan import DONE, STUDY, StudyPlan, read_study
from tad_lab.study.tuning import Tuning


def read_part(folder: Path, found: Gathered, several: bool) -> None:
    """Add a study, its stores and its training runs. With `several` studies, names say whose they are."""
    recipe, _ = read_study(folder)
    if not recipe.tables:
        raise TadError(f"{folder / STUDY}: its recipe names no tables")
    plan = StudyPlan(recipe, folder)
    whose = f", {recipe.name}" if several else ""
    facts = plan.hashes.questions(recipe.evaluate.tasks).facts
    splits = "/".join(dict.fromkeys(str(entry["split"]) for entry in facts))
    runs = [path.parent for path in sorted((folder / "answers").glob(f"*/*/{RUN_META}"))]
    sources = [Results.open(run) for run in runs]
    about = f"base {path_name(recipe.model)}, family {plan.base.family}, split {splits}"
    part = Part(recipe.name, about, plan.tables(), sources, _show_trials(plan.tuning()))
    states = [one.state for one in plan.states()]
    left = sum(state != DONE for state in states)
    if left:
        found.notes.append(
            f"{recipe.name}: {left} of {len(states)} cells are not done; run the same 'tad study' again to go on"
        )
    stores, trainings = _study_stores(plan, whose, found.notes), _study_trainings(plan, whose, found.notes)
    found.parts.append(part)
    found.stores += stores
    found.trainings += trainings


def _study_stores(plan: StudyPlan, whose: str, notes: list[str]) -> list[StoreData]:
    found = []
    for name in plan.recipe.stores:
        folder, trouble = plan.store_folder(Source(name)), list[str]()
        if (folder / STORE_META).is_file():
            place = f"{plan.recipe.name}: {name}"
            found.append(replace(read_store(folder, trouble), name=f"{name}{whose}", place=place))
        if trouble:
            notes.append(
                f"{plan.recipe.name}: store '{name}' is not complete; run the same 'tad study' again"
            )
    return found


def _study_trainings(plan: StudyPlan, whose: str, notes: list[str]) -> list[TrainingData]:
    """Named by method; what only a trial was trained for says so and comes last."""
    found: dict[Path, str] = {}
    tried: dict[Path, str] = {}
    cells = [cell for _, _, _, cell in plan.cells()]
    for table in plan.recipe.tables:
        cells += [cell for name in plan.rows_of(table) for cell in plan.row_cells(table, name)]
    for cell in cells:
        folder = None if cell is None else plan.student_folder(cell)
        if cell is None or folder is None or not (folder / LOG).is_file():
            continue
        title = plan.methods[cell.method].title
        if cell.trial is None:
            found.setdefault(folder, title)
        else:
            tried.setdefault(folder, f"{title}, trial {cell.trial}")
    trainings = []
    for folder, title in {**{path: tried[path] for path in tried if path not in found}, **found}.items():
        trouble: list[str] = []
        trainings.append(
            replace(
                read_training(folder, trouble),
                title=f"{title}{whose}",
                place=f"{plan.recipe.name}: {title}",
                trial=folder not in found,
            )
        )
        if trouble:
            notes.append(
                f"{plan.recipe.name}: the training of {title} has not ended; run the same 'tad study' again"
            )
    return sorted(trainings, key=lambda training: (training.trial, training.title or ""))


def _show_trials(tuning: Tuning | None) -> Trials | None:
    if tuning is None:
        return None
    noun = "trial" if tuning.count == 1 else "trials"
    return Trials(
        about=f"{tuning.count} {noun} for each method, on {tuning.tasks}",
        hint=f"Seed {tuning.seed}. Chosen is the trial that is fastest at that accuracy, or comes closest to it where none is "
        "that accurate; the test problems were not used.",
        grid=tuning.grid(),
        records=[asdict(trial) for trial in tuning.trials],
    )
