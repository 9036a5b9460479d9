"""What a study has to do and what it has done: cells in the order of work, where their files are, how far they are.

Reads the study's directory and writes nothing; `study` does the work.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from tad.errors import TadError
from tad.evaluation.study.answers import is_whole, list_ungraded
from tad.evaluation.study.cells import Base, Cell, Hashes, Resolved, choose, resolve_methods
from tad.evaluation.study.numbers import Answers, read_numbers
from tad.evaluation.study.recipe import StudyRecipe
from tad.evaluation.study.tables import Table, Wanted, make_table
from tad.evaluation.study.timings import Timings
from tad.evaluation.study.tuning import Trial, choose_trial, score_trial
from tad.evaluation.study.workbench import WINDOW, Workbench, find_result
from tad.evaluation.sweep import FIRST

STUDY, TIMINGS = "study.json", "timings.jsonl"
DONE, UNGRADED, TRAINED, MISSING, WAITING = "done", "not graded", "trained", "missing", "waits for tuning"
Step = tuple[str, str, int | None, Callable[[], Cell | None]]


@dataclass(frozen=True)
class Entry:
    """A line of `tad study --list`."""

    table: str
    method: str
    seed: int | None
    trial: int | None
    state: str
    seconds: float | None  # estimated, of what is left to do; None where nothing like it has been done


class Plan:
    """See the module."""

    def __init__(self, recipe: StudyRecipe, out: str | Path) -> None:
        self.recipe, self.out = recipe, Path(out)
        self.methods = resolve_methods(recipe)
        self.timings = Timings(self.out / TIMINGS)
        self._choices: dict[str, int] = {}
        self._bench: Workbench | None = None
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
                self.recipe.distill_recipe(name, "store", method.distill())
        for name, table in self.recipe.tables.items():
            for pattern in table.methods:
                choose(list(self.methods), pattern, f"{self.recipe.name}: tables.{name}")

    @cached_property
    def base(self) -> Base:
        """From the study's own record where it was begun before, else from the weights."""
        path = self.out / STUDY
        if path.is_file():
            return Base(**json.loads(path.read_text(encoding="utf-8"))["base"])
        return self._base_of(self.bench)

    @staticmethod
    def _base_of(bench: Workbench) -> Base:
        return Base(bench.fingerprint, bench.tokenizer, bench.family, bench.own_dtype)

    @property
    def bench(self) -> Workbench:
        """Loaded when something first needs it."""
        if self._bench is None:
            self._bench = Workbench(self.recipe.model, self.recipe.device, self.recipe.dtype)
            if "base" in self.__dict__ and self._bench.fingerprint != self.base.model:
                raise TadError(
                    f"{self.out}: is a study of another base: {self.base.model} there, {self._bench.fingerprint} is "
                    f"{self.recipe.model}; use another --out directory"
                )
        return self._bench

    @cached_property
    def hashes(self) -> Hashes:
        return Hashes(self.recipe, self.base)

    def rows_of(self, table: str) -> list[str]:
        """The methods of a table, in order."""
        found: list[str] = []
        for pattern in self.recipe.tables[table].methods:
            found += choose(list(self.methods), pattern, f"tables.{table}")
        return list(dict.fromkeys(found))

    def seeds_of(self, method: Resolved, table: str) -> list[int | None]:
        if method.store is None:
            return [None]
        return list(method.seeds or self.recipe.tables[table].seeds or self.recipe.seeds)

    def trials_of(self, name: str) -> list[Cell]:
        """The trials of a tuned method."""
        tuning, method = self.recipe.tuning, self.methods[name]
        assert tuning is not None
        return [
            Cell(
                method=name,
                seed=tuning.seed,
                trial=number,
                store=method.store,
                changes=method.distill(changes),
                tasks=tuning.tasks,
                decoder=method.decoder,
                settings=method.settings,
            )
            for number, changes in enumerate(tuning.trials_of(name))
        ]

    def cell(self, name: str, seed: int | None) -> Cell | None:
        """A method's cell on the test problems; None while its tuning is not finished."""
        method, trial = self.methods[name], None
        if method.tuned_as is not None:
            number = self._choice(method.tuned_as)
            if number is None:
                return None
            assert self.recipe.tuning is not None
            trial = self.recipe.tuning.trials_of(method.tuned_as)[number]
        return Cell(
            method=name,
            seed=seed,
            trial=None,
            store=method.store,
            changes=method.distill(trial),
            tasks=self.recipe.evaluate.tasks,
            decoder=method.decoder,
            settings=method.settings,
        )

    def _bar_cell(self) -> Cell:
        """The base one token at a time on the problems that tuning uses."""
        assert self.recipe.tuning is not None
        method = self.methods[self.recipe.base]
        return Cell(method.name, None, None, None, {}, self.recipe.tuning.tasks, FIRST, method.settings)

    def _choice(self, name: str) -> int | None:
        if name not in self._choices:
            chosen = choose_trial(self.trials(name))
            if chosen is None:
                return None
            self._choices[name] = chosen
        return self._choices[name]

    def trials(self, name: str) -> list[Trial]:
        """A method's trials with their scores, as far as they are there."""
        tuning = self.recipe.tuning
        assert tuning is not None
        base = self._answers(self.recipe.base, [self._bar_cell()])
        found = []
        for number, cell in enumerate(self.trials_of(name)):
            own = self._answers(name, [cell])
            score, accuracy, speed = None, None, None
            if own is not None and base is not None and own.graded & base.graded:
                score, accuracy, speed = score_trial(own, base, self.recipe.below)
            found.append(Trial(name, number, tuning.trials_of(name)[number], score, accuracy, speed))
        best = choose_trial(found)
        return [Trial(**{**asdict(trial), "chosen": trial.number == best}) for trial in found]

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

    def plan(
        self, only: Sequence[str] = ()
    ) -> Iterator[tuple[str, str, int | None, Callable[[], Cell | None]]]:
        """(table, method, seed, how to get the cell) in the order of work: tables, in them seeds, in them methods.

        What a method is tuned with comes right before its first cell. A cell is resolved when its turn comes, since the
        trials before it decide what it is. `only`: patterns of tables or methods.
        """
        begun: set[str] = set()
        for table in self.recipe.tables:
            names = [
                name
                for name in self.rows_of(table)
                if self.methods[name].absent is None
                and (not only or any(fnmatch(name, p) or fnmatch(table, p) for p in only))
            ]
            places = [
                (place, name, seed)
                for name in names
                for place, seed in enumerate(self.seeds_of(self.methods[name], table))
            ]
            for _, name, seed in sorted(places, key=lambda entry: entry[0]):
                tuned_as = self.methods[name].tuned_as
                if tuned_as is not None and tuned_as not in begun:
                    begun.add(tuned_as)
                    bar = self._bar_cell()
                    yield "tuning", bar.method, None, lambda bar=bar: bar  # type: ignore[misc]
                    for trial in self.trials_of(tuned_as):
                        yield "tuning", tuned_as, trial.seed, lambda trial=trial: trial  # type: ignore[misc]
                yield table, name, seed, lambda name=name, seed=seed: self.cell(name, seed)  # type: ignore[misc]

    # Where things are

    def _place(self, kind: str, label: str, name: str) -> Path:
        """The directory of a hash, whatever it was called when it was made."""
        found = sorted((self.out / kind).glob(f"*-{name}"))
        return found[0] if found else self.out / kind / f"{label}-{name}"

    def store_folder(self, name: str) -> Path:
        return self._place("stores", name, self.hashes.store(name))

    def student_folder(self, cell: Cell) -> Path | None:
        name = self.hashes.student(cell)
        return None if name is None else self._place("students", cell.label, name)

    def answers_folder(self, cell: Cell) -> Path:
        return self._place("answers", cell.label, self.hashes.answers(cell))

    def state(self, cell: Cell) -> str:
        """How far a cell is."""
        folder = self.answers_folder(cell)
        runs = [folder / setting.name for setting in self.hashes.settings(cell)]
        if all(is_whole(run) for run in runs):
            return UNGRADED if any(list_ungraded(run) for run in runs) else DONE
        student = self.student_folder(cell)
        return TRAINED if student is not None and find_result(student) is not None else MISSING

    def entries(self, only: Sequence[str] = ()) -> list[Entry]:
        """Every cell, what state it is in, and how long what is left may take."""
        self.check_only(only)
        found, seen = [], set()
        for table, name, seed, get in self.plan(only):
            cell = get()
            if cell is None:
                found.append(Entry(table, name, seed, None, WAITING, None))
                continue
            identity = self.hashes.cell(cell)
            if identity not in seen:
                seen.add(identity)
                state = self.state(cell)
                left = 0.0 if state in (DONE, UNGRADED) else self.estimate(cell)
                found.append(Entry(table, name, seed, cell.trial, state, left))
        return found

    def estimate(self, cell: Cell) -> float | None:
        """Seconds that are left to do of a cell; None where a part of it has never been done."""
        folder, student = self.answers_folder(cell), self.student_folder(cell)
        parts = [
            self.timings.typical("answer", setting.name)
            for setting in self.hashes.settings(cell)
            if not is_whole(folder / setting.name)
        ]
        if student is not None and cell.store is not None and find_result(student) is None:
            objective = self.hashes.training(cell, "", None).objective.name
            parts.append(self.timings.typical("train", objective))
            if not (self.store_folder(cell.store) / WINDOW).is_file():
                parts.append(self.timings.typical("collect", cell.store))
        return None if None in parts else sum(part for part in parts if part is not None)

    # Numbers

    def _answers(self, name: str, cells: Sequence[Cell | None]) -> Answers | None:
        """A method's finished cells together; None where there is none."""
        whole = [cell for cell in cells if cell is not None and self.state(cell) in (DONE, UNGRADED)]
        if not whole:
            return None
        settings = self.hashes.settings(whole[0])
        runs = [
            [read_numbers(self.answers_folder(cell) / setting.name) for setting in settings] for cell in whole
        ]
        return Answers(name, settings, [cell.seed for cell in whole], runs)

    def tables(self) -> list[Table]:
        """All tables, with what has been done so far."""
        known: dict[tuple[str, str], Answers | None] = {}
        for table in self.recipe.tables:
            for name in self.rows_of(table):
                method = self.methods[name]
                cells = [] if method.absent else [self.cell(name, s) for s in self.seeds_of(method, table)]
                known[table, name] = self._answers(name, cells)
        everyone = [answers for answers in known.values() if answers is not None]
        base = self._answers(self.recipe.base, [self.cell(self.recipe.base, None)])
        rival = self.recipe.rival and self._answers(self.recipe.rival, [self.cell(self.recipe.rival, None)])
        found = []
        for table, section in self.recipe.tables.items():
            wanted = []
            for name in self.rows_of(table):
                method = self.methods[name]
                planned = 0 if method.absent else len(self.seeds_of(method, table))
                state = method.absent or ""
                wanted.append(Wanted(name, method.title, known[table, name], planned, state))
            found.append(
                make_table(
                    table, section.title, wanted, base, rival or None, self.base.family, self.recipe.below,
                    everyone, section.note,
                )
            )  # fmt: skip
        return found
