"""Pretraining end to end at a size that takes seconds: exact resume, whole-or-absent checkpoints, the released layout."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.config import load_recipe
from tad.decoding import decode
from tad.errors import TadError
from tad.training.checkpoints import checkpoints
from tad_lab.pretraining.pretrain import pretrain
from tad_lab.pretraining.recipe import PretrainRecipe

SMALL = ("optimization.steps=12", "save_every=4", "log_every=2", "data.chunk=64", "data.examples=128",
         "optimization.tokens_per_step=1024", "keep=3", "shard=20KB")  # fmt: skip


def recipe(*overrides: str) -> PretrainRecipe:
    return load_recipe(PretrainRecipe, "pretrain-tiny", [*SMALL, *overrides])


def equal(left: Any, right: Any) -> bool:
    """Bit-equality of nested checkpoints."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines}
    assert len(found) == len(lines)  # no step twice
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Uninterrupted runs, one per change of the recipe. Tests only read them."""

    @cache
    def whole(change: str) -> Path:
        directory = tmp_path_factory.mktemp("whole")
        pretrain(recipe(change), directory, quiet=True)
        return directory

    return whole


@pytest.fixture
def run(runs: Callable[[str], Path]) -> Path:
    return runs("model.family=llada")


@pytest.mark.parametrize("change", ["model.family=llada", "model.dtype=bfloat16", "model.family=dream"])
def test_a_resumed_run_ends_bit_equal_to_the_uninterrupted_one(
    change: str, runs: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = runs(change)
    shutil.copytree(whole / "checkpoint-4", tmp_path / "checkpoint-4")
    shutil.copy(whole / "log.jsonl", tmp_path / "log.jsonl")
    pretrain(recipe(change), tmp_path, resume=True, quiet=True)
    left, right = whole / "checkpoint-12", tmp_path / "checkpoint-12"
    assert equal(load_file(left / "model.safetensors"), load_file(right / "model.safetensors"))
    for name in ("optimizer.pt", "scheduler.pt"):
        assert equal(torch.load(left / name), torch.load(right / name)), name
    assert (left / "position.json").read_text() == (right / "position.json").read_text()
    assert losses(tmp_path) == losses(whole)


def test_the_loss_falls(run: Path) -> None:
    found = losses(run)
    assert found[12] < 0.9 * found[2]


@pytest.mark.slow  # what saves is the trainer of distillation, which is killed in the fast tier
def test_a_run_killed_while_saving_leaves_the_previous_checkpoint_usable(run: Path, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tad.config import load_recipe
from tad.training import trainer
from tad_lab.pretraining.pretrain import pretrain
from tad_lab.pretraining.recipe import PretrainRecipe
saves, seal = [], trainer.seal
def kill_at_the_second(folder, final):
    saves.append(folder)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder, final)
trainer.seal = kill_at_the_second
pretrain(load_recipe(PretrainRecipe, "pretrain-tiny", {list(SMALL)!r}), Path({str(tmp_path)!r}), quiet=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr.decode()[-500:]
    assert (tmp_path / "unfinished" / "checkpoint-8").is_dir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]
    pretrain(recipe(), tmp_path, resume=True, quiet=True)
    assert not (tmp_path / "unfinished").exists()
    final = [load_file(where / "checkpoint-12" / "model.safetensors") for where in (run, tmp_path)]
    assert equal(*final)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_result_loads_decodes_and_holds_the_trained_weights_in_bf16(
    family: str, runs: Callable[[str], Path]
) -> None:
    whole = runs(f"model.family={family}")
    assert len(list((whole / "model").glob("*.safetensors"))) > 1
    lm = tad.load(whole / "model", device="cpu")
    trained = load_file(whole / "checkpoint-12" / "model.safetensors")
    stored = lm.model.state_dict()
    assert stored.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(stored[name], value.to(torch.bfloat16)), name
    assert lm.family.name == family
    assert lm.tokens.mask != lm.tokens.eos
    assert lm.decode(lm.encode("Solve x + 1 = 3."), skip_special=False).count("Solve x + 1 = 3.") == 1
    (answer,) = decode(lm, [lm.encode("Solve x + 1 = 3.")], "one-by-one", gen_length=32)
    assert lm.tokens.mask not in answer.tokens


def test_the_record_names_recipe_versions_seed_and_commit(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["recipe"]["seed"] == 0
    (call,) = record["calls"]
    assert call["steps"] == call["planned_steps"] == 12
    assert call["tokens"] == 12 * 1024
    assert call["versions"]["torch"] == torch.__version__
    assert "commit" in call


def test_a_run_planned_in_minutes_decays_to_zero_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    # The plan's clock alone: other threads of this process live by the real one.
    monkeypatch.setattr(
        "tad_lab.pretraining.pretrain.time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.1)
    )
    planned = recipe("optimization.steps=100000", "log_every=1", "save_every=100000")
    pretrain(planned, tmp_path, max_minutes=0.1, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines]
    assert rates[len(rates) // 2] == max(rates)
    assert rates[-1] < max(rates) / 8
    assert 0.1 * len(rates) == pytest.approx(6.0, abs=1.0)  # one reading of the clock per step
    assert json.loads((tmp_path / "run.json").read_text())["calls"][0]["finished"]


def test_a_paused_run_resumes_under_the_same_plan(run: Path, tmp_path: Path) -> None:
    result = pretrain(recipe(), tmp_path, pause_after=0.0001, quiet=True)
    assert result == tmp_path
    assert checkpoints(tmp_path)[-1].name == "checkpoint-1"
    pretrain(recipe("keep=1"), tmp_path, resume=True, quiet=True)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-12"]
    final = [load_file(where / "checkpoint-12" / "model.safetensors") for where in (run, tmp_path)]
    assert equal(*final)


@pytest.mark.parametrize("override", ["optimization.steps=24", "seed=3", "data.widths=[192, 256]"])
def test_resuming_with_another_recipe_is_refused(run: Path, override: str) -> None:
    field = re.escape(override.partition("=")[0])
    with pytest.raises(TadError, match=f"checkpoint-12: .*{field}="):
        pretrain(recipe(override), run, resume=True, quiet=True)


def test_training_goes_on_from_given_weights(run: Path, tmp_path: Path) -> None:
    pretrain(recipe(f"model.start_from={run / 'model'}", "optimization.steps=4"), tmp_path, quiet=True)
    assert losses(tmp_path)[2] < 0.9 * losses(run)[2]


CAUSAL = ("model.family=fast-dllm-v2", "model.block=1", "objective={name: next-token}")
BLOCKS = ("model.family=fast-dllm-v2", "model.block=32", "objective={name: fast-dllm-v2}")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoregressive model."""
    directory = tmp_path_factory.mktemp("causal")
    pretrain(recipe(*CAUSAL), directory, quiet=True)
    return directory


def test_an_autoregressive_model_decodes_its_most_likely_next_token(causal: Path) -> None:
    """It is a block-diffusion model with blocks of one: a decoder of block diffusion is then plain greedy decoding."""
    found = losses(causal)
    assert found[12] < 0.9 * found[2]
    lm = tad.load(causal / "model", device="cpu", dtype="fp32")
    prompt = lm.encode("Solve x + 1 = 3.")
    (answer,) = decode(lm, [prompt], "sdar", gen_length=8, stop="off")
    ids = torch.tensor([prompt])
    for token in answer.tokens:
        with torch.no_grad():
            logits = lm.model(ids).logits[0, -1]
        logits[lm.tokens.mask] = -torch.inf
        assert token == int(logits.argmax())
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)


def test_block_diffusion_starts_from_an_autoregressive_model(causal: Path, tmp_path: Path) -> None:
    start = f"model.start_from={causal / 'model'}"
    result = pretrain(recipe(*BLOCKS, start, "optimization.steps=8"), tmp_path / "from", quiet=True)
    pretrain(recipe(*BLOCKS, "optimization.steps=4"), tmp_path / "scratch", quiet=True)
    assert losses(tmp_path / "from")[2] < 0.9 * losses(tmp_path / "scratch")[2]
    assert losses(tmp_path / "from")[8] < losses(tmp_path / "from")[2]
    lm = tad.load(result, device="cpu")
    assert lm.family.name == "fast-dllm-v2"
    assert lm.model.shape.blocks.size == 32
    assert lm.decode([lm.tokens.mask], skip_special=False) == "|<MASK>|"
    assert {lm.decode([end], skip_special=False) for end in lm.tokens.ends} == {"<|endoftext|>", "<|im_end|>"}
    prompt = lm.encode("Solve x + 1 = 3.")
    assert lm.decode(prompt, skip_special=False).startswith(
        "<|im_start|>system\nYou are a helpful assistant."
    )
    (answer,) = decode(lm, [prompt], "fast-dllm-v2", gen_length=40)
    assert lm.tokens.mask not in answer.tokens


def test_weights_of_another_shape_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(TadError, match=r"model\.start_from"):
        pretrain(recipe(f"model.start_from={run / 'model'}", "model.mlp=128"), tmp_path, quiet=True)


def test_resuming_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="--resume"):
        pretrain(recipe(), tmp_path, resume=True, quiet=True)


def test_the_command_trains_with_overrides(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["pretrain", "pretrain-tiny", *SMALL, "optimization.steps=2", "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimization.stepz=3", "did you mean 'steps'"),
        ("data.widths=[200, 100]", "widths should ascend"),
        ("model.heads=3", "do not fit together"),
        ("data.privileged=2", r"data\.privileged"),
        ("objective={name: tad}", "objective.*'tad' learns from trajectories"),
    ],
)
def test_bad_recipes_are_one_line_errors_that_name_the_field(override: str, message: str) -> None:
    with pytest.raises(TadError, match=message):
        recipe(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.block=32"], r"model\.block"),
        (["model.family=fast-dllm-v2"], "bd_size"),
        (["model.family=sdar"], r"model\.family"),
        (["objective.windw=3"], "windw"),
        (["objective={name: next-token}"], "next-token"),
        ([*CAUSAL, "model.block=4"], "next-token"),
    ],
)
def test_models_and_objectives_that_do_not_fit_are_refused(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TadError, match=message):
        pretrain(recipe(*overrides), tmp_path, quiet=True)


@pytest.mark.parametrize(
    "name",
    [
        "pretrain-nano-llada",
        "pretrain-nano-dream",
        "pretrain-small-llada",
        "pretrain-nano-ar",
        "pretrain-nano-fast-dllm-v2",
    ],
)
def test_the_bundled_recipes_are_valid_and_of_the_stated_size(name: str) -> None:
    from tad_lab.pretraining.pretrain import build_model

    values = load_recipe(PretrainRecipe, name)
    parameters = sum(p.numel() for p in build_model(values).parameters())
    low, high = (25e6, 28e6) if "small" in name else (2.5e6, 4e6)
    assert low < parameters < high
