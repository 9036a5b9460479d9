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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tad.errors import TadError
from tad.evaluation.analysis import ResultTable
from tad.evaluation.methods import group_runs, load_runs, tabulate
from tad.evaluation.questions import Questions
from tad.evaluation.run import Identity, evaluate
from tad.evaluation.study.costs import add_rounds, write_costs
from tad.evaluation.study.listener import Listener, Silent, Stopped
from tad.evaluation.study.own_data import warn_of_few
from tad.evaluation.study.pool import ModelPool, fill_store, find_result, start_fields
from tad.evaluation.study.recipe import RunRecipe, Values
from tad.evaluation.sweep import FIRST, Setting
from tad.evaluation.tables import write_table
from tad.files import create_folder, writing
from tad.training.recipe import DistillRecipe
from tad.training.record import RECORD, read_record, write_record
from tad.trajectories.store import META as STORE
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.summary import summarise
from tad.trajectories.window import WINDOW, explain_windows, measure_window, read_report, show_decay


@dataclass(frozen=True)
class Training:
    """A student to make: the section it is trained with, its trajectories, and the student of the round before."""

    name: str
    values: Values
    round: int
    store: Path
    before: Training | None


MANY_EPOCHS = 100
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
        self.store = self.out / "trajectories"
        self._pool: ModelPool | None = None

    def run(self, stages: Sequence[str] = STAGES) -> bool:
        """Do what is missing of these stages; whether it came to the end."""
        unknown = next((name for name in stages if name not in STAGES), None)
        if unknown is not None:
            raise TadError(f"stage '{unknown}' is not known; known: {', '.join(STAGES)}")
        if "evaluate" in stages:
            self.questions.check_graders()  # now, and not after hours of training
            if (few := warn_of_few(len(self.questions.items))) is not None and not self.smoke:
                self.listener.say(few)
        if "collect" in stages:
            asked = [item.example for item in self.questions.items]
            self.recipe.check_overlap(self.recipe.collect_recipe(), asked)
        create_folder(self.out)
        with writing(self.out):
            self._check_window()
            write_record(self.out, self.recipe.model_dump(mode="json"))
            try:
                for trainings in self.rounds:
                    for name in STAGES[:3]:
                        if name in stages:
                            getattr(self, f"_{name}")(trainings)
                for name in STAGES[3:]:
                    if name in stages:
                        getattr(self, f"_{name}")()
            except Stopped:
                return False
        return True

    @cached_property
    def questions(self) -> Questions:
        return Questions(self.recipe.evaluate.tasks, self.recipe.data_dir)

    @property
    def pool(self) -> ModelPool:
        """Loaded when a stage first needs it."""
        if self._pool is None:
            self._pool = ModelPool(self.recipe.model, self.recipe.device, self.recipe.dtype)
        return self._pool

    @cached_property
    def rounds(self) -> list[list[Training]]:
        """The students of every round; those of the first one share its trajectories."""
        found: list[list[Training]] = []
        for number in range(1, self.recipe.rounds + 1):
            now = []
            for place, (name, values) in enumerate(self.recipe.students.items()):
                full = name if self.recipe.rounds == 1 else f"{name}-round{number}"
                store = self.store if number == 1 else self.out / f"trajectories-{full}"
                now.append(Training(full, values, number, store, found[-1][place] if found else None))
            found.append(now)
        return found

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
        for one in _by_store(trainings):
            part = (one.round, self.recipe.rounds) if self.recipe.split_prompts else None
            recipe = self.recipe.collect_recipe(part=part)
            tasks = ", ".join(task.name for task in recipe.tasks)
            who = "the privileged teacher" if one.before is None else f"'{one.before.name}'"
            with self.listener.stage(f"Collect: {who} on {tasks}, one token per step"):
                teacher = self.pool.teacher(self._made(one.before))
                store = fill_store(teacher, recipe, one.store, self.listener)
                if store is None:
                    raise Stopped
                found = summarise(store)
                unaided = f", {found.unaided} without the reference" if found.unaided else ""
                self.listener.say(
                    f"{found.kept} trajectories kept of {found.attempted} rollouts ({found.correct} of {found.graded} graded ones "
                    f"right{unaided}); {found.forwards} forwards; mean length {found.mean_length:.0f} steps, teacher's mean "
                    f"confidence {found.mean_confidence:.3f}"
                )

    def _window(self, trainings: Sequence[Training]) -> None:
        for one in _by_store(trainings):
            self._need_store(one.store)
            with self.listener.stage(
                "Window: the student's confidence in the teacher's tokens by steps until their reveal"
            ):
                if (one.store / WINDOW).is_file():
                    report = read_report(one.store)
                else:
                    store, lm = TrajectoryStore.open(one.store), self.pool.teacher(self._made(one.before))
                    report = measure_window(lm, store, **self.recipe.window.model_dump())
                for line in (*show_decay(report)[:2], *explain_windows(report)):
                    self.listener.say(line)

    def _distill(self, trainings: Sequence[Training]) -> None:
        for one in trainings:
            self._need_store(one.store)
            self._need(one.store / WINDOW, "window")
            name, start = one.name, start_fields(self._made(one.before))
            recipe = self.recipe.distill_recipe(name, str(one.store), one.values, **start)
            out = self.student(name)
            with self.listener.stage(f"Distil '{name}': {describe_training(recipe)}"):
                if find_result(out) is not None:
                    _check_finished(out, recipe)
                    self.listener.say(f"trained before: {out}")
                    continue
                if (warning := warn_of_epochs(recipe, [TrajectoryStore.open(one.store)])) is not None:
                    self.listener.say(warning)
                steps = recipe.learning.steps
                outcome = self.pool.train(recipe, out, lambda step, n=steps: self.listener.step(step, n))  # type: ignore[misc]
                if not outcome.finished:
                    raise Stopped
                self.listener.say(describe_log(out))

    def _evaluate(self) -> None:
        tasks = self.recipe.evaluate.tasks
        for name, source in self._models():
            with self.listener.stage(f"Evaluate '{name}' on {len(self.questions.items)} problems"):
                lm = self.pool.base() if source is None else self.pool.trained(source)
                identity = Identity.of(lm)
                settings = [one for decoder in self._decoders(name) for one in self._settings(name, decoder)]
                for setting in {one.name: one for one in settings}.values():
                    title = None if source is None else name
                    evaluate(
                        lm,
                        self.recipe.eval_recipe(tasks, setting.decoder, setting.settings, title),
                        self.sweep(name) / setting.name,
                        self.listener.decoding(setting),
                        self.listener.stopping,
                        questions=self.questions,
                        identity=identity,
                    )
                    if self.listener.stopping():
                        raise Stopped
        write_table(self.table(), self.out / "tables")
        costs = [add_rounds(one.name, self._rounds_of(one)) for trainings in self.rounds for one in trainings]
        write_costs([cost for cost in costs if cost is not None], self.out / "tables")

    def _rounds_of(self, training: Training) -> list[tuple[int, Path]]:
        """The optimizer steps and the store of a training, and of those before it."""
        recipe = self.recipe.distill_recipe(training.name, str(training.store), training.values)
        before = [] if training.before is None else self._rounds_of(training.before)
        return [*before, (recipe.learning.steps or 0, training.store)]

    def _models(self) -> list[tuple[str, Path | None]]:
        """Name -> adapter or model, None for the base; in the order of the table."""
        found: list[tuple[str, Path | None]] = [("base", None)]
        found += [(one.name, self._made(one)) for trainings in self.rounds for one in trainings]
        return found + [(name, Path(path)) for name, path in self.recipe.adapters.items()]

    def _decoders(self, name: str) -> list[str]:
        return [FIRST, *self.recipe.decoders] if name == "base" else self.recipe.student_decoders

    def _settings(self, name: str, decoder: str) -> list[Setting]:
        """The runs of a model with a decoder, the one-token run first where it has one."""
        section = self.recipe.evaluate
        length = self.recipe.eval_recipe(section.tasks).gen_length
        found = section.plan(decoder, self.pool.family, length, {})
        return found if name == "base" or self.recipe.student_first else found[1:]

    def table(self) -> ResultTable:
        """The base, its decoders and the students, on the same problems, as `tad points` of the directories has them."""
        notes: list[str] = []
        students = [one.name for trainings in self.rounds for one in trainings]
        names = ("base", *students, *self.recipe.adapters)
        groups = group_runs(load_runs([self.sweep(name) for name in names], notes), notes)
        return tabulate(groups[0], self.recipe.tolerance, title=self.recipe.name)

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

    def _need_store(self, folder: Path) -> None:
        """A store that was stopped has its description, and not all of its shards."""
        self._need(folder / STORE, "collect")
        missing = TrajectoryStore.open(folder).missing()
        if missing:
            raise TadError(
                f"{folder}: {len(missing)} shards are still missing; run the stage 'collect' first"
            )

    def _check_window(self) -> None:
        """Refuse to pass over a window that was measured with other settings."""
        record = read_record(self.out)
        if not (self.store / WINDOW).is_file() or not record:
            return
        before = record["recipe"]["window"]
        for field, value in self.recipe.window.model_dump(mode="json", exclude={"batch_size"}).items():
            if before.get(field) != value:
                raise TadError(
                    f"{self.store / WINDOW}: was measured with window.{field}={before.get(field)!r}, the recipe now says "
                    f"{value!r}; use another --out directory"
                )


def _by_store(trainings: Sequence[Training]) -> list[Training]:
    """One of the trainings for each store."""
    return list({one.store: one for one in reversed(trainings)}.values())[::-1]


def run_chain(recipe: RunRecipe, out: str | Path, listener: Listener | None = None) -> bool:
    """Do what is missing of a chain; whether it came to the end."""
    return Chain(recipe, Path(out), listener).run()


def describe_training(recipe: DistillRecipe) -> str:
    """An objective and how long, in a few words."""
    settings = ", ".join(f"{key} {value}" for key, value in recipe.objective.settings.items())
    steps = (
        f"{recipe.learning.steps} steps" if recipe.learning.steps else f"{recipe.learning.epochs:g} epochs"
    )
    return f"{recipe.objective.name}{f' ({settings})' if settings else ''}, {steps} of {recipe.batch.size} states"


def warn_of_epochs(recipe: DistillRecipe, stores: Sequence[TrajectoryStore]) -> str | None:
    """A line where training would see every state of the stores a hundred times or more."""
    found = [stats for store in stores for _, stats in store.shards()]
    kept, steps, attempted = (
        sum(getattr(stats, name) for stats in found) for name in ("kept", "steps", "attempted")
    )
    epochs = recipe.count_epochs(kept, steps / max(1, attempted))
    if epochs < MANY_EPOCHS:
        return None
    return (
        f"WARNING: {recipe.learning.steps or epochs} steps of {recipe.batch.size} states are {epochs:.0f} epochs of {kept} "
        "trajectories; collect more, or set fewer learning.steps"
    )


def describe_log(out: Path) -> str:
    """How long a finished training took, and its first and last loss where it was long enough for them to differ by more
    than their batches do."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    took = f"{steps[-1]['step']} steps, {lines[-1]['seconds']:.0f} s"
    if len(steps) < 100:
        return took
    tenth = len(steps) // 10
    first = sum(line["loss"] for line in steps[:tenth]) / tenth
    last = sum(line["loss"] for line in steps[-tenth:]) / tenth
    return f"loss {first:.3f} -> {last:.3f}; {took}"


def _check_finished(out: Path, recipe: DistillRecipe) -> None:
    """A student that was trained with another recipe is not this one."""
    record = read_record(out)
    if not record:
        raise TadError(
            f"{out}: holds an adapter without {RECORD}; use another --out, or list it under 'adapters'"
        )
    before, now = (
        DistillRecipe.model_validate(record["recipe"]).content_hash_fields(),
        recipe.content_hash_fields(),
    )
    for field in before:
        if before[field] != now.get(field):
            raise TadError(
                f"{out}: was trained with {field}={before[field]!r}, the recipe now says {now.get(field)!r}; "
                "use another --out directory"
            )
