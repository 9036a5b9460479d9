"""A study: a matrix of methods and seeds, each trained and evaluated once, wherever and however often it is continued.

    OUT/stores/NAME-HASH        trajectories, shared by the methods that train on them
    OUT/students/NAME-HASH      training runs
    OUT/answers/NAME-HASH/RUN   one model's answers at every setting, shared by the decoders of that model
    OUT/tables                  the named tables and the record of tuning
    OUT/study.json              recipe, base and calls

What a HASH is made of is in `cells`. Several processes may work on a study at once: each takes the next cell that nobody
works on, and leaves those for later whose store or student another one is making. Locks are the operating system's, so a
process that dies leaves its cell to the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.evaluation.analysis import ResultTable
from tad.evaluation.results import is_whole
from tad.evaluation.run import regrade
from tad.evaluation.sweep import run_settings
from tad.evaluation.tables import write_table
from tad.files import claiming, create_folder, waiting, write_json, write_whole
from tad.models import load
from tad.pipeline.costs import write_costs
from tad.pipeline.listener import Listener, Silent, Stopped
from tad.pipeline.pool import start_fields
from tad.runs.record import describe_machine, find_result
from tad.trajectories.grading import grade_store
from tad.trajectories.store import META as STORE
from tad.trajectories.store import TrajectoryStore, UngradedError
from tad.trajectories.window_report import WINDOW
from tad_lab.study.cells import Cell, Source
from tad_lab.study.plan import (
    COLLECTED,
    DECODED,
    MISSING,
    STUDY,
    UNGRADED,
    StudyPlan,
    list_ungraded,
)
from tad_lab.study.recipe import StudyRecipe

_PAUSE = 1.0  # seconds between looks at what other processes are doing


class Study(StudyPlan):
    """A study in a directory."""

    def __init__(self, recipe: StudyRecipe, out: str | Path, listener: Listener | None = None) -> None:
        super().__init__(recipe, out)
        self.listener = listener or Silent()
        self._gradable: dict[str, set[str]] = {}
        self._refused: set[Path] = set()  # stores that cannot be graded here

    def run(self, only: Sequence[str] = (), grade: bool = True, tables: bool = True) -> bool:
        """Do what is missing, then write the tables; whether everything that was asked for is there.

        `grade`: also look for verdicts that are missing in finished runs.
        """
        self.check_only(only)
        asked = [item.example for item in self.hashes.questions(self.recipe.evaluate.tasks).items]
        collections = [self.recipe.collect_recipe(store) for store in self.recipe.stores.values()]
        for recipe in {json.dumps(one.model_dump()["tasks"]): one for one in collections}.values():
            self.recipe.check_overlap(recipe, asked)
        create_folder(self.out)
        self._record()
        try:
            complete = self._work(only, grade)
        except Stopped:
            complete = False
        if grade:
            self.grade()
        if tables:
            with waiting(self.out, "tables"):
                self.write_tables()
        return complete

    def may_begin(self, cell: Cell) -> bool:
        """Asked before each cell."""
        return not self.listener.stopping()

    def _work(self, only: Sequence[str], grade: bool) -> bool:
        """Pass over the cells until none is left that this process could do or that another one is doing. After each piece of
        work the pass begins anew: the next round of a chain may have become possible."""
        while True:
            waits, busy, worked = dict[str, None](), False, False
            for table, name, _, cell in self.cells(only):
                if cell is None:
                    waits[f"{name} of table '{table}' waits for its tuning"] = None
                    continue
                state = self.state(cell)
                if state == COLLECTED:
                    store = self.ungraded_store(cell)
                    if store is not None and not (grade and self._grade_store(store)):
                        waits[f"{name} of table '{table}' waits for the grading of {store}"] = None
                        continue
                    state = self.state(cell)
                if state == UNGRADED and grade:
                    self._grade(cell)
                if state not in DECODED and self._is_blocked(cell):
                    busy = True
                elif state not in DECODED:
                    with self._claim(cell) as mine:
                        if not mine:
                            busy = True
                        elif self.state(cell) not in DECODED:  # another process may have just finished it
                            if not self.may_begin(cell):
                                return False
                            with suppress(UngradedError):  # the next pass finds it collected
                                self.work_on(cell)
                            worked = True
                if worked:
                    break
            if worked:
                continue
            if not busy:
                for line in waits:
                    self.listener.say(line)
                return not waits
            if self.listener.stopping():
                return False
            time.sleep(_PAUSE)

    def _is_blocked(self, cell: Cell) -> bool:
        """Whether another process is making what this cell starts from: its trajectories, or a round before it."""
        one: Cell | None = cell
        while one is not None and one.source is not None:
            folder = self.student_folder(one)
            assert folder is not None
            if find_result(folder) is not None:
                return False
            for name in (f"student-{self.hashes.student(one)}", f"store-{self.hashes.store(one.source)}"):
                with claiming(self.out, name) as free:
                    if not free:
                        return True
            one = one.source.teacher
        return False

    def _claim(self, cell: Cell) -> AbstractContextManager[bool]:
        """By the answers' hash: cells of one model on the same questions share runs."""
        return claiming(self.out, f"answers-{self.hashes.answers(cell)}")

    def work_on(self, cell: Cell) -> None:
        """Whatever a cell still needs: its store, its training, its answers."""
        result = None if cell.source is None else self.train(cell)
        lm, identity = self.pool.decoded(result)
        folder, began = self.answers_folder(cell), time.monotonic()
        missing = [one for one in self.hashes.settings(cell) if not is_whole(folder / one.name)]
        run_settings(
            lm,
            self.recipe.eval_recipe(cell.tasks, name=cell.label),
            folder,
            missing,
            self.listener.decoding,
            self.listener.stopping,
            self._find_gradable(cell),
            self.hashes.questions(cell.tasks),
            identity,
            slim=True,
        )
        if not all(is_whole(folder / one.name) for one in missing):
            raise Stopped
        self.listener.say(f"{cell.label}: {len(missing)} runs in {time.monotonic() - began:.1f} s")

    def collect(self, source: Source) -> Path:
        """A store with its window, made or continued; before it, the student that rolls out."""
        with waiting(self.out, f"store-{self.hashes.store(source)}"):
            folder = self.store_folder(source)
            measured = (folder / WINDOW).is_file() and (folder / STORE).is_file()
            if (
                measured and not TrajectoryStore.open(folder).missing()
            ):  # a study that travelled may have left shards behind
                return folder
            recipe = self.recipe.collect_recipe(self.recipe.stores[source.store], source.part)
            teacher = None if source.teacher is None else self.train(source.teacher)
            self.pool.collect(recipe, folder, teacher, self.listener)
            TrajectoryStore.open(folder).check_graded()
            self.pool.measure_window(self.recipe.window, folder, teacher, self.listener)
            return folder

    def train(self, cell: Cell) -> Path:
        """A cell's adapter or model, made or continued; before it, its trajectories and what it starts from."""
        assert cell.source is not None
        with waiting(self.out, f"student-{self.hashes.student(cell)}"):
            folder = self.student_folder(cell)
            assert folder is not None
            done = find_result(folder)
            if done is not None:
                return done
            store = self.collect(cell.source)
            held_out = self.recipe.validation and str(self.collect(Source(self.recipe.validation)))
            start = start_fields(None if cell.source.teacher is None else self.train(cell.source.teacher))
            recipe = self.hashes.training(cell, str(store), held_out, start)
            return self.pool.train(recipe, folder, self.listener)

    # Grading

    def _find_gradable(self, cell: Cell) -> set[str]:
        key = json.dumps([task.model_dump() for task in cell.tasks])
        if key not in self._gradable:
            questions = self.hashes.questions(cell.tasks)
            self._gradable[key] = questions.gradable()
            rest = sorted(set(questions.labels) - self._gradable[key])
            if rest:
                self.listener.say(
                    f"{', '.join(rest)}: cannot be graded here; run again where there is a sandbox"
                )
        return self._gradable[key]

    def _grade(self, cell: Cell) -> None:
        able, questions = self._find_gradable(cell), self.hashes.questions(cell.tasks)
        with self._claim(cell) as mine:
            runs = [run for run in self.runs_of(cell) if list_ungraded(run) & able] if mine else []
            graders = self.recipe.evaluate.graders
            for results, count in regrade(runs, None, True, graders, questions, able):
                self.listener.say(f"{cell.label}, {results.folder.name}: {count} verdicts")

    def grade(self) -> None:
        """Verdicts that are missing in finished runs and in stores, and can be given here."""
        for _, _, _, cell in self.cells():
            state = MISSING if cell is None else self.state(cell)
            if cell is not None and state == UNGRADED:
                self._grade(cell)
            elif cell is not None and state == COLLECTED and (store := self.ungraded_store(cell)) is not None:
                self._grade_store(store)

    def _grade_store(self, folder: Path) -> bool:
        """Give the rollouts of a store the verdicts they wait for; whether that could be done."""
        if folder in self._refused:
            return False
        lm = load(self.recipe.model, weights=False)
        with waiting(self.out, f"store-{folder.name.rpartition('-')[2]}"):
            store, graders = TrajectoryStore.open(folder), self.recipe.evaluate.graders
            with self.listener.stage(f"Grade {folder.name}"):
                try:
                    for shard, stats in grade_store(store, lm, self.recipe.data_dir, graders):
                        self.listener.shard(shard, stats)
                except TadError as error:
                    self._refused.add(folder)
                    self.listener.say(str(error))
                    return False
        return True

    # Tables and records

    def write_tables(self) -> list[ResultTable]:
        """Write every table, and the record of tuning."""
        folder, tuning = self.out / "tables", self.tuning()
        found = self.tables()
        for table in found:
            write_table(table, folder)
        costs = self.costs()
        if costs:
            write_costs(costs, folder)
        if tuning is not None:
            write_whole(folder / "tuning.md", tuning.markdown())
            write_json(folder / "tuning.json", [asdict(trial) for trial in tuning.trials])
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
