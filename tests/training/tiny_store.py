"""Made-up trajectories of the tiny models, in stores that pass for theirs; and a recipe that trains on them in seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tad
from tad.models import LLADA, Family
from tad.training.recipe import DistillRecipe
from tad.trajectories.fingerprint import fingerprint_model, fingerprint_tokenizer
from tad.trajectories.store import ShardStats, StoreMeta, Trajectory, TrajectoryStore
from tad.trajectories.window import Decay, Window, WindowReport, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_lm import write_checkpoint

LENGTH = 16


def write_world(root: Path, family: Family = LLADA, count: int = 24) -> Path:
    """A base, a store of trajectories and one to hold out: root/base, root/train, root/held."""
    lm = tad.load(write_checkpoint(root / "base", family, scale=2.0), device="cpu")
    write_store(root / "train", lm, count, seed=1)
    write_store(root / "held", lm, 6, seed=2)
    return root


def write_store(folder: Path, lm: tad.LM, count: int, seed: int, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "model": fingerprint_model(lm), "tokenizer": fingerprint_tokenizer(lm), "family": lm.family.name,
        "mask_token": lm.tokens.mask, "eos_token": lm.tokens.eos, "ends": list(lm.tokens.ends),
        "gen_length": LENGTH, "examples": count, "shards": 1, **changes,
    }  # fmt: skip
    store = TrajectoryStore.open_or_create(folder, StoreMeta(**values))
    draws = np.random.default_rng(seed)
    rows = [_trajectory(f"made-{seed}/{i}#0", lm.tokens.eos, draws) for i in range(count)]
    store.write(0, rows, ShardStats(count, count, count, {}, 0, 0, {}))
    return folder


def _trajectory(name: str, eos: int, draws: np.random.Generator) -> Trajectory:
    """Answers in few letters, so that something can be learned; revealed in any order, then filler."""
    real = int(draws.integers(6, LENGTH))
    plain = draws.integers(0, 250, draws.integers(5, 20)).tolist()
    return Trajectory(
        id=name, task="made", example=name, sample=0, level=None, seed=0, plain_ids=plain,
        privileged_ids=[*plain, *draws.integers(0, 250, draws.integers(3, 9)).tolist()],
        tokens=[*draws.integers(0, 20, real).tolist(), *[eos] * (LENGTH - real)],
        reveal=[*(draws.permutation(real) + 1).tolist(), *range(real + 1, LENGTH + 1)], n_real=real,
        teacher_confidence=[1.0] * LENGTH, student_confidence=[1.0] * LENGTH, correct=True, reason="",
        extracted=None, reference="gold",
    )  # fmt: skip


def write_window(folder: Path, name: str, window: int) -> None:
    """What `tad window` leaves in a store."""
    decay = Decay([0.9], [0.9], [0.9], [1], 1, 1, False)
    measured = Window(0.5, float(window), window, window, window)
    write_report(WindowReport("teacher", "m", decay, decay, {name: measured}), folder)


def recipe(root: Path, **changes: Any) -> DistillRecipe:
    """Six steps of 8 states; `changes` replace sections."""
    values: dict[str, Any] = {
        "name": "tiny", "model": str(root / "base"), "trajectories": [str(root / "train")],
        "objective": {"name": "tad", "window": 4}, "states": 4, "adapter": {"rank": 4, "dropout": 0.1},
        "learning": {"lr": 1e-2, "steps": 6}, "batch": {"size": 8, "micro": 4}, "save_every": 2, "keep": 9,
        "report_to": [], "device": "cpu", **changes,
    }  # fmt: skip
    if values.get("full"):
        values.pop("adapter")
    return DistillRecipe.model_validate(values)
