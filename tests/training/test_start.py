"""Training that starts from a student: the start is in the weights, and the result is one adapter over the base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_store import recipe, same_weights, write_store

import tad
from tad.errors import TadError
from tad.runs.fingerprint import fingerprint_model
from tad.training.distill import distill


@pytest.fixture(scope="module")
def started(
    world: Path, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, torch.Tensor]:
    """A second round on the first one's student: its store, its run, and the logits of the model that was trained."""
    folder = tmp_path_factory.mktemp("round")
    lm = student(world, run / "adapter")
    write_store(folder / "train", lm, 24, seed=3)
    distill(
        second(world, run, folder),
        folder / "run",
        lm=(trained := tad.load(world / "base", device="cpu")),
        quiet=True,
    )
    return folder / "train", folder / "run", logits(trained)


def student(world: Path, adapter: Path) -> tad.LM:
    lm = tad.load(world / "base", device="cpu")
    lm.start_from(adapter)
    return lm


def second(world: Path, run: Path, folder: Path, **changes: object):
    adapter = {"rank": 2, "alpha": 6, "dropout": 0.1}
    values = {"start": str(run / "adapter"), "trajectories": [str(folder / "train")], "adapter": adapter}
    return recipe(world, **{**values, **changes})


@torch.no_grad()
def logits(lm: tad.LM) -> torch.Tensor:
    ids = torch.arange(40).view(2, 20)
    lm.model.eval()
    return lm.model(ids).logits


def test_a_start_is_the_student_it_was(world: Path, run: Path) -> None:
    base, own = (
        tad.load(world / "base", adapter=adapter, device="cpu") for adapter in (None, run / "adapter")
    )
    started = student(world, run / "adapter")
    torch.testing.assert_close(logits(started), logits(own), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(started), logits(base), atol=1e-3)
    assert fingerprint_model(started) != fingerprint_model(base)


def test_the_result_is_one_adapter_over_the_base(
    world: Path, run: Path, started: tuple[Path, Path, torch.Tensor]
) -> None:
    _, folder, trained = started
    one = tad.load(world / "base", adapter=folder / "adapter", device="cpu")
    torch.testing.assert_close(logits(one), trained, rtol=1e-4, atol=1e-4)
    assert one.peft.peft_config["default"].r == 4 + 2
    before = tad.load(world / "base", adapter=run / "adapter", device="cpu")
    assert not torch.allclose(logits(one), logits(before), atol=1e-3)  # it has learned something


def test_a_run_with_a_start_resumes_bit_for_bit_and_from_that_start_only(
    world: Path, run: Path, started: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    store, whole, _ = started
    values = second(world, run, store.parent)
    distill(values, tmp_path / "run", stop_at=4, quiet=True)
    shutil.copytree(run / "adapter", tmp_path / "elsewhere")
    moved = values.model_copy(update={"start": str(tmp_path / "elsewhere")})  # a path decides nothing
    other = values.model_copy(
        update={"start": str(whole / "adapter"), "trajectories": [str(world / "train")]}
    )
    with pytest.raises(TadError, match="another model"):
        distill(other, tmp_path / "run", resume=True, quiet=True)
    distill(moved, tmp_path / "run", resume=True, quiet=True)
    assert same_weights(tmp_path / "run" / "adapter", whole / "adapter")


def test_trajectories_of_the_base_are_not_those_of_the_student(
    world: Path, run: Path, tmp_path: Path
) -> None:
    values = second(world, run, world)
    with pytest.raises(TadError, match="trajectories of another model"):
        distill(values, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("start", ["nowhere/adapter", "base"])
def test_a_start_that_is_no_adapter_is_one_line(world: Path, run: Path, tmp_path: Path, start: str) -> None:
    with pytest.raises(TadError, match=start):
        distill(second(world, run, world, start=str(world / start)), tmp_path / "run", quiet=True)
