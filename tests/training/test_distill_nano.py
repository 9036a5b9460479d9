"""On a model that knows something: training on a few trajectories carries over to others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tad
from tad.config import load_recipe
from tad.training.distill import distill
from tad.training.distill_recipe import DistillRecipe
from tad.trajectories.recipe import CollectRecipe, TaskSection
from tad.trajectories.workers import collect_here


def held_out(root: Path, count: int, steps: int, size: int) -> list[dict[str, float]]:
    """Held-out numbers before and after a short run of the bundled nano recipe."""
    lm = tad.load("nano-llada", device="cpu")
    for name, split, limit in (("train", "train", count), ("held", "test", max(4, count // 4))):
        asked = CollectRecipe(
            model="nano-llada", tasks=[TaskSection(name="nano-math", split=split, limit=limit)], gen_length=96,
            keep="all", cache="dual", shard_size=count, batch_size=count,
        )  # fmt: skip
        collect_here(asked, root / name, lm)
    changes = [
        f"trajectories=[{root / 'train'}]", f"validation=[{root / 'held'}]", "objective.window=8", "states=4",
        f"learning.steps={steps}", f"batch={{size: {size}, micro: {size}}}", "device=cpu", "report_to=[]",
        "adapter.dropout=0.0",
    ]  # fmt: skip
    distill(load_recipe(DistillRecipe, "nano-llada-quality", changes), root / "run", lm=lm, quiet=True)
    lines = [json.loads(line) for line in (root / "run" / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "held_out_loss" in line]


def test_a_few_steps_lower_both_losses_on_held_out_trajectories(tmp_path: Path) -> None:
    before, after = held_out(tmp_path, count=8, steps=8, size=8)
    assert after["held_out_loss_near"] < before["held_out_loss_near"]
    assert after["held_out_loss_distant"] < before["held_out_loss_distant"]


@pytest.mark.slow
def test_training_makes_the_student_surer_of_near_tokens(tmp_path: Path) -> None:
    before, after = held_out(tmp_path, count=64, steps=80, size=16)
    for name in ("loss_near", "loss_distant"):
        assert after[f"held_out_{name}"] < 0.8 * before[f"held_out_{name}"]
    assert after["held_out_near_confidence"] > before["held_out_near_confidence"]
