"""One base model in memory, lent to stage after stage: collecting, measuring the window, training, decoding.

The base is loaded once. Training puts an adapter into it and may round its copy of the weights; what comes back for the
next stage is the base as it was loaded, which its fingerprint proves, or it is loaded again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tad.errors import TadError
from tad.evaluation.study.costs import write_cost
from tad.models import LM, find_defaults, load, lora
from tad.models.checkpoint import Checkpoint
from tad.models.source import locate
from tad.training.checkpoints import checkpoints
from tad.training.distill import ADAPTER, MODEL, Outcome, distill
from tad.training.recipe import DistillRecipe
from tad.training.weights import detach
from tad.trajectories.collect import CollectListener
from tad.trajectories.fingerprint import fingerprint_model, fingerprint_tokenizer
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.workers import collect_here


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

    def train(
        self, recipe: DistillRecipe, out: Path, on_step: Callable[[int], None] | None = None
    ) -> Outcome:
        """Train, or go on where a run was stopped. Checkpoints of a finished run are removed.

        `on_step` is called about twenty times on the way, from where a training would evaluate.
        """
        evaluate = None
        if on_step is not None and recipe.evaluation is None and not recipe.validation:
            every = max(1, (recipe.learning.steps or 400) // 20)
            recipe = recipe.model_copy(update={"validate_every": every})

            def evaluate(lm: LM, step: int) -> dict[str, float]:
                on_step(step)
                return {}

        # A student trained whole is started from as another model; an adapter is added by the training itself.
        lm = self.base() if recipe.model == self.model else self.trained(Path(recipe.model))
        outcome = distill(recipe, out, resume=bool(checkpoints(out)), evaluate=evaluate, lm=lm, quiet=True)
        if outcome.finished:
            for checkpoint in checkpoints(out):
                shutil.rmtree(checkpoint)
        if recipe.full or recipe.compile or recipe.gradient_checkpointing:  # what detaching does not undo
            self._reload()
        return outcome

    def _reload(self) -> None:
        self._lm = load(self.model, device=self.device, dtype=self.dtype)


def start_fields(result: Path | None) -> dict[str, str]:
    """The fields of a training that starts from what another has left."""
    if result is None:
        return {}
    return {"model" if result.name == MODEL else "start": str(result)}


def find_result(out: Path) -> Path | None:
    """The adapter or model of a finished training; None before that."""
    return next((out / name for name in (ADAPTER, MODEL) if (out / name).is_dir()), None)


def fill_store(
    lm: LM,
    recipe: CollectRecipe,
    out: Path,
    listener: CollectListener | None = None,
) -> TrajectoryStore | None:
    """Collect what is missing, and say what it cost; None where it was stopped before the end."""
    store = collect_here(recipe, out, lm, listener)
    if store.missing():
        return None
    if not any(stats.kept for _, stats in store.shards()):
        raise TadError(f"{out}: not one trajectory was kept; collect with keep: all, or more examples")
    write_cost(store)
    return store
