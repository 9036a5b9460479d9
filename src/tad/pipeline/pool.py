"""One base model in memory, lent to stage after stage: collecting, measuring the window, training, decoding.

Training puts an adapter into it and may round its copy of the weights, decoding adds the adapter to them. What comes back for
the next stage is the base as it was loaded, which its fingerprint proves, or it is loaded again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tad.errors import TadError
from tad.evaluation.run import Identity
from tad.models import LM, find_defaults, load, lora
from tad.models.checkpoint import Checkpoint
from tad.models.source import locate
from tad.pipeline.costs import write_cost
from tad.pipeline.listener import Listener, Stopped
from tad.runs.fingerprint import fingerprint_model, fingerprint_tokenizer
from tad.runs.record import LOG, MODEL
from tad.training.batches import warn_of_epochs
from tad.training.checkpoints import checkpoints
from tad.training.recipe import DistillRecipe
from tad.training.weights import detach
from tad.trajectories.recipe import CollectRecipe, WindowSection
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.summary import summarise
from tad.trajectories.window import measure_window
from tad.trajectories.window_report import WINDOW, explain_windows, read_report, show_decay
from tad.trajectories.workers import collect_here

if TYPE_CHECKING:
    from tad.training.distill import Outcome


class ModelPool:
    """See the module."""

    def __init__(self, model: str, device: str | None = None, dtype: str | None = None) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self._lm = load(model, device=device, dtype=dtype)
        self._precision, self._defaults = self._lm.dtype, self._lm.defaults
        self.own_dtype = str(Checkpoint.open(locate(model)).dtype).removeprefix("torch.")
        self.family = self._lm.family.name
        self.fingerprint = fingerprint_model(self._lm)
        self.tokenizer = fingerprint_tokenizer(self._lm)

    def base(self) -> LM:
        """The model without an adapter."""
        detach(self._lm)
        self._lm.model.to(self._precision).eval()
        if fingerprint_model(self._lm) != self.fingerprint:
            self._reload()
        self._lm.defaults = self._defaults
        return self._lm

    def student(self, adapter: Path) -> LM:
        """The model with an adapter from disk."""
        lm = self.base()
        lm.peft = lora.load_adapter(lm.model, lora.verify_adapter(adapter, lm.model, lm.family))
        lm.model.to(self._precision).eval()
        lm.adapter, lm.defaults = str(adapter), find_defaults(self.model, adapter)
        return lm

    def teacher(self, result: Path | None) -> LM:
        """What rolls out: the base, or what a training has left, an adapter in the weights."""
        if result is None or result.name == MODEL:
            return self.base() if result is None else self.trained(result)
        lm = self.base()
        lm.start_from(result)
        return lm

    def trained(self, result: Path) -> LM:
        """What a training has left: an adapter on the base, or a model trained whole, which is loaded beside it."""
        if result.name != MODEL:
            return self.student(result)
        return load(result, device=self.device, dtype=self.dtype)

    def decoded(self, result: Path | None) -> tuple[LM, Identity]:
        """What is evaluated, the base or what a training has left: an adapter in the weights, as `tad eval` has it, and whose
        answers they are."""
        lm = self.base() if result is None else self.trained(result)
        identity = Identity.of(lm)
        if lm.conversion is None:
            lm.merge()
        return lm, identity

    # Stages of a chain or a study. Each goes on where it was stopped, and raises `Stopped` where it is stopped again.

    def collect(self, recipe: CollectRecipe, out: Path, teacher: Path | None, listener: Listener) -> None:
        """Fill a store, and say what it cost. `teacher`: what the training has left that rolls out; None: the base."""
        who = "the privileged teacher" if teacher is None else f"'{teacher.parent.name}'"
        tasks = ", ".join(task.name for task in recipe.tasks)
        pace = "several tokens" if recipe.order == "parallel" else "one token"
        with listener.stage(f"Collect: {who} on {tasks}, {pace} per step"):
            store = collect_here(recipe, out, self.teacher(teacher), listener)
            if store.missing():
                raise Stopped
            found = summarise(store)
            if not found.kept:
                raise TadError(
                    f"{out}: not one trajectory was kept; collect with keep: all, or more examples"
                )
            if not found.pending:
                write_cost(out, found)
            unaided = f", {found.unaided} without the reference" if found.unaided else ""
            waiting = f", {found.pending} wait for a verdict" if found.pending else ""
            listener.say(
                f"{found.kept} trajectories kept of {found.attempted} rollouts ({found.correct} of {found.graded} graded ones "
                f"right{unaided}{waiting}); {found.forwards} forwards; mean length {found.mean_length:.0f} steps, teacher's mean "
                f"confidence {found.mean_confidence:.3f}"
            )

    def measure_window(
        self, section: WindowSection, folder: Path, teacher: Path | None, listener: Listener
    ) -> None:
        """Measure the window of a store, or say what it is."""
        with listener.stage(
            "Window: the student's confidence in the teacher's tokens by steps until their reveal"
        ):
            if (folder / WINDOW).is_file():
                report = read_report(folder)
            else:
                store = TrajectoryStore.open(folder)
                report = measure_window(self.teacher(teacher), store, **section.model_dump())
            for line in (*show_decay(report)[:2], *explain_windows(report)):
                listener.say(line)

    def train(self, recipe: DistillRecipe, out: Path, listener: Listener) -> Path:
        """The adapter or model of a training. Checkpoints of a finished one are removed."""
        with listener.stage(f"Distil '{recipe.name}': {describe_training(recipe)}"):
            stores = [TrajectoryStore.open(store) for store in recipe.trajectories]
            if (warning := warn_of_epochs(recipe, stores)) is not None:
                listener.say(warning)
            outcome = self._distill(recipe, out, listener)
            if not outcome.finished:
                raise Stopped
            for checkpoint in checkpoints(out):
                shutil.rmtree(checkpoint)
            listener.say(describe_log(out))
        return outcome.path

    def _distill(self, recipe: DistillRecipe, out: Path, listener: Listener) -> Outcome:
        """The listener hears about twenty steps, from where a training would evaluate."""
        # Here, since what trains takes most of a second to import, and a report trains nothing.
        from tad.training.distill import distill

        evaluate, steps = None, recipe.learning.steps
        if recipe.evaluation is None and not recipe.validation:
            recipe = recipe.model_copy(update={"validate_every": max(1, (steps or 400) // 20)})

            def evaluate(lm: LM, step: int) -> dict[str, float]:
                listener.step(step, steps)
                return {}

        # A student trained whole is started from as another model; an adapter is added by the training itself.
        lm = self.base() if recipe.model == self.model else self.trained(Path(recipe.model))
        outcome = distill(recipe, out, resume=bool(checkpoints(out)), evaluate=evaluate, lm=lm, quiet=True)
        if recipe.full or recipe.compile or recipe.gradient_checkpointing:  # what detaching does not undo
            self._reload()
        return outcome

    def _reload(self) -> None:
        del self._lm  # two would not fit
        self._lm = load(self.model, device=self.device, dtype=self.dtype)


def start_fields(result: Path | None) -> dict[str, str]:
    """The fields of a training that starts from what another has left."""
    if result is None:
        return {}
    return {"model" if result.name == MODEL else "start": str(result)}


def describe_training(recipe: DistillRecipe) -> str:
    """An objective and how long, in a few words."""
    settings = ", ".join(f"{key} {value}" for key, value in recipe.objective.settings.items())
    steps = (
        f"{recipe.learning.steps} steps" if recipe.learning.steps else f"{recipe.learning.epochs:g} epochs"
    )
    return f"{recipe.objective.name}{f' ({settings})' if settings else ''}, {steps} of {recipe.batch.size} states"


def describe_log(out: Path) -> str:
    """How long a finished training took, and its first and last loss where it was long enough for them to differ by more
    than their batches do."""
    lines = [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    took = f"{steps[-1]['step']} steps, {lines[-1]['seconds']:.0f} s"
    if len(steps) < 100:
        return took
    tenth = len(steps) // 10
    first = sum(line["loss"] for line in steps[:tenth]) / tenth
    last = sum(line["loss"] for line in steps[-tenth:]) / tenth
    return f"loss {first:.3f} -> {last:.3f}; {took}"
