"""Training carries over: on trajectories that were held out, both losses fall and the student becomes surer of near tokens.

The world is a table: a prompt is four letters of noise and a key, the answer is the key's row, and the reference is that row
itself. A tiny base is trained for a few seconds, mostly with the reference in sight, so that it knows the table only half.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_store import read_log, recipe, write_checkpoint

import tad
from tad.config import load_recipe
from tad.training.distill import distill
from tad.training.recipe import DistillRecipe
from tad.trajectories.recipe import CollectRecipe, TaskSection
from tad.trajectories.rollout import RolloutConfig, roll_out
from tad.trajectories.workers import collect_here
from tiny_trajectory import make_meta, make_trajectory, write_rows

KEYS, LENGTH = 12, 8
TABLE = np.random.default_rng(5).integers(40, 60, (KEYS, LENGTH))


def prompts(count: int, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Plain prompts [count, 5] and the keys they ask for."""
    keys = draws.integers(0, KEYS, count)
    return np.concatenate([draws.integers(60, 200, (count, 4)), keys[:, None]], axis=1), keys


def train_base(folder: Path, steps: int = 400) -> tad.LM:
    lm = tad.load(write_checkpoint(folder, scale=2.0), device="cpu")
    optimizer = torch.optim.Adam(lm.model.parameters(), lr=3e-3)
    draws = np.random.default_rng(0)
    lm.model.train()
    for _ in range(steps):
        plain, keys = prompts(32, draws)
        shown = np.concatenate([plain, TABLE[keys]], axis=1) if draws.random() < 0.8 else plain
        ids = torch.from_numpy(np.concatenate([shown, TABLE[keys]], axis=1))
        masked = torch.zeros(ids.shape, dtype=torch.bool)
        masked[:, shown.shape[1] :] = torch.from_numpy(draws.random((32, LENGTH)) < draws.random((32, 1)))
        noisy = ids.masked_fill(masked, lm.tokens.mask)
        shift = lm.family.logit_shift
        logits = lm.model(noisy).logits[:, : ids.shape[1] - shift]
        loss = F.cross_entropy(logits[masked[:, shift:]], ids[:, shift:][masked[:, shift:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    lm.model.eval().save_pretrained(folder)
    return lm


def roll(lm: tad.LM, folder: Path, count: int, seed: int) -> Path:
    """A store of the base's own privileged rollouts."""
    plain, keys = prompts(count, np.random.default_rng(seed))
    shown = np.concatenate([plain, TABLE[keys]], axis=1)
    with torch.inference_mode():
        rollouts = roll_out(
            lm, shown.tolist(), plain.tolist(), LENGTH, RolloutConfig(block=LENGTH, stop_at_end=False)
        )
    right = np.mean(
        [rollout.tokens == TABLE[key].tolist() for rollout, key in zip(rollouts, keys, strict=True)]
    )
    assert right > 0.9  # with the reference in sight the teacher copies
    rows = [
        make_trajectory(
            f"{seed}/{i}", plain_ids=plain[i].tolist(), privileged_ids=shown[i].tolist(), tokens=rollout.tokens,
            reveal=rollout.reveal, n_real=rollout.n_real,
        )
        for i, rollout in enumerate(rollouts)
    ]  # fmt: skip
    return write_rows(folder, rows, make_meta(lm, gen_length=LENGTH, examples=count))


def held_out(run: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The numbers before and after training."""
    found = read_log(run, "held_out_loss")
    return found[0], found[-1]


def test_both_losses_fall_and_confidence_rises_on_held_out_trajectories(tmp_path: Path) -> None:
    lm = train_base(tmp_path / "base")
    train, held = roll(lm, tmp_path / "train", 96, seed=1), roll(lm, tmp_path / "held", 32, seed=2)
    values = recipe(
        tmp_path, trajectories=[str(train)], validation=[str(held)], objective={"name": "tad", "window": 3},
        adapter={"rank": 8, "dropout": 0.0}, learning={"lr": 3e-3, "steps": 25}, batch={"size": 32, "micro": 32},
        save_every=1000,
    )  # fmt: skip
    distill(values, tmp_path / "run", lm=lm, quiet=True)
    before, after = held_out(tmp_path / "run")
    assert after["held_out_loss_near"] < 0.8 * before["held_out_loss_near"]
    assert after["held_out_loss_distant"] < 0.8 * before["held_out_loss_distant"]
    assert after["held_out_near_confidence"] > before["held_out_near_confidence"] + 0.05


@pytest.mark.slow
def test_a_short_run_of_the_nano_recipe_makes_the_student_surer_of_near_tokens(tmp_path: Path) -> None:
    lm = tad.load("nano-llada", device="cpu")
    for name, split, limit in (("train", "train", 40), ("held", "test", 12)):
        asked = CollectRecipe(
            model="nano-llada", tasks=[TaskSection(name="nano-math", split=split, limit=limit)], gen_length=96,
            cache="dual", shard_size=40, batch_size=40,
        )  # fmt: skip
        collect_here(asked, tmp_path / name, lm)
    changes = [
        f"trajectories=[{tmp_path / 'train'}]", f"validation=[{tmp_path / 'held'}]", "objective.window=8",
        "learning.steps=24", "batch={size: 16, micro: 16}", "device=cpu", "report_to=[]",
    ]  # fmt: skip
    distill(load_recipe(DistillRecipe, "nano-llada-quality", changes), tmp_path / "run", lm=lm, quiet=True)
    before, after = held_out(tmp_path / "run")
    assert after["held_out_loss_near"] < before["held_out_loss_near"]
    assert after["held_out_near_confidence"] > before["held_out_near_confidence"]
