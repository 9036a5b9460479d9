"""One base model in memory, lent to stage after stage: collecting, measuring the window, training, decoding.

The base is loaded once. Training puts an adapter into it and may round its copy of the weights; what comes back for the
next stage is the base as it was loaded, which its fingerprint proves, or it is loaded again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tad.errors import TadError
from tad.evaluation.study.recipe import WindowSection
from tad.models import LM, load, lora
from tad.models.checkpoint import Checkpoint, locate
from tad.training.checkpoints import checkpoints
from tad.training.distill import ADAPTER, MODEL, Evaluate, Outcome, distill
from tad.training.recipe import DistillRecipe
from tad.training.weights import detach
from tad.trajectories.collect import Report
from tad.trajectories.fingerprint import fingerprint_model, fingerprint_tokenizer
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.store import Trajectory, TrajectoryStore
from tad.trajectories.summary import plot_decay
from tad.trajectories.window import (
    Decay,
    Window,
    WindowReport,
    choose_windows,
    measure_decay,
    write_report,
)
from tad.trajectories.workers import collect_here

WINDOW = "window.json"


class Workbench:
    """See the module."""

    def __init__(self, model: str, device: str | None = None, dtype: str | None = None) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self._lm = load(model, device=device, dtype=dtype)
        self._precision = self._lm.dtype
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
        return self._lm

    def student(self, adapter: Path) -> LM:
        """The model with an adapter from disk."""
        lm = self.base()
        folder = lora.locate_adapter(adapter)
        lm.peft = lora.load_adapter(lm.model, lm.family, folder)
        lm.model.to(self._precision).eval()
        lm.adapter = str(adapter)
        return lm

    def trained(self, result: Path) -> LM:
        """What a training has left: an adapter on the base, or a model trained whole, which is loaded beside it."""
        if result.name != MODEL:
            return self.student(result)
        return load(result, device=self.device, dtype=self.dtype)

    def train(self, recipe: DistillRecipe, out: Path, tell: Callable[[int], None] | None = None) -> Outcome:
        """Train, or go on where a run was stopped. Checkpoints of a finished run are removed.

        `tell` hears of about twenty steps on the way.
        """
        evaluate: Evaluate | None = None
        if tell is not None and recipe.evaluation is None and not recipe.validation:
            recipe = recipe.model_copy(
                update={"validate_every": max(1, (recipe.learning.steps or 400) // 20)}
            )
            evaluate = _Teller(tell)
        outcome = distill(
            recipe, out, resume=bool(checkpoints(out)), evaluate=evaluate, lm=self.base(), quiet=True
        )
        if outcome.finished:
            for checkpoint in checkpoints(out):
                shutil.rmtree(checkpoint)
        if recipe.full or recipe.compile or recipe.gradient_checkpointing:  # what detaching does not undo
            self._reload()
        return outcome

    def _reload(self) -> None:
        self._lm = load(self.model, device=self.device, dtype=self.dtype)


class _Teller:
    """Passes on which step a training has come to, from where it would evaluate."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell

    def __call__(self, lm: LM, step: int) -> dict[str, float]:
        self.tell(step)
        return {}


def find_result(out: Path) -> Path | None:
    """The adapter or model of a finished training; None before that."""
    return next((out / name for name in (ADAPTER, MODEL) if (out / name).is_dir()), None)


def fill_store(
    lm: LM,
    recipe: CollectRecipe,
    out: Path,
    report: Report | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> TrajectoryStore | None:
    """Collect what is missing; None where it was stopped before the end."""
    store = collect_here(recipe, out, lm, report, stopping)
    if store.missing():
        return None
    if not any(stats.kept for _, stats in store.shards()):
        raise TadError(f"{out}: not one trajectory was kept; collect with keep: all, or more examples")
    return store


def spread_rows(store: TrajectoryStore, limit: int) -> list[Trajectory]:
    """At most `limit` trajectories at equal distances over the store, whose tasks stand one after the other."""
    rows = list(store.rows())
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(limit, len(rows))).round().astype(int))
    return [rows[index] for index in chosen]


def measure_window(lm: LM, store: TrajectoryStore, section: WindowSection) -> WindowReport:
    """Measure the decay on trajectories from all over the store, and write window.json and its picture beside them."""
    rows = spread_rows(store, section.limit)
    distances = section.distances or max(2, store.meta.gen_length // 2)
    decay, filled, sums = measure_decay(lm, rows, section.states, distances, section.batch_size)
    order = str(store.meta.recipe.get("order", "teacher"))
    report = WindowReport(order, store.meta.model, decay, filled, choose_windows(decay, sums))
    plot_decay(report, store.folder / "window")
    write_report(report, store.folder)  # last: its presence says that the stage is complete
    return report


def explain_windows(report: WindowReport) -> list[str]:
    """A line per window: where the curve falls to its level, or that it does not and what stands in."""
    lines = []
    for name, window in report.windows.items():
        if math.isnan(window.crossing):
            lines.append(
                f"{name} window {window.window}: confidence does not fall to {window.level} within the {window.window} steps "
                f"that were measured (it is {report.decay.mean[-1]:.2f} there), so all of those count as near"
            )
        else:
            lines.append(
                f"{name} window {window.window}: confidence falls to {window.level} after {window.crossing:.1f} steps "
                f"(95 %: {window.low:.1f} to {window.high:.1f})"
            )
    sizes = [window.window for window in report.windows.values()]
    if len(set(sizes)) < len(sizes):
        lines.append("the windows are equal, so students that differ in them alone are the same student")
    return lines


def read_report(folder: Path) -> WindowReport:
    """What `measure_window` wrote."""
    values = json.loads((folder / WINDOW).read_text(encoding="utf-8"))
    decays = [Decay(**values[name]) for name in ("decay", "with_filler")]
    windows = {}
    for name, entry in values["windows"].items():
        with_nan: dict[str, Any] = {key: math.nan if value is None else value for key, value in entry.items()}
        windows[name] = Window(**with_nan)
    return WindowReport(values["order"], values["model"], decays[0], decays[1], windows)
