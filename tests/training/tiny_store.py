"""Made-up trajectories of the tiny models, in stores that pass for theirs; and a recipe that trains on them in seconds."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import tad
from tad.models import LLADA, Family
from tad.training.recipe import DistillRecipe
from tad.trajectories.store import Trajectory
from tad.trajectories.window_report import Decay, Window, WindowReport, write_report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_lm import write_checkpoint
from tiny_trajectory import make_meta, make_trajectory, write_rows

LENGTH = 16


def write_world(root: Path, family: Family = LLADA, count: int = 24) -> Path:
    """A base, a store of trajectories and one to hold out: root/base, root/train, root/held."""
    lm = tad.load(write_checkpoint(root / "base", family, scale=2.0), device="cpu")
    write_store(root / "train", lm, count, seed=1)
    write_store(root / "held", lm, 6, seed=2)
    return root


def write_store(folder: Path, lm: tad.LM, count: int, seed: int, **changes: Any) -> Path:
    draws = np.random.default_rng(seed)
    rows = [_trajectory(f"made-{seed}/{i}", lm.tokens.eos, draws) for i in range(count)]
    return write_rows(folder, rows, make_meta(lm, gen_length=LENGTH, examples=count, **changes))


def _trajectory(name: str, eos: int, draws: np.random.Generator) -> Trajectory:
    """Answers in few letters, so that something can be learned; revealed in any order, then filler."""
    real = int(draws.integers(6, LENGTH))
    plain = draws.integers(0, 250, draws.integers(5, 20)).tolist()
    return make_trajectory(
        name,
        plain_ids=plain,
        privileged_ids=[*plain, *draws.integers(0, 250, draws.integers(3, 9)).tolist()],
        tokens=[*draws.integers(0, 20, real).tolist(), *[eos] * (LENGTH - real)],
        reveal=[*(draws.permutation(real) + 1).tolist(), *range(real + 1, LENGTH + 1)],
        n_real=real,
    )


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


def stopped(run: Path, out: Path, *steps: int) -> Path:
    """A run as it was killed after these steps."""
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", out / f"checkpoint-{step}")
    return out


def read_log(run: Path, key: str = "loss") -> list[dict[str, Any]]:
    """The lines of a run's log that have a key."""
    found = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in found if key in line]


def same_weights(left: Path, right: Path, name: str = "adapter_model.safetensors") -> bool:
    """Whether two directories hold the same weights, bit for bit."""
    return bit_equal(load_file(left / name), load_file(right / name))


def bit_equal(left: Any, right: Any) -> bool:
    """Of nested checkpoints."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(bit_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(bit_equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)
