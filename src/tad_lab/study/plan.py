"""What a study has to do and what it has done: cells in the order of work, where their files are, how far they are, and
the tables of what is there.

Trials of tuning are cells too: a method's training with the trial's changes, answered on other problems than the test's.
Reads the study's directory and writes nothing; `study` does the work.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from tad.config import parse_recipe
from tad.errors import TadError
from tad.evaluation.analysis import ResultTable, RowSpec, analyse
from tad.evaluation.measurement import MethodRuns
from tad.evaluation.methods import read_outcomes
from tad.evaluation.results import is_whole, read_summary
from tad.evaluation.sweep import FIRST
from tad.evaluation.tables import shorten
from tad.pipeline.costs import StudentCost, add_rounds
from tad.pipeline.pool import ModelPool
from tad.pipeline.recipe import Values
from tad.runs.record import find_result
from tad.trajectories.store import META as STORE
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window_report import WINDOW, explain_caps
from tad_lab.study.cells import (
    Base,
    Cell,
    Hashes,
    ResolvedMethod,
    Source,
    as_folder,
    choose,
    resolve_methods,
)
from tad_lab.study.recipe import StudyRecipe
from tad_lab.study.tuning import TrialResult, Tuning

STUDY = "study.json"
DONE, UNGRADED, TRAINED, MISSING, WAITING = "done", "not graded", "trained", "missing", "waits for tuning"
COLLECTED = "waits for grading"  # of its trajectories
TUNING = "tuning"  # stands for a table where trials are listed
DECODED = (DONE, UNGRADED)
_SEED = re.compile(r"-seed(\d+)-[0-9a-f]+$")  # in the name of a directory of answers: `Cell.label` and a hash
_RENAMED = {"rival": "baseline", "below": "tolerance"}  # in records of earlier versions
_GONE = ("keep",)


@dataclass(frozen=True)
class CellState:
    """A line of `tad study --list`."""

    table: str
    method: str
    seed: int | None
    trial: int | None
    state: str


def list_ungraded(folder: Path) -> set[str]:
    """The tasks of a run that have answers without a verdict."""
    tasks = read_summary(folder).get("tasks", {})
    return {task for task, found in tasks.items() if any(one["graded"] < one["n"] for one in found.values())}


def read_study(folder: Path) -> tuple[StudyRecipe, dict[str, Any]]:
    """A study's recipe and the rest of its record."""
    try:
        record = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        values = {
            _RENAMED.get(key, key): value for key, value in record["recipe"].items() if key not in _GONE
        }
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise TadError(f"{folder / STUDY}: is not the record of a study; run 'tad study' again") from None
    return parse_recipe(StudyRecipe, values, where=str(folder / STUDY)), record


class StudyPlan:
    """See the module."""

    def __init__(self, recipe: StudyRecipe, out: str | Path) -> None:
        self.recipe, self.out = recipe, Path(out)
        self.methods = resolve_methods(recipe)
        self._choices: dict[str, int] = {}
        self._waiting: dict[Path, tuple[list[tuple[str, int]], bool]] = {}
        self._check()

    def _check(self) -> None:
        """Parse what can be parsed before anything is loaded."""
        self.recipe.check_problems(*self.recipe.stores.values())
        for name, store in self.recipe.stores.items():
            if name.startswith(".") or "/" in name:
                raise TadError(
                    f"{self.recipe.name}: stores.{name}: names a directory; use letters and dashes"
                )
            self.recipe.collect_recipe(store)
        for name, method in self.methods.items():
            if method.store is not None:
                self.recipe.distill_recipe(as_folder(name), "store", method.distill())
        for table in self.recipe.tables:
            self.rows_of(table)

    @cached_property
    def base(self) -> Base:
        """From the study's own record where it was begun before, else from the weights."""
        path = self.out / STUDY
        if path.is_file():
            return Base(**json.loads(path.read_text(encoding="utf-8"))["base"])
        pool = self.pool
        return Base(pool.fingerprint, pool.tokenizer, pool.family, pool.own_dtype)

    @cached_property
    def pool(self) -> ModelPool:
        """Loaded when something first needs it."""
        found = ModelPool(self.recipe.model, self.recipe.device, self.recipe.dtype)
        if "base" in self.__dict__ and found.fingerprint != self.base.model:
            raise TadError(
                f"{self.out}: is a study of another base: {self.base.model} there, {found.fingerprint} is "
                f"{self.recipe.model}; use another --out directory"
            )
        return found

    @cached_property
    def hashes(self) -> Hashes:
        return Hashes(self.recipe, self.base)

    # Cells

    def rows_of(self, table: str) -> list[str]:
        """The methods of a table, in order."""
        found: list[str] = []
        for pattern in self.recipe.tables[table].methods:
            found += choose(list(self.methods), pattern, f"{self.recipe.name}: tables.{table}")
        return list(dict.fromkeys(found))

    def seeds_of(self, method: ResolvedMethod, table: str) -> list[int | None]:
        """The seeds of a row that are worked on."""
        if method.store is None:
            return [None]
        return list(method.seeds or self.recipe.tables[table].seeds or self.recipe.seeds)

    def trials_of(self, name: str) -> list[Cell]:
        """The trials of a tuned method."""
        tuning = self.recipe.tuning
        assert tuning is not None
        last = self.tuned_method(name)
        return [
            self._make_cell(last, tuning.seed, changes, number)
            for number, changes in enumerate(tuning.trials_of(name))
        ]

    def tuned_method(self, name: str) -> str:
        """The method that a trial answers with: of one in rounds the last round, made with the trial's changes throughout."""
        return (
            name
            if name in self.methods
            else [one for one in self.methods if one.startswith(f"{name}/round=")][-1]
        )

    def cell(self, name: str, seed: int | None) -> Cell | None:
        """A method's cell on the test problems; None while its tuning is not finished."""
        tuned_as = self.methods[name].tuned_as
        if tuned_as is None:
            return self._make_cell(name, seed)
        number = self._choice(tuned_as)
        if number is None:
            return None
        assert self.recipe.tuning is not None
        return self._make_cell(name, seed, self.recipe.tuning.trials_of(tuned_as)[number])

    def _make_cell(
        self, name: str, seed: int | None, changes: Values | None = None, trial: int | None = None
    ) -> Cell:
        method, tuning = self.methods[name], self.recipe.tuning
        tasks = self.recipe.evaluate.tasks if trial is None or tuning is None else tuning.tasks
        source = None
        if method.store is not None:
            teacher = None if method.before is None else self._make_cell(method.before, seed, changes, trial)
            source = Source(method.store, method.part, teacher)
        return Cell(
            name, seed, trial, source, method.distill(changes), tasks, method.decoder, method.settings
        )

    def _reference_cell(self) -> Cell:
        """The base one token at a time on the problems that tuning uses."""
        assert self.recipe.tuning is not None
        method = self.methods[self.recipe.base]
        return Cell(method.name, None, None, None, {}, self.recipe.tuning.tasks, FIRST, method.settings)

    def _choice(self, name: str) -> int | None:
        if name not in self._choices:
            best = next((trial.number for trial in self.trials(name) if trial.chosen), None)
            if best is None:
                return None
            self._choices[name] = best
        return self._choices[name]

    def check_only(self, only: Sequence[str]) -> None:
        """Refuse a pattern that no table and no method has: nothing to do would look like done."""
        names = [*self.recipe.tables, *(name for table in self.recipe.tables for name in self.rows_of(table))]
        for pattern in only:
            if not any(fnmatch(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, n=1)
                advice = (
                    f"did you mean '{close[0]}'?" if close else f"tables: {', '.join(self.recipe.tables)}"
                )
                raise TadError(
                    f"--only {pattern}: {self.recipe.name} has no such table and no such method; {advice}"
                )

    def cells(self, only: Sequence[str] = ()) -> Iterator[tuple[str, str, int | None, Cell | None]]:
        """(table, method, seed, cell) in the order of work: tables, in them seeds, in them methods. `only`: patterns of tables
        or methods; what the first one stands for comes first.

        What a method is tuned with comes right before its first cell. A cell is resolved when its turn comes, since the
        trials before it decide what it is; None while they are not done.
        """
        begun: set[str] = set()
        for table, name, seed in self.places(only):
            tuned_as = self.methods[name].tuned_as
            if tuned_as is not None and tuned_as not in begun:
                begun.add(tuned_as)
                reference = self._reference_cell()
                yield TUNING, reference.method, None, reference
                for trial in self.trials_of(tuned_as):
                    yield TUNING, tuned_as, trial.seed, trial
            yield table, name, seed, self.cell(name, seed)

    def places(self, only: Sequence[str]) -> list[tuple[str, str, int | None]]:
        """(table, method, seed), each once."""
        found: dict[tuple[str, str, int | None], None] = {}
        for pattern in only or ("*",):
            for table in self.recipe.tables:
                names = [
                    name
                    for name in self.rows_of(table)
                    if self.methods[name].absent is None
                    and (fnmatch(name, pattern) or fnmatch(table, pattern))
                ]
                places = [
                    (place, name, seed)
                    for name in names
                    for place, seed in enumerate(self.seeds_of(self.methods[name], table))
                ]
                places.sort(key=lambda entry: entry[0])
                found |= {(table, name, seed): None for _, name, seed in places}
        return list(found)

    # Where things are

    def _place(self, kind: str, label: str, name: str) -> Path:
        """The directory of a hash, whatever it was called when it was made."""
        found = sorted((self.out / kind).glob(f"*-{name}"))
        return found[0] if found else self.out / kind / f"{label}-{name}"

    def store_folder(self, source: Source) -> Path:
        teacher = "" if source.teacher is None else f"{source.teacher.label}-"
        return self._place("stores", f"{teacher}{source.store}", self.hashes.store(source))

    def student_folder(self, cell: Cell) -> Path | None:
        name = self.hashes.student(cell)
        return None if name is None else self._place("students", cell.label, name)

    def answers_folder(self, cell: Cell) -> Path:
        return self._place("answers", cell.label, self.hashes.answers(cell))

    def runs_of(self, cell: Cell) -> list[Path]:
        """The runs that make up a cell."""
        folder = self.answers_folder(cell)
        return [folder / setting.name for setting in self.hashes.settings(cell)]

    def state(self, cell: Cell) -> str:
        """How far a cell is."""
        runs = self.runs_of(cell)
        if all(is_whole(run) for run in runs):
            return UNGRADED if any(list_ungraded(run) for run in runs) else DONE
        student = self.student_folder(cell)
        if student is not None and find_result(student) is not None:
            return TRAINED
        return MISSING if self.ungraded_store(cell) is None else COLLECTED

    def ungraded_store(self, cell: Cell) -> Path | None:
        """A store that is collected and waits for verdicts, before the cell or a round before it can be trained."""
        one: Cell | None = cell
        while one is not None and one.source is not None:
            student = self.student_folder(one)
            if student is not None and find_result(student) is not None:
                return None
            held_out = [Source(self.recipe.validation)] if self.recipe.validation else []
            for source in (one.source, *held_out):
                folder = self.store_folder(source)
                # A window is measured when the verdicts are there.
                collected = (folder / STORE).is_file() and not (folder / WINDOW).is_file()
                if collected and self._waits_for_grading(folder):
                    return folder
            one = one.source.teacher
        return None

    def _waits_for_grading(self, folder: Path) -> bool:
        """Whether a store is whole and lacks verdicts. Every pass asks that for many cells, so its shards are read again only
        after a change."""
        shards = [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("shard-*"))]
        if folder not in self._waiting or self._waiting[folder][0] != shards:
            store = TrajectoryStore.open(folder)
            self._waiting[folder] = shards, bool(store.pending()) and not store.missing()
        return self._waiting[folder][1]

    def states(self, only: Sequence[str] = ()) -> list[CellState]:
        """Every cell and what state it is in; what several tables share is there once."""
        self.check_only(only)
        found, seen = [], set()
        for table, name, seed, cell in self.cells(only):
            identity = None if cell is None else self.hashes.cell(cell)
            if cell is None or identity not in seen:
                seen.add(identity)
                trial, state = (None, WAITING) if cell is None else (cell.trial, self.state(cell))
                found.append(CellState(table, name, seed, trial, state))
        return found

    # Numbers

    def _runs(self, name: str, cells: Sequence[Cell | None]) -> MethodRuns | None:
        """A method's finished cells together; None where there is none."""
        whole = [cell for cell in cells if cell is not None and self.state(cell) in DECODED]
        if not whole:
            return None
        return MethodRuns(
            name,
            self.hashes.settings(whole[0]),
            [cell.seed for cell in whole],
            [[read_outcomes(run) for run in self.runs_of(cell)] for cell in whole],
            self.base.family,
            trained=whole[0].source is not None,
        )

    def row_cells(self, table: str, name: str) -> list[Cell | None]:
        """The cells that a row of a table shows: those that are worked on and, where the recipe's own `seeds` say which,
        every other seed that has been answered. So a call for some seeds takes no others out of the tables."""
        method = self.methods[name]
        if method.absent:
            return []
        cells = {seed: self.cell(name, seed) for seed in self.seeds_of(method, table)}
        if method.store is not None and not (method.seeds or self.recipe.tables[table].seeds):
            named = (_SEED.search(path.name) for path in (self.out / "answers").glob("*-seed*"))
            for seed in {int(found[1]) for found in named if found is not None}.difference(cells):
                cell = self.cell(name, seed)
                if cell is not None and self.state(cell) in DECODED:
                    cells[seed] = cell
        return [cells[seed] for seed in sorted(cells, key=lambda seed: seed or 0)]

    def tables(self) -> list[ResultTable]:
        """All tables, with what has been done so far."""
        cells = {
            (table, name): self.row_cells(table, name)
            for table in self.recipe.tables
            for name in self.rows_of(table)
        }
        known = {(table, name): self._runs(name, row) for (table, name), row in cells.items()}
        everyone = [runs for runs in known.values() if runs is not None]
        base = self._runs(self.recipe.base, [self.cell(self.recipe.base, None)])
        found = []
        for table, section in self.recipe.tables.items():
            rows = {name: cells[table, name] for name in self.rows_of(table)}
            specs = [
                RowSpec(
                    name,
                    self.methods[name].title,
                    known[table, name],
                    len(row),
                    self.methods[name].absent or "",
                )
                for name, row in rows.items()
            ]
            capped = explain_caps(self._windows(cell for row in rows.values() for cell in row))
            note = " ".join(filter(None, (section.note, capped))) or None
            other, tolerance = section.baseline or self.recipe.baseline, self.recipe.tolerance
            baseline = None if other is None else self._runs(other, self.row_cells(table, other))
            found.append(analyse(table, section.title, specs, base, baseline, tolerance, everyone, note=note))
        return found

    def _windows(self, cells: Iterable[Cell | None]) -> Iterator[tuple[str, Path, int | str | None]]:
        """Title, store and window of every student among the cells."""
        for cell in cells:
            if cell is not None and cell.source is not None:
                settings = self.hashes.training(cell, "", None).objective.settings
                title = self.methods[cell.method].title
                yield title, self.store_folder(cell.source), settings.get("window")

    def costs(self) -> list[StudentCost]:
        """Of every student, its first seed, as far as trajectories are collected; of one with several decoders once."""
        found: dict[str | None, StudentCost] = {}
        for name, method in self.methods.items():
            seed = (method.seeds or self.recipe.seeds)[0]
            cell = None if method.store is None or method.absent else self.cell(name, seed)
            cost = None if cell is None else add_rounds(name, self._rounds_of(cell))
            if cell is not None and cost is not None:
                found.setdefault(self.hashes.student(cell), cost)
        return list(found.values())

    def _rounds_of(self, cell: Cell) -> list[tuple[int, Path]]:
        """The optimizer steps and the store of a cell's training, and of those it rests on."""
        found, one = [], cell
        while one.source is not None:
            steps = self.hashes.training(one, "", None).learning.steps or 0
            found.append((steps, self.store_folder(one.source)))
            if one.source.teacher is None:
                break
            one = one.source.teacher
        return found

    def tuning(self) -> Tuning | None:
        """All trials; None of a study that tunes nothing."""
        section = self.recipe.tuning
        if section is None:
            return None
        tasks = ", ".join(f"{shorten(task.name)} ({task.split})" for task in section.tasks)
        trials = [trial for name in section.methods for trial in self.trials(name)]
        return Tuning(trials, section.seed, tasks, self.recipe.tolerance)

    def trials(self, name: str) -> list[TrialResult]:
        """A method's trials with their scores, as far as they are there; the best one is chosen when all are, the first of
        equals. The score is the tokens per forward at the target accuracy; of a curve that is never that accurate, minus the
        points it lacks."""
        assert self.recipe.tuning is not None
        base = self._runs(self.recipe.base, [self._reference_cell()])
        title = self.methods[self.tuned_method(name)].title
        found = []
        for number, cell in enumerate(self.trials_of(name)):
            own, changes = self._runs(name, [cell]), self.recipe.tuning.trials_of(name)[number]
            found.append(TrialResult(name, title, number, changes))
            if own is None or base is None:
                continue
            spec = RowSpec(name, name, own)
            table = analyse(name, name, [spec], base, None, self.recipe.tolerance, resamples=1)
            if not table.tasks:
                continue
            result = table.rows[0].scopes[table.scope]
            best = max(point.accuracy.value for point in result.points)
            assert result.tpf_at_target is not None
            tpf = result.tpf_at_target.tpf
            score = best - result.tpf_at_target.accuracy if tpf is None else tpf
            found[-1] = replace(found[-1], score=score, accuracy=best, tpf=tpf)
        scores = [trial.score for trial in found if trial.score is not None]
        best_of = scores.index(max(scores)) if scores and len(scores) == len(found) else None
        return [replace(trial, chosen=trial.number == best_of) for trial in found]
