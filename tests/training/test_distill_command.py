"""`tad distill` and its bundled recipes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_store import recipe
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.config import bundled_recipes, load_recipe
from tad.evaluation.quick import quick_evaluation
from tad.models import DREAM, LLADA
from tad.training.distill import build_objective
from tad.training.recipe import DistillRecipe

DISTILL = sorted(
    name
    for name in bundled_recipes()
    if not name.startswith(("collect", "convert", "drafter", "pretrain", "run-", "study-"))
)


@pytest.fixture
def file(world: Path, tmp_path: Path) -> str:
    """A recipe of the tiny world."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(world).model_dump(mode="json", exclude_unset=True)))
    return str(path)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["distill", *words, "--quiet"])


def test_the_command_trains_stops_and_says_how_to_go_on(file: str, world: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = call(file, "learning.steps=3", "--out", str(out), "--stop-at", "2")
    assert done.exit_code == 0, done.output
    assert f"go on with: tad distill {file} learning.steps=3 --out {out} --resume" in done.output
    done = call(file, "learning.steps=3", "--out", str(out), "--resume")
    assert done.exit_code == 0, done.output
    assert f"adapter: {out / 'adapter'}" in done.output
    assert tad.load(world / "base", adapter=out / "adapter", device="cpu").peft is not None


def test_stores_given_as_options_take_the_place_of_the_recipe_s(
    file: str, world: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    held = str(world / "held")
    done = call(file, "learning.steps=1", "--out", str(out), "--trajectories", held, "--validation", held)
    assert done.exit_code == 0, done.output
    record = json.loads((out / "run.json").read_text())
    assert record["recipe"]["trajectories"] == record["recipe"]["validation"] == [held]


def test_ctrl_c_saves_and_exits_as_shells_expect(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(lm: tad.LM, step: int) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    monkeypatch.setattr("tad.evaluation.quick.quick_evaluation", lambda recipe: interrupt)
    done = call(file, "validate_every=1", "--out", str(tmp_path / "run"))
    assert done.exit_code == 130
    assert "stopped after step 2 of 6; go on with: tad distill" in done.output
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_quick_evaluation_decodes_and_grades(world: Path) -> None:
    asked = {"tasks": ["nano-math"], "every": 1, "limit": 2, "gen_length": 32, "settings": {"block": 32}}
    values = recipe(world, evaluation=asked)
    evaluate = quick_evaluation(values)
    assert evaluate is not None
    for model in (world / "base", "nano-fast-dllm-v2"):  # each with a decoder that it can be decoded with
        found = evaluate(tad.load(model, device="cpu"), 1)
        assert 0 <= found["nano-math_accuracy"] <= 1
        assert found["nano-math_tpf"] > 0
    assert quick_evaluation(recipe(world)) is None


@pytest.mark.parametrize("name", DISTILL)
def test_bundled_recipes_name_themselves_and_their_objectives_exist(name: str) -> None:
    values = load_recipe(DistillRecipe, name)
    assert values.name == name
    assert values.batch.size % values.batch.micro == 0
    settings = values.objective.settings
    if settings.get("window") in ("quality", "speed"):
        assert name.endswith((settings["window"], "ltr"))
        values = load_recipe(DistillRecipe, name, ["objective.window=5"])
    lm: Any = SimpleNamespace(
        tokens=SimpleNamespace(mask=9),
        family=DREAM if "dream" in name else LLADA,
        model=SimpleNamespace(shape=SimpleNamespace(blocks=None)),
    )
    objective = build_objective(values, lm)
    assert objective.logit_shift == lm.family.logit_shift
    assert objective.uses_steps or values.states != "all"


@pytest.mark.parametrize(
    ("name", "window"),
    [("llada-quality", 8), ("llada-speed", 20), ("dream-quality", 6), ("dream-speed", 12)],
)
def test_the_paper_s_recipes_have_the_paper_s_values(name: str, window: int) -> None:
    values = load_recipe(DistillRecipe, name)
    adapter, learning = values.adapter, values.learning
    assert (adapter.rank, adapter.alpha, adapter.dropout) == (128, 128, 0.05)
    assert (learning.lr, learning.schedule, learning.warmup, learning.weight_decay, learning.clip) == (
        2e-5, "constant", 0, 0.01, 1.0,
    )  # fmt: skip
    assert (values.batch.size, learning.epochs, learning.steps, values.precision) == (256, 1, None, "bf16")
    assert (values.states, values.filler_states) == ("all", True)
    assert values.objective.settings == {"window": window, "lambda": 1.0, "tau": 1.0}
    lean = load_recipe(DistillRecipe, f"{name}-lean")
    assert (lean.states, lean.objective, lean.learning, lean.adapter) == (
        8, values.objective, learning, adapter,
    )  # fmt: skip
