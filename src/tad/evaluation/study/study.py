"""A study: a matrix of methods and seeds, each trained and evaluated once, wherever and however often it is continued.

    OUT/stores/NAME-HASH        trajectories, shared by the methods that train on them
    OUT/students/NAME-HASH      training runs
    OUT/answers/NAME-HASH/RUN   one model's answers at every setting, shared by the decoders of that model
    OUT/tables                  the named tables and the record of tuning
    OUT/study.json              recipe, base and calls;  OUT/timings.jsonl: how long each piece of work took

What a HASH is made of is in `cells`. Several processes may work on a study at once: each takes the next cell that nobody
works on, and waits for a store or a student that another one is making. Locks are the operating system's, so a process that
dies leaves its cell to the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tad.evaluation.run import Identity
from tad.evaluation.study.answers import answer, find_gradable, grade_missing, is_whole, list_ungraded
from tad.evaluation.study.cells import Cell
from tad.evaluation.study.chain import Silent, Stopped, Watch, describe_log, describe_training
from tad.evaluation.study.plan import DONE, STUDY, UNGRADED, Plan
from tad.evaluation.study.recipe import StudyRecipe
from tad.evaluation.study.tables import Table, write_table
from tad.evaluation.study.tuning import write_trials
from tad.evaluation.study.workbench import (
    WINDOW,
    explain_windows,
    fill_store,
    find_result,
    measure_window,
    read_report,
)
from tad.files import claiming, create_folder, waiting, write_json
from tad.training.record import describe_machine
from tad.trajectories.store import TrajectoryStore

_DECODED = (DONE, UNGRADED)
_PAUSE = 1.0  # seconds between looks at what other processes are doing


class Study(Plan):
    """A study in a directory."""

    def __init__(self, recipe: StudyRecipe, out: str | Path, watch: Watch | None = None) -> None:
        super().__init__(recipe, out)
        self.watch = watch or Silent()
        self.deadline: float | None = None
        self._able: dict[str, set[str]] = {}

    def run(
        self,
        only: Sequence[str] = (),
        minutes: float | None = None,
        grade: bool = True,
        tables: bool = True,
    ) -> bool:
        """Do what is missing, then write the tables; whether everything that was asked for is there.

        With `minutes`, nothing is begun that is expected to end later; the piece of work in flight may be stopped. `grade`: also
        look for verdicts that are missing in finished runs.
        """
        self.check_only(only)
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        create_folder(self.out)
        self._record()
        try:
            complete = self._work(only, grade)
        except Stopped:
            complete = False
        if grade:
            self._grade_all()
        if tables:
            with waiting(self.out, "tables"):
                self.write_tables()
        return complete

    def _work(self, only: Sequence[str], grade: bool) -> bool:
        """Pass over the cells until none is left that this process could do or that another one is doing."""
        while True:
            waits, busy = [], False
            for table, name, _, get in self.plan(only):
                cell = get()
                if cell is None:
                    waits.append(f"{name} of table '{table}' waits for its tuning")
                elif not self._finished(cell, grade):
                    with self._claim(cell) as mine:
                        if not mine:
                            busy = True
                        elif self.state(cell) not in _DECODED:  # another process may have just finished it
                            if not self._has_time(cell):
                                return False
                            self._do(cell)
            if not busy:
                for line in waits:
                    self.watch.say(line)
                return not waits
            if self._stopping():
                return False
            time.sleep(_PAUSE)

    def _claim(self, cell: Cell) -> AbstractContextManager[bool]:
        """By the answers' hash: cells of one model on the same questions share runs."""
        return claiming(self.out, f"answers-{self.hashes.answers(cell)}")

    def _finished(self, cell: Cell, grade: bool) -> bool:
        state = self.state(cell)
        if state == UNGRADED and grade:
            self._grade(cell)
        return state in _DECODED

    def _has_time(self, cell: Cell) -> bool:
        if self._stopping():
            return False
        expected = self.estimate(cell)
        late = (
            self.deadline is not None and expected is not None and time.monotonic() + expected > self.deadline
        )
        if late:
            self.watch.say(f"{cell.label} would take about {expected:.0f} s, which is more than is left")
        return not late

    def _stopping(self) -> bool:
        return self.watch.stopping() or (self.deadline is not None and time.monotonic() > self.deadline)

    def _do(self, cell: Cell) -> None:
        store = None if cell.store is None else self._collect(cell.store)
        result = None if store is None else self._train(cell, store)
        lm = self.bench.base() if result is None else self.bench.trained(result)
        identity = Identity.of(lm)
        folder = self.answers_folder(cell)
        questions = self.hashes.questions(cell.tasks)
        began, made = time.monotonic(), 0
        for setting in self.hashes.settings(cell):
            if is_whole(folder / setting.name):
                continue
            if self._stopping():
                raise Stopped
            recipe = self.recipe.eval_recipe(cell.tasks, setting.decoder, setting.settings)
            start = time.monotonic()
            whole = answer(
                lm,
                recipe,
                folder / setting.name,
                questions,
                identity,
                self._gradable(cell),
                self.watch.begin(setting),
                self._stopping,
            )
            if not whole:
                raise Stopped
            self.timings.add("answer", setting.name, start)
            made += 1
        self.watch.say(f"{cell.label}: {made} runs in {time.monotonic() - began:.1f} s")

    def _collect(self, name: str) -> Path:
        """A store with its window, made or continued."""
        with waiting(self.out, f"store-{self.hashes.store(name)}"):
            folder = self.store_folder(name)
            return folder if (folder / WINDOW).is_file() else self._fill(name, folder)

    def _fill(self, name: str, folder: Path) -> Path:
        began = time.monotonic()
        recipe = self.recipe.collect_recipe(self.recipe.stores[name])
        with self.watch.stage(f"store '{name}'"):
            store = fill_store(self.bench.base(), recipe, folder, self.watch.shard, self._stopping)
            if store is None:
                raise Stopped
            measure_window(self.bench.base(), TrajectoryStore.open(folder), self.recipe.window)
            for line in explain_windows(read_report(folder)):
                self.watch.say(line)
        self.timings.add("collect", name, began)
        return folder

    def _train(self, cell: Cell, store: Path) -> Path:
        with waiting(self.out, f"student-{self.hashes.student(cell)}"):
            folder = self.student_folder(cell)
            assert folder is not None
            return find_result(folder) or self._distill(cell, store, folder)

    def _distill(self, cell: Cell, store: Path, folder: Path) -> Path:
        held = None if self.recipe.validation is None else str(self._collect(self.recipe.validation))
        recipe = self.hashes.training(cell, str(store), held)
        began = time.monotonic()
        with self.watch.stage(f"{cell.label}: {describe_training(recipe)}"):
            outcome = self.bench.train(recipe, folder)
            if not outcome.finished:
                raise Stopped
            self.watch.say(describe_log(folder))
        self.timings.add("train", recipe.objective.name, began)
        return outcome.path

    # Grading

    def _gradable(self, cell: Cell) -> set[str]:
        key = json.dumps([task.model_dump() for task in cell.tasks])
        known = self._able
        if key not in known:
            questions = self.hashes.questions(cell.tasks)
            known[key] = find_gradable(questions)
            rest = {item.label for item in questions.items} - known[key]
            if rest:
                self.watch.say(
                    f"{', '.join(sorted(rest))}: cannot be graded here; run again where there is a sandbox"
                )
        return set(known[key])

    def _grade(self, cell: Cell) -> None:
        able, questions = self._gradable(cell), self.hashes.questions(cell.tasks)
        folder = self.answers_folder(cell)
        with self._claim(cell) as mine:
            for setting in self.hashes.settings(cell) if mine else ():
                run = folder / setting.name
                if list_ungraded(run) & able:
                    count = grade_missing(run, questions, able, self.recipe.evaluate.graders)
                    self.watch.say(f"{cell.label}, {setting.name}: {count} verdicts")

    def _grade_all(self) -> None:
        for _, _, _, get in self.plan():
            cell = get()
            if cell is not None and self.state(cell) == UNGRADED:
                self._grade(cell)

    # Tables and records

    def write_tables(self) -> list[Table]:
        """Write every table, and the record of tuning."""
        folder, tuning = self.out / "tables", self.recipe.tuning
        found = self.tables()
        for table in found:
            write_table(table, folder)
        if tuning is not None:
            trials = [trial for name in tuning.methods for trial in self.trials(name)]
            tasks = ", ".join(f"{task.name} ({task.split})" for task in tuning.tasks)
            write_trials(trials, folder, tuning.seed, tasks, self.recipe.below)
        return found

    def _record(self) -> None:
        path = self.out / STUDY
        with waiting(self.out, "record"):
            record: dict[str, Any] = (
                json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"calls": []}
            )
            record |= {"recipe": self.recipe.model_dump(mode="json"), "base": asdict(self.base)}
            record["calls"].append(describe_machine())
            write_json(path, record)
