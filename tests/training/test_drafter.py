"""From a converted model to a drafter: its own generations, the acceptance curve, and training on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_autoregressive import write_autoregressive
from tiny_store import bit_equal, read_log
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.config import load_recipe
from tad.errors import TadError
from tad.models import AttentionMask, BlockLayout
from tad.models.attention import open_block
from tad.training.convert import convert, plan
from tad.training.distill import distill
from tad.training.recipe import ConvertRecipe, DistillRecipe
from tad.trajectories.acceptance import accepted_drafts
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.rollout import RolloutConfig
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window import measure_window
from tad.trajectories.window_report import read_report, show_decay

BLOCK = 4
COLLECT = (
    "gen_length=16",
    "block=16",
    "order=left-to-right",
    "privileged=false",
    "keep=all",
    "shard_size=4",
    "device=cpu",
)


def collect(root: Path, model: str, out: str, *changes: str) -> Any:
    recipe = root / "collect.yaml"
    recipe.write_text(
        json.dumps(
            {"model": "?", "tasks": [{"name": "jsonl", "options": {"path": str(root / "rows.jsonl")}}]}
        )
    )
    words = ["collect", str(recipe), f"model={root / model}", *COLLECT, *changes, "--out", str(root / out)]
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parent, its conversion, and a store of generations of each."""
    root = tmp_path_factory.mktemp("world")
    write_autoregressive(root / "parent")
    rows = [{"question": f"{a} plus {b}?", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "name": "tiny", "model": str(root / "parent"), "data": [{"source": str(root / "rows.jsonl")}], "block": BLOCK,
        "objective": {"name": "causal-blocks"}, "adapter": {"rank": 4, "dropout": 0.0}, "held_out": 0, "report_to": [],
        "learning": {"lr": 1e-2, "steps": 2}, "batch": {"size": 4, "micro": 4}, "device": "cpu",
    }  # fmt: skip
    convert(ConvertRecipe.model_validate(values), root / "converted", quiet=True)
    for model, out in (("parent", "of-parent"), ("converted", "of-converted")):
        found = collect(root, model, out)
        assert found.exit_code == 0, (found.output, found.exception)
    return root


def recipe(world: Path, **changes: Any) -> DistillRecipe:
    values: dict[str, Any] = {
        "name": "tiny", "model": str(world / "converted"), "trajectories": [str(world / "of-converted")],
        "objective": {"name": "causal-blocks", "window": 2, "least": 1.0}, "states": 1, "report_to": [],
        "learning": {"lr": 1e-2, "steps": 4}, "batch": {"size": 4, "micro": 2}, "save_every": 2, "device": "cpu", **changes,
    }  # fmt: skip
    return DistillRecipe.model_validate(values)


def test_trajectories_are_the_parents_own_generations_from_left_to_right(world: Path) -> None:
    stores = [TrajectoryStore.open(world / name) for name in ("of-parent", "of-converted")]
    assert stores[0].meta.difference(stores[1].meta) is None  # a parent's generations are its conversion's
    rows = [list(store.rows()) for store in stores]
    assert [row.tokens for row in rows[0]] == [row.tokens for row in rows[1]]
    lm = tad.load(world / "parent")
    for row in rows[0][:3]:
        assert row.reveal == list(range(1, 17))
        ids = [*row.plain_ids, *row.tokens[: row.n_real]]
        logits = lm.model(torch.tensor([ids])).logits[0, len(row.plain_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == row.tokens[: row.n_real]


@pytest.mark.parametrize("changes", [{"order": "teacher"}, {"cache": "prefix"}, {"floor": 0.5}])
def test_other_orders_of_an_autoregressive_model_are_refused(changes: dict[str, Any]) -> None:
    config = RolloutConfig(**{"order": "left-to-right", **changes})
    with pytest.raises(TadError, match="this model is autoregressive"):
        config.decoder(BlockLayout(1, "absolute", causal=True))


def test_the_acceptance_of_a_draft_is_that_of_one_plain_forward(world: Path) -> None:
    lm = tad.load(world / "converted")
    rows = list(TrajectoryStore.open(world / "of-converted").rows())
    items = [(row, step) for row in rows[:4] for step in (0, 3, row.n_real - 3)]
    for (row, step), found in zip(items, accepted_drafts(lm, items), strict=True):
        ids = [*row.plain_ids, *row.tokens[:step], *[lm.tokens.mask] * BLOCK]
        opened = torch.tensor([[len(ids) - BLOCK, len(ids)]])
        mask = AttentionMask(None, open_block(torch.arange(len(ids)), opened))
        draft = lm.model(torch.tensor([ids]), mask=mask).logits[0, -BLOCK:].argmax(-1).tolist()
        right = True
        for place in range(BLOCK):
            at = step + 1 + place
            if at >= row.n_real:
                assert np.isnan(found[place])
                continue
            right = right and draft[place] == row.tokens[at]
            assert found[place] == right


def test_the_window_of_a_converted_model_comes_from_its_acceptance(world: Path) -> None:
    lm, store = tad.load(world / "converted"), TrajectoryStore.open(world / "of-converted")
    report = measure_window(lm, store, states=4)
    assert report.of == "acceptance"
    assert len(report.decay.mean) == BLOCK
    assert all(a >= b - 0.1 for a, b in zip(report.decay.mean, report.decay.mean[1:], strict=False))
    assert read_report(store.folder) == report
    assert 1 <= report.windows["quality"].window <= BLOCK
    assert show_decay(report)[0].startswith("position ")


def test_only_the_adapter_learns_and_the_parents_bits_stay(world: Path, tmp_path: Path) -> None:
    outcome = distill(recipe(world), tmp_path / "run", quiet=True)
    assert outcome.finished
    lm, parent = tad.load(outcome.path), tad.load(world / "parent")
    ids = torch.arange(30)[None]
    assert torch.equal(lm.model(ids).logits, parent.model(ids).logits)
    before = load_file(world / "converted" / "adapter_model.safetensors")
    after = load_file(outcome.path / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert not bit_equal(before, after)
    line = read_log(tmp_path / "run", "loss_distant")[0]
    assert line["near_tokens"] > 0
    assert line["distant_tokens"] > 0


def test_drafts_of_the_distilled_model_are_kept_more_often(world: Path, tmp_path: Path) -> None:
    """On what it was trained on: the mechanism, not a claim."""
    section = {"name": "causal-blocks", "window": 4, "least": 1.0}
    outcome = distill(
        recipe(world, objective=section, learning={"lr": 2e-2, "steps": 40}, save_every=100),
        tmp_path / "run",
        quiet=True,
    )
    rows = list(TrajectoryStore.open(world / "of-converted").rows())
    items = [(row, step) for row in rows for step in range(0, row.n_real - BLOCK - 1, 3)]
    shares = [
        np.nanmean(accepted_drafts(tad.load(path), items), axis=0).sum()
        for path in (world / "converted", outcome.path)
    ]
    assert shares[1] > shares[0] + 0.3


def test_a_stopped_distillation_goes_on_to_the_same_weights(world: Path, tmp_path: Path) -> None:
    whole = distill(recipe(world), tmp_path / "whole", quiet=True)
    distill(recipe(world), tmp_path / "run", quiet=True, stop_at=2)
    again = distill(recipe(world), tmp_path / "run", resume=True, quiet=True)
    name = "adapter_model.safetensors"
    assert bit_equal(load_file(whole.path / name), load_file(again.path / name))


def test_what_does_not_go_with_a_frozen_parent_is_refused(world: Path, tmp_path: Path) -> None:
    for changes in ({"full": True}, {"adapter": {"rank": 8}}, {"start": str(world / "converted")}):
        with pytest.raises(TadError, match="its parent is frozen"):
            distill(recipe(world, **changes), tmp_path / "run", quiet=True)
    with pytest.raises(TadError, match="learns by causal-blocks"):
        distill(recipe(world, objective={"name": "tad", "window": 4}), tmp_path / "other", quiet=True)


def test_the_bundled_recipes_are_the_documented_path(world: Path, tmp_path: Path) -> None:
    """`collect-own`, `tad window`, `drafter`, with a small model in the place of theirs."""
    own = load_recipe(CollectRecipe, "collect-own")
    assert (own.order, own.privileged, own.keep) == ("left-to-right", False, "all")
    with pytest.raises(TadError, match="has not been measured"):
        distill(
            load_recipe(
                DistillRecipe,
                "drafter",
                [f"model={world / 'converted'}", f"trajectories=[{world / 'of-parent'}]"],
            ),
            tmp_path,
        )
    words = ["window", str(world / "of-parent"), "--model", str(world / "converted"), "--states", "2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    small = ["batch.size=4", "batch.micro=4", "learning.steps=1", "device=cpu", "report_to=[]", "states=1"]
    changes = [f"model={world / 'converted'}", f"trajectories=[{world / 'of-parent'}]", *small]
    outcome = distill(load_recipe(DistillRecipe, "drafter", changes), tmp_path / "run", quiet=True)
    assert tad.load(outcome.path).conversion is not None


def test_a_parents_own_answers_are_texts_for_its_conversion_and_those_of_others_are_not(world: Path) -> None:
    values = {
        "name": "own", "data": [{"source": str(world / "of-parent")}], "block": BLOCK, "report_to": [], "device": "cpu",
        "objective": {"name": "causal-blocks"}, "learning": {"steps": 1}, "batch": {"size": 4, "micro": 4}, "held_out": 0,
    }  # fmt: skip
    assert plan(ConvertRecipe.model_validate({**values, "model": str(world / "parent")})).rows == 9
    other = write_autoregressive(world / "other", seed=5)
    with pytest.raises(TadError, match="trajectories of another model"):
        plan(ConvertRecipe.model_validate({**values, "model": str(other)}))
