"""Distillation on two CPU processes: the same batch, the same gradient; DDP, FSDP and DeepSpeed ZeRO-2."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import distill_process
import pytest
import torch
from safetensors.torch import load_file
from tiny_store import read_log, recipe

from tad.training.distill import distill
from tad.training.trainer import LossTrainer

SCRIPT = Path(__file__).with_name("distill_process.py")
STEADY: dict[str, Any] = {
    "adapter": {"rank": 4, "dropout": 0.0},
    "learning": {"lr": 1e-2, "steps": 1},
    "batch": {"size": 8, "micro": 2},
}


def launch(world: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A run on two processes, started as torchrun starts them; what the first has seen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(SCRIPT), str(world), str(out), json.dumps({**STEADY, **changes})]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **shared, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        for process in processes:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in processes:
            process.kill()
    seen: dict[str, Any] = torch.load(out / "seen.pt")
    assert seen["processes"] == 2
    return seen


def train_here(world: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """The same run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossTrainer, "_clip_grad_norm", distill_process.keep)
        distill(recipe(world, **{**STEADY, **changes}), out, quiet=True)
    return dict(distill_process.seen)


@pytest.fixture(scope="module")
def alone(world: Path) -> dict[str, Any]:
    return train_here(world, world / "alone")


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run)]


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Distance over norm."""
    assert left.keys() == right.keys()
    distance = sum(float((left[name] - right[name]).double().pow(2).sum()) for name in left)
    return math.sqrt(distance / sum(float(value.double().pow(2).sum()) for value in left.values()))


def test_two_processes_have_the_loss_and_gradient_of_one(
    world: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    seen = launch(world, tmp_path)
    assert seen["engine"] == "DistributedDataParallel"
    assert apart(alone["gradient"], seen["gradient"]) < 1e-5
    assert losses(tmp_path) == pytest.approx(losses(world / "alone"), rel=1e-5)


@pytest.mark.slow
def test_sharded_processes_have_the_loss_and_gradient_of_one(
    world: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    seen = launch(world, tmp_path, distributed="fsdp")
    assert seen["sharded"]
    assert apart(alone["gradient"], seen["gradient"]) < 1e-5
    assert losses(tmp_path) == pytest.approx(losses(world / "alone"), rel=1e-5)


LONGER: dict[str, Any] = {"learning": {"lr": 1e-2, "steps": 4}, "save_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "deepspeed"])
def test_a_run_on_two_processes_resumes_exactly_and_ends_as_on_one(
    kind: str, world: Path, tmp_path: Path
) -> None:
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    train_here(world, tmp_path / "one", **LONGER)
    held = {"validation": [str(world / "held")]}
    seen = launch(world, tmp_path / "whole", distributed=kind, **held, **LONGER)
    assert kind != "deepspeed" or seen["engine"] == "DeepSpeedEngine"
    assert seen.get("sharded", False) == (kind == "fsdp")
    launch(world, tmp_path / "parts", distributed=kind, stop_at=2, **LONGER)
    launch(world, tmp_path / "parts", distributed=kind, resume=True, **LONGER)
    one, whole, parts = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("one", "whole", "parts")
    )
    assert apart(whole, parts) == 0
    assert apart(one, whole) < 1e-3  # Adam divides by the size of small gradients, rounding included
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
