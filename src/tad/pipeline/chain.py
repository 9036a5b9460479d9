"""The whole method for one checkpoint: trajectories, windows, students, evaluation, report. The work behind `tad run`.

    OUT/trajectories        the store, window.json and its picture
    OUT/students/NAME       a training run with its adapter
    OUT/evaluation/NAME     a sweep: 'base', and each student
    OUT/trajectories-NAME   with rounds: the store of the student NAME-roundR, rolled out by that of the round before
    OUT/tables              the numbers beside each other
    OUT/report              the report, where it can be made

A stage that is complete is passed over, one that is not goes on where it was stopped, and one that belongs to another recipe
is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import yaml

from tad.config import Recipe
from tad.errors import TadError
from tad.evaluation.analysis import ResultTable
from tad.evaluation.methods import group_runs, load_runs, tabulate
from tad.evaluation.questions import Questions
from tad.evaluation.recipe import EvalTask
from tad.evaluation.sweep import run_settings
from tad.evaluation.tables import write_table
from tad.evaluation.verdict import conclude, rank_rows
from tad.files import create_folder, writing
from tad.models import find_defaults, load
from tad.pipeline.costs import add_rounds, write_costs
from tad.pipeline.listener import Listener, Silent, Stopped
from tad.pipeline.own_data import warn_of_few
from tad.pipeline.pool import ModelPool, start_fields
from tad.pipeline.recipe import RunRecipe, Training
from tad.runs.identity import find_difference
from tad.runs.record import MODEL, RECORD, find_result, read_record, write_record
from tad.training.recipe import DistillRecipe
from tad.trajectories.store import META as STORE
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.summary import summarise
from tad.trajectories.window_report import WINDOW, explain_caps

_FEW = 64  # questions of a collected task, to see whether its answers can be graded here
STAGES = ("collect", "window", "distill", "evaluate", "report")


class Chain:
    """A chain in a directory."""

    def __init__(
        self, recipe: RunRecipe, out: Path, listener: Listener | None = None, smoke: bool = False
    ) -> None:
        """`smoke` marks every number of the report as smoke size."""
        recipe.check()
        self.smoke = smoke
        self.recipe, self.out, self.listener = recipe, Path(out), listener or Silent()
        self.trainings = recipe.trainings()

    def run(self, stages: Sequence[str] = STAGES) -> bool:
        """Do what is missing of these stages; whether it came to the end."""
        unknown = next((name for name in stages if name not in STAGES), None)
        if unknown is not None:
            raise TadError(f"stage '{unknown}' is not known; known: {', '.join(STAGES)}")
        load(self.recipe.model, weights=False)  # a wrong path is named before data are looked for
        if "evaluate" in stages:
            self._check_graders(self.questions, "evaluate.tasks", self.recipe.evaluate.tasks)
            if (few := warn_of_few(len(self.questions.items))) is not None and not self.smoke:
                self.listener.say(few)
        if "collect" in stages:
            graded = [task for task in self.recipe.collect_recipe().tasks if task.graded is True]
            some = [
                EvalTask(name=task.name, split=task.split, limit=_FEW, options=task.options)
                for task in graded
            ]
            programs = Questions(some, self.recipe.data_dir)
            self._check_graders(programs, "collect.tasks", self.recipe.collect_recipe().tasks)
            asked = [item.example for item in self.questions.items]
            last = self.recipe.last_round.collect
            for changes in ({}, last) if "tasks" in last else ({},):
                self.recipe.check_overlap(self.recipe.collect_recipe(changes), asked)
        create_folder(self.out)
        with writing(self.out):
            self._check_window()
            write_record(self.out, self.recipe.model_dump(mode="json"))
            try:
                for _, trainings in groupby(self.trainings, lambda one: one.round):
                    now = list(trainings)
                    for name in STAGES[:3]:
                        if name in stages:
                            getattr(self, f"_{name}")(now)
                for name in STAGES[3:]:
                    if name in stages:
                        getattr(self, f"_{name}")()
            except Stopped:
                return False
        return True

    def _check_graders(self, questions: Questions, field: str, sections: Sequence[Recipe]) -> None:
        """Refuse now, and not after hours, programs that cannot be judged here; with the override that leaves them out."""
        able = questions.gradable()
        unable = [label for label in questions.labels if label not in able]
        if not unable:
            return
        try:
            questions.check_graders(unable)
        except TadError as error:
            cause = re.split(";|, or accept", str(error))[0]
            left = [task for task in sections if getattr(task, "name") not in unable]  # noqa: B009
            ways = "install bubblewrap (apt install bubblewrap) and allow user namespaces"
            if left:
                values = [task.model_dump(mode="json", exclude_defaults=True) for task in left]
                shown = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10**6).strip()
                ways += f", or leave programs out: '{field}={shown}'"
            raise TadError(f"{self.recipe.name}: {', '.join(unable)}: {cause}; {ways}") from None

    @cached_property
    def questions(self) -> Questions:
        return Questions(self.recipe.evaluate.tasks, self.recipe.data_dir)

    @cached_property
    def pool(self) -> ModelPool:
        """Loaded when a stage first needs it."""
        return ModelPool(self.recipe.model, self.recipe.device, self.recipe.dtype)

    def _made(self, training: Training | None) -> Path | None:
        """What a training has left; None stands for the base."""
        if training is None:
            return None
        result = find_result(self.student(training.name))
        if result is None:
            raise TadError(
                f"{self.student(training.name)}: is not trained yet; run the stage 'distill' first"
            )
        return result

    def student(self, name: str) -> Path:
        return self.out / "students" / name

    def sweep(self, name: str) -> Path:
        return self.out / "evaluation" / name

    # Stages

    def _collect(self, trainings: Sequence[Training]) -> None:
        for store, one in _by_store(trainings).items():
            recipe = self.recipe.collect_recipe(one.collect, one.part)
            self.pool.collect(recipe, self.out / store, self._made(one.before), self.listener)

    def _window(self, trainings: Sequence[Training]) -> None:
        for store, one in _by_store(trainings).items():
            folder = self._need_store(store)
            self.pool.measure_window(self.recipe.window, folder, self._made(one.before), self.listener)

    def _distill(self, trainings: Sequence[Training]) -> None:
        for one in trainings:
            store = self._need_store(one.store)
            self._need(store / WINDOW, "window")
            start = start_fields(self._made(one.before))
            recipe = self.recipe.distill_recipe(one.name, str(store), one.values, **start)
            out = self.student(one.name)
            if find_result(out) is None:
                self.pool.train(recipe, out, self.listener)
                continue
            _check_finished(out, recipe)
            self.listener.say(f"'{one.name}' was trained before: {out}")

    def _evaluate(self) -> None:
        tasks, listener = self.recipe.evaluate.tasks, self.listener
        for name, source in self._models():
            with listener.stage(f"Evaluate '{name}' on {len(self.questions.items)} problems"):
                lm, identity = self.pool.decoded(source)
                settings = self.recipe.settings_of(name, self.pool.family)
                recipe = self.recipe.eval_recipe(tasks, name=None if source is None else name)
                report, stopping = listener.decoding, listener.stopping
                run_settings(
                    lm, recipe, self.sweep(name), settings, report, stopping, True, self.questions, identity
                )
                if stopping():
                    raise Stopped
        write_table(self.table(), self.out / "tables")
        costs = [add_rounds(one.name, self._rounds_of(one)) for one in self.trainings]
        write_costs([cost for cost in costs if cost is not None], self.out / "tables")

    def _rounds_of(self, training: Training) -> list[tuple[int, Path]]:
        """The optimizer steps and the store of a training, and of those before it."""
        recipe = self.recipe.distill_recipe(training.name, training.store, training.values)
        before = [] if training.before is None else self._rounds_of(training.before)
        return [*before, (recipe.learning.steps or 0, self.out / training.store)]

    def _models(self) -> list[tuple[str, Path | None]]:
        """Name -> adapter or model, None for the base; in the order of the table."""
        found: list[tuple[str, Path | None]] = [("base", None)]
        found += [(one.name, self._made(one)) for one in self.trainings]
        return found + [(name, Path(path)) for name, path in self.recipe.adapters.items()]

    def table(self) -> ResultTable:
        """The base, its decoders and the students, on the same problems, as `tad points` of the directories has them."""
        notes: list[str] = []
        names = ("base", *(one.name for one in self.trainings), *self.recipe.adapters)
        groups = group_runs(load_runs([self.sweep(name) for name in names], notes), notes)
        windows = []
        for one in self.trainings:
            settings = self.recipe.distill_recipe(one.name, one.store, one.values).objective.settings
            windows.append((one.name, self.out / one.store, settings.get("window")))
        table = tabulate(groups[0], self.recipe.tolerance, title=self.recipe.name)
        return replace(table, note=explain_caps(windows))

    def conclude(self) -> list[str]:
        """Whether it was worth it, and what to type next with the best student."""
        table = self.table()
        summary = summarise(TrajectoryStore.open(self.out / "trajectories"))
        kept = summary.kept / summary.attempted if summary.attempted else None
        lines = [f"Verdict: {conclude(table, kept)}"]
        sources = {name: path for name, path in self._models() if path is not None}
        best = next(
            (
                (row, name)
                for row in rank_rows(table)
                for name in sources
                if row.trained and row.method.startswith(f"{name}, ")
            ),
            None,
        )
        if best is None:
            return lines
        row, name = best
        found, source = row.scopes[table.scope], sources[name]
        student = [str(source)] if source.name == MODEL else [self.recipe.model, "--adapter", str(source)]
        decoder, own = found.setting.partition(",")[0], find_defaults(*student[::2]).decoder
        student += [] if decoder == own else ["--decoder", decoder]  # the one that was measured
        question = " ".join(self.questions.items[0].example.question.split())
        first = self.recipe.settings_of("base", self.pool.family)[0]
        runs = [self.sweep("base") / first.name, self.sweep(name) / found.setting]
        return [
            *lines,
            "Next:",
            f"  {shlex.join(['tad', 'generate', *student, question])}",
            f"  {shlex.join(['tad', 'serve', *student])}",
            f"  {shlex.join(['tad', 'compare', *map(str, runs)])}",
        ]

    def _report(self) -> None:
        from tad.evaluation.report import write_report

        with self.listener.stage("Report"):
            written = write_report(
                [self.out],
                self.out / "report" / "report.html",
                self.recipe.name,
                self.smoke,
                tolerance=self.recipe.tolerance,
                say=self.listener.say,
            )
            self.listener.say(f"report: {written.page}")

    # Bookkeeping

    def _need(self, path: Path, stage: str) -> None:
        if not path.is_file():
            raise TadError(f"{path}: missing; run the stage '{stage}' first")

    def _need_store(self, name: str) -> Path:
        """A store that was stopped has its description, and not all of its shards."""
        folder = self.out / name
        self._need(folder / STORE, "collect")
        missing = TrajectoryStore.open(folder).missing()
        if missing:
            raise TadError(
                f"{folder}: {len(missing)} shards are still missing; run the stage 'collect' first"
            )
        return folder

    def _check_window(self) -> None:
        """Refuse to pass over a window that was measured with other settings."""
        record, path = read_record(self.out), self.out / "trajectories" / WINDOW
        if not path.is_file() or not record:
            return
        now = self.recipe.window.model_dump(mode="json", exclude={"batch_size"})
        before = record["recipe"]["window"]
        found = find_difference({field: before.get(field) for field in now}, now)
        if found is not None:
            raise TadError(
                f"{path}: was measured with window.{found.field}={found.before!r}, the recipe now says "
                f"{found.now!r}; use another --out directory"
            )


def _by_store(trainings: Sequence[Training]) -> dict[str, Training]:
    """One of the trainings for each store."""
    return {one.store: one for one in trainings}


def _check_finished(out: Path, recipe: DistillRecipe) -> None:
    """A student that was trained with another recipe is not this one."""
    record = read_record(out)
    if not record:
        raise TadError(
            f"{out}: holds an adapter without {RECORD}; use another --out, or list it under 'adapters'"
        )
    # A record may hold settings of another version, which no longer decide anything.
    told = {name: value for name, value in record["recipe"].items() if name in DistillRecipe.model_fields}
    before, now = DistillRecipe.model_validate(told).content_hash_fields(), recipe.content_hash_fields()
    found = find_difference(before, {field: now.get(field) for field in before})
    if found is not None:
        raise TadError(
            f"{out}: was trained with {found.field}={found.before!r}, the recipe now says {found.now!r}; "
            "use another --out directory"
        )
