"""The whole method for one checkpoint: trajectories, windows, students, evaluation, report. The work behind `tad run`.

    OUT/trajectories        the store, window.json and its picture
    OUT/students/NAME       a training run with its adapter
    OUT/evaluation/NAME     a sweep: 'base', and each student
    OUT/tables              the numbers beside each other
    OUT/report              the report, where it can be made

A stage that is complete is passed over, one that is not goes on where it was stopped, and one that belongs to another recipe
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tad.errors import TadError
from tad.evaluation.questions import Questions
from tad.evaluation.run import Identity, Report, evaluate
from tad.evaluation.study.numbers import Answers, read_numbers
from tad.evaluation.study.recipe import RunRecipe
from tad.evaluation.study.tables import Table, Wanted, make_table, write_table
from tad.evaluation.study.workbench import (
    WINDOW,
    Workbench,
    explain_windows,
    fill_store,
    find_result,
    measure_window,
    read_report,
)
from tad.evaluation.sweep import FIRST, Setting
from tad.files import create_folder, write_json, writing
from tad.training.recipe import DistillRecipe
from tad.training.record import RECORD, describe_machine
from tad.trajectories.store import META as STORE
from tad.trajectories.store import ShardStats, TrajectoryStore
from tad.trajectories.summary import summarise

STAGES = ("collect", "window", "distill", "evaluate", "report")


class Watch(Protocol):
    """Who is told how a chain or a study goes on, and may ask it to stop."""

    def say(self, line: str) -> None: ...

    def stage(self, title: str) -> AbstractContextManager[None]: ...

    def shard(self, shard: int, stats: ShardStats) -> None: ...

    def begin(self, setting: Setting) -> Report | None: ...

    def step(self, step: int, steps: int | None) -> None: ...

    def stopping(self) -> bool: ...


class Silent:
    """Nobody."""

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        yield

    def shard(self, shard: int, stats: ShardStats) -> None:
        pass

    def begin(self, setting: Setting) -> Report | None:
        return None

    def step(self, step: int, steps: int | None) -> None:
        pass

    def stopping(self) -> bool:
        return False


class Stopped(Exception):  # noqa: N818 - a request that was followed, not an error
    """The user asked for it; what is there is kept."""


class Chain:
    """A chain in a directory."""

    def __init__(self, recipe: RunRecipe, out: Path, watch: Watch | None = None, smoke: bool = False) -> None:
        """`smoke` marks every number of the report as smoke size."""
        recipe.check()
        self.smoke = smoke
        self.recipe, self.out, self.watch = recipe, Path(out), watch or Silent()
        self.store = self.out / "trajectories"
        self._bench: Workbench | None = None

    def run(self, stages: Sequence[str] = STAGES) -> bool:
        """Do what is missing of these stages; whether it came to the end."""
        unknown = next((name for name in stages if name not in STAGES), None)
        if unknown is not None:
            raise TadError(f"stage '{unknown}' is not known; known: {', '.join(STAGES)}")
        if "evaluate" in stages:
            self.questions.check_graders()  # now, and not after hours of training
        create_folder(self.out)
        with writing(self.out):
            self._check_window()
            self._record()
            try:
                for name in STAGES:
                    if name in stages:
                        getattr(self, f"_{name}")()
            except Stopped:
                return False
        return True

    @cached_property
    def questions(self) -> Questions:
        return Questions(self.recipe.evaluate.tasks, self.recipe.data_dir)

    @property
    def bench(self) -> Workbench:
        """Loaded when a stage first needs it."""
        if self._bench is None:
            self._bench = Workbench(self.recipe.model, self.recipe.device, self.recipe.dtype)
        return self._bench

    def student(self, name: str) -> Path:
        return self.out / "students" / name

    def sweep(self, name: str) -> Path:
        return self.out / "evaluation" / name

    # Stages

    def _collect(self) -> None:
        recipe = self.recipe.collect_recipe()
        tasks = ", ".join(task.name for task in recipe.tasks)
        with self.watch.stage(f"Collect: the privileged teacher on {tasks}, one token per step"):
            store = fill_store(self.bench.base(), recipe, self.store, self.watch.shard, self.watch.stopping)
            if store is None:
                raise Stopped
            found = summarise(store)
            self.watch.say(
                f"{found.kept} trajectories kept of {found.attempted} rollouts ({found.correct} of {found.graded} graded ones right); mean length "
                f"{found.mean_length:.0f} steps, teacher's mean confidence {found.mean_confidence:.3f}"
            )

    def _window(self) -> None:
        self._need_store()
        with self.watch.stage(
            "Window: the student's confidence in the teacher's tokens by steps until their reveal"
        ):
            if not (self.store / WINDOW).is_file():
                measure_window(self.bench.base(), TrajectoryStore.open(self.store), self.recipe.window)
            report = read_report(self.store)
            marks = [d for d in (1, 2, 4, 8, 16, 32, 48, 64, 128) if d <= len(report.decay.mean)]
            self.watch.say("steps      " + "".join(f"{d:>7d}" for d in marks))
            self.watch.say("confidence " + "".join(f"{report.decay.mean[d - 1]:>7.2f}" for d in marks))
            for line in explain_windows(report):
                self.watch.say(line)

    def _distill(self) -> None:
        self._need_store()
        self._need(self.store / WINDOW, "window")
        for name, values in self.recipe.students.items():
            recipe = self.recipe.distill_recipe(name, str(self.store), values)
            out = self.student(name)
            with self.watch.stage(f"Distil '{name}': {describe_training(recipe)}"):
                if find_result(out) is not None:
                    _check_finished(out, recipe)
                    self.watch.say(f"trained before: {out}")
                    continue
                steps = recipe.learning.steps
                outcome = self.bench.train(recipe, out, lambda step, n=steps: self.watch.step(step, n))  # type: ignore[misc]
                if not outcome.finished:
                    raise Stopped
                self.watch.say(describe_log(out))

    def _evaluate(self) -> None:
        recipe, section = self.recipe, self.recipe.evaluate
        asked = recipe.eval_recipe(section.tasks)
        questions = self.questions
        for name, source in self._models():
            with self.watch.stage(f"Evaluate '{name}' on {len(questions.items)} problems"):
                lm = self.bench.base() if source is None else self.bench.trained(source)
                identity = Identity.of(lm)
                settings = [one for decoder in self._decoders(name) for one in self._settings(name, decoder)]
                for setting in {one.name: one for one in settings}.values():
                    evaluate(
                        lm,
                        asked.model_copy(update={"decoder": setting.decoder, "settings": setting.settings}),
                        self.sweep(name) / setting.name,
                        self.watch.begin(setting),
                        self.watch.stopping,
                        questions=questions,
                        identity=identity,
                    )
                    if self.watch.stopping():
                        raise Stopped
        table = self.table()
        write_table(table, self.out / "tables")

    def _models(self) -> list[tuple[str, Path | None]]:
        """Name -> adapter or model, None for the base; in the order of the table."""
        found: list[tuple[str, Path | None]] = [("base", None)]
        for name in self.recipe.students:
            result = find_result(self.student(name))
            if result is None:
                raise TadError(f"{self.student(name)}: is not trained yet; run the stage 'distill' first")
            found.append((name, result))
        return found + [(name, Path(path)) for name, path in self.recipe.adapters.items()]

    def _decoders(self, name: str) -> list[str]:
        return [FIRST, *self.recipe.decoders] if name == "base" else self.recipe.student_decoders

    def _settings(self, name: str, decoder: str) -> list[Setting]:
        """The runs of a model with a decoder, the one-token run first where it has one."""
        section = self.recipe.evaluate
        length = self.recipe.eval_recipe(section.tasks).gen_length
        found = section.plan(decoder, self.bench.family, length, {})
        return found if name == "base" or self.recipe.student_first else found[1:]

    def table(self) -> Table:
        """The base, its decoders and the students, on the same problems."""
        found = []
        for name in ("base", *self.recipe.students, *self.recipe.adapters):
            for decoder in self._decoders(name):
                settings = self._settings(name, decoder)
                runs = [read_numbers(self.sweep(name) / setting.name) for setting in settings]
                title = name if decoder == FIRST else f"{name}, {decoder}"
                found.append(Answers(title, settings, [None], [runs]))
        wanted = [Wanted(one.name, one.name, one, 1) for one in found]
        rival = next((one for one in found if one.name == "base, fast-dllm"), None)
        return make_table("main", self.recipe.name, wanted, found[0], rival, self.bench.family, 1.5)

    def _report(self) -> None:
        with self.watch.stage("Report"):
            path = make_report(
                [self.out], self.out / "report" / "report.html", self.recipe.name, self.watch.say, self.smoke
            )
            self.watch.say(f"report: {path}")

    # Bookkeeping

    def _need(self, path: Path, stage: str) -> None:
        if not path.is_file():
            raise TadError(f"{path}: missing; run the stage '{stage}' first")

    def _need_store(self) -> None:
        """A store that was stopped has its description, and not all of its shards."""
        self._need(self.store / STORE, "collect")
        missing = TrajectoryStore.open(self.store).missing()
        if missing:
            raise TadError(
                f"{self.store}: {len(missing)} shards are still missing; run the stage 'collect' first"
            )

    def _check_window(self) -> None:
        """Refuse to pass over a window that was measured with other settings."""
        path = self.out / RECORD
        if not (self.store / WINDOW).is_file() or not path.is_file():
            return
        before = json.loads(path.read_text(encoding="utf-8"))["recipe"]["window"]
        for field, value in self.recipe.window.model_dump(mode="json", exclude={"batch_size"}).items():
            if before.get(field) != value:
                raise TadError(
                    f"{self.store / WINDOW}: was measured with window.{field}={before.get(field)!r}, the recipe now says "
                    f"{value!r}; use another --out directory"
                )

    def _record(self) -> None:
        path = self.out / RECORD
        record: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"calls": []}
        )
        record["recipe"] = self.recipe.model_dump(mode="json")
        record["calls"].append(describe_machine())
        write_json(path, record)


def run_chain(recipe: RunRecipe, out: str | Path, watch: Watch | None = None) -> bool:
    """Do what is missing of a chain; whether it came to the end."""
    return Chain(recipe, Path(out), watch).run()


def make_report(
    folders: Sequence[Path], out: Path, title: str, say: Callable[[str], None], smoke: bool = False
) -> Path:
    """The HTML report of everything in the folders."""
    from tad.evaluation.report import write_report

    return Path(write_report([*folders], out, title, smoke, say=say).page)


def describe_training(recipe: DistillRecipe) -> str:
    """An objective and how long, in a few words."""
    settings = ", ".join(f"{key} {value}" for key, value in recipe.objective.settings.items())
    steps = (
        f"{recipe.learning.steps} steps" if recipe.learning.steps else f"{recipe.learning.epochs:g} epochs"
    )
    return f"{recipe.objective.name}{f' ({settings})' if settings else ''}, {steps} of {recipe.batch.size} states"


def describe_log(out: Path) -> str:
    """First and last loss of a finished training, and how long it took."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    tenth = max(1, len(steps) // 10)
    first = sum(line["loss"] for line in steps[:tenth]) / tenth
    last = sum(line["loss"] for line in steps[-tenth:]) / tenth
    return f"loss {first:.3f} -> {last:.3f} over {steps[-1]['step']} steps, {lines[-1]['seconds']:.0f} s"


def _check_finished(out: Path, recipe: DistillRecipe) -> None:
    """A student that was trained with another recipe is not this one."""
    path = out / RECORD
    if not path.is_file():
        raise TadError(
            f"{out}: holds an adapter without {RECORD}; use another --out, or list it under 'adapters'"
        )
    values = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    before, now = DistillRecipe.model_validate(values).content_hash_fields(), recipe.content_hash_fields()
    for field in before:
        if before[field] != now.get(field):
            raise TadError(
                f"{out}: was trained with {field}={before[field]!r}, the recipe now says {now.get(field)!r}; "
                "use another --out directory"
            )
