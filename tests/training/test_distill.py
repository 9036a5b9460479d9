"""Distillation end to end at a size that takes seconds: splits, exact resume, whole checkpoints, the log, bad input."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tiny_store import (
    bit_equal,
    read_log,
    recipe,
    same_weights,
    write_store,
    write_window,
    write_world,
)

import tad
from tad.errors import TadError
from tad.models import DREAM
from tad.training.batches import Split
from tad.training.checkpoints import checkpoints
from tad.training.distill import build_module, build_objective, distill, training_arguments
from tad.training.objectives import LossModule
from tad.training.recipe import DistillRecipe
from tad.training.trainer import LossTrainer
from tad.training.weights import detach

WEIGHTS = "adapter_model.safetensors"


# Splits


def gradients(world: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[float, Any]:
    """Loss and gradient of the first step."""
    found = {}

    def keep(self: LossTrainer, model: Any) -> None:
        student = self.model.student
        found.update({n: p.grad.clone() for n, p in student.named_parameters() if p.requires_grad})

    monkeypatch.setattr(LossTrainer, "_clip_grad_norm", keep)
    values = {"adapter": {"rank": 4, "dropout": 0.0}, "learning": {"steps": 1}, **changes}
    distill(recipe(world, **values), out, quiet=True)
    return read_log(out)[0]["loss"], found


def test_a_global_batch_has_one_loss_and_gradient_however_it_is_split(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's part; that every objective's loss is a sum over its global batch is tested with the objectives."""
    (loss, whole), (split_loss, split) = (
        gradients(world, tmp_path / str(micro), monkeypatch, batch={"size": 8, "micro": micro})
        for micro in (8, 2)
    )
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in whole.values()))
    assert norm > 0
    apart = math.sqrt(sum(float((whole[n] - split[n]).double().pow(2).sum()) for n in whole))
    assert apart < 1e-5 * norm
    assert split_loss == pytest.approx(loss, rel=1e-5)


def test_worker_processes_give_the_same_run(run: Path, world: Path, tmp_path: Path) -> None:
    distill(recipe(world, workers=2), tmp_path / "run", quiet=True)
    assert same_weights(run / "adapter", tmp_path / "run" / "adapter")


# Stopping and resuming


def test_a_run_stopped_at_a_random_step_and_resumed_ends_bit_equal(tmp_path: Path) -> None:
    world = write_world(tmp_path, DREAM)
    stop = random.Random(0).randint(1, 5)
    values = recipe(world, learning={"lr": 1e-2, "steps": 6, "schedule": "cosine", "warmup": 0.3})
    distill(values, tmp_path / "whole", quiet=True)
    outcome = distill(values, tmp_path / "parts", stop_at=stop, quiet=True)
    assert (outcome.step, outcome.finished) == (stop, False)
    assert distill(values, tmp_path / "parts", resume=True, quiet=True).finished
    assert same_weights(tmp_path / "whole" / "adapter", tmp_path / "parts" / "adapter")
    for name in ("optimizer.pt", "scheduler.pt"):
        left, right = (torch.load(tmp_path / part / "checkpoint-6" / name) for part in ("whole", "parts"))
        assert bit_equal(left, right), name
    keys = ("step", "loss", "loss_near", "loss_distant", "lr", "near_confidence", "near_tokens")
    told = [
        [[line[key] for key in keys] for line in read_log(tmp_path / part)] for part in ("whole", "parts")
    ]
    assert told[0] == told[1]


def test_the_seed_draws_the_states_and_dropout_is_on(run: Path, world: Path, tmp_path: Path) -> None:
    for name, changes in (("seed", {"seed": 1}), ("dry", {"adapter": {"rank": 4, "dropout": 0.0}})):
        distill(recipe(world, **changes), tmp_path / name, stop_at=2, quiet=True)
        assert not same_weights(run / "checkpoint-2", tmp_path / name / "checkpoint-2")


def test_resuming_continues_with_another_micro_batch_but_not_with_what_decides_the_result(
    world: Path, tmp_path: Path
) -> None:
    """The recipe, and what it only names: trajectories that may be others, a window that may be measured anew."""
    train, out = tmp_path / "train", tmp_path / "run"
    shutil.copytree(world / "train", train)
    write_window(train, "speed", 4)
    own = {"trajectories": [str(train)], "objective": {"name": "tad", "window": "speed"}}
    distill(recipe(world, **own), out, stop_at=2, quiet=True)
    other = write_store(tmp_path / "other", tad.load(world / "base", device="cpu"), 24, seed=5)
    write_window(other, "speed", 4)
    for changes, field in (
        ({"learning": {"lr": 1e-3, "steps": 6}}, r"learning\.lr="),
        ({"trajectories": [str(other)]}, "trajectories"),
    ):
        with pytest.raises(TadError, match=f"checkpoint-2: .*{field}"):
            distill(recipe(world, **{**own, **changes}), out, resume=True, quiet=True)
    write_window(train, "speed", 9)
    with pytest.raises(TadError, match=r"objective\.window=4, .* 9"):
        distill(recipe(world, **own), out, resume=True, quiet=True)
    write_window(train, "speed", 4)
    again = recipe(world, batch={"size": 8, "micro": 2}, **own)
    assert distill(again, out, resume=True, stop_at=3, quiet=True).step == 3


def test_a_run_that_ended_before_its_result_was_written_is_resumed_to_it(
    run: Path, world: Path, tmp_path: Path
) -> None:
    def fail(lm: tad.LM, step: int) -> dict[str, float]:
        raise RuntimeError("no sandbox")

    with pytest.raises(RuntimeError, match="no sandbox"):
        distill(recipe(world, validate_every=6), tmp_path, evaluate=fail, quiet=True)
    assert checkpoints(tmp_path)[-1].name == "checkpoint-6"
    outcome = distill(recipe(world), tmp_path, resume=True, quiet=True)
    assert (outcome.step, outcome.finished, outcome.path) == (6, True, tmp_path / "adapter")
    assert same_weights(run / "adapter", tmp_path / "adapter")


def test_the_log_keeps_no_lines_of_another_run_and_none_that_a_full_disk_tore(
    world: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0, "held_out_loss": 9.0}\n{"step": 1, "loss": 9.0}\n')
    distill(recipe(world), tmp_path, stop_at=2, quiet=True)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    assert read_log(tmp_path, "held_out_loss") == []
    with log.open("a") as file:
        file.write('{"step": 3, "lo')
    distill(recipe(world), tmp_path, resume=True, stop_at=3, quiet=True)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]


def test_a_run_killed_while_saving_leaves_the_previous_checkpoint_usable(
    run: Path, world: Path, tmp_path: Path
) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from tiny_store import recipe
from tad.training import trainer
from tad.training.distill import distill
saves, seal = [], trainer.seal
def kill_at_the_second(folder, final):
    saves.append(folder)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder, final)
trainer.seal = kill_at_the_second
distill(recipe(Path({str(world)!r})), Path({str(tmp_path)!r}), quiet=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr.decode()[-800:]
    assert (tmp_path / "unfinished" / "checkpoint-4").is_dir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    distill(recipe(world), tmp_path, resume=True, quiet=True)
    assert same_weights(run / "adapter", tmp_path / "adapter")
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_an_interrupted_run_saves_and_can_be_resumed(run: Path, world: Path, tmp_path: Path) -> None:
    def interrupt(lm: tad.LM, step: int) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    before = signal.getsignal(signal.SIGINT)
    outcome = distill(recipe(world, validate_every=2), tmp_path, evaluate=interrupt, quiet=True)
    assert outcome.interrupted
    assert (outcome.step, outcome.finished, outcome.path) == (3, False, tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    distill(recipe(world), tmp_path, resume=True, quiet=True)
    assert same_weights(run / "adapter", tmp_path / "adapter")


# What a run leaves


def test_the_result_loads_as_an_adapter_and_holds_the_trained_weights(run: Path, world: Path) -> None:
    lm = tad.load(world / "base", adapter=run / "adapter", device="cpu")
    stored = load_file(run / "adapter" / WEIGHTS)
    assert same_weights(run / "adapter", run / "checkpoint-6")
    roles = {name.split(".lora_")[0].rpartition(".")[2] for name in stored}
    assert roles == {name.rpartition(".")[2] for _, name in lm.model.projections()}
    ids = torch.arange(20)[None]
    with torch.no_grad():
        taught = lm.model(ids).logits
        with lm.base():
            assert not torch.allclose(taught, lm.model(ids).logits, atol=1e-3)


def test_the_log_has_a_line_per_step_with_losses_confidence_and_throughput(run: Path) -> None:
    found = read_log(run)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for line in found:
        assert line["loss"] == pytest.approx(line["loss_near"] + line["loss_distant"], rel=1e-5)
        assert line["near_tokens"] > 0
        assert 0 < line["near_confidence"] < 1
        assert 0 < line["distant_entropy"] < math.log(264)
        assert line["lr"] == 1e-2
        assert (
            0 <= line["padding"] < 0.3
        )  # a few rows of random lengths; docs/reference/distill.md has the share of real ones
        assert line["tokens_per_s"] > 0
        assert line["states_per_s"] == pytest.approx(4 * line["trajectories_per_s"])


def test_the_record_names_recipe_objective_fingerprints_and_versions(run: Path, world: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["recipe"]["seed"] == 0
    (call,) = record["calls"]
    store = json.loads((world / "train" / "store.json").read_text())
    assert call["fingerprints"] == {"model": store["model"], "tokenizer": store["tokenizer"]}
    assert call["objective"]["window"] == 4
    assert (call["steps"], call["trajectories"], call["processes"]) == (6, 24, 1)
    assert call["versions"]["peft"]


def test_tensorboard_gets_the_same_numbers(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    distill(recipe(world, report_to=None), tmp_path, stop_at=2, quiet=True)
    (events,) = tmp_path.rglob("events.out*")
    reader = EventAccumulator(str(events.parent))
    reader.Reload()
    seen = [event.value for event in reader.Scalars("train/loss_near")]
    assert seen == pytest.approx([line["loss_near"] for line in read_log(tmp_path)])


def test_held_out_loss_is_logged_at_the_start_the_end_and_between(world: Path, tmp_path: Path) -> None:
    values = recipe(world, validation=[str(world / "held")], validate_every=4)
    distill(values, tmp_path / "four", quiet=True)
    found = read_log(tmp_path / "four", "held_out_loss")
    assert [line["step"] for line in found] == [0, 4, 6]
    assert found[-1]["held_out_loss_near"] < found[0]["held_out_loss_near"]
    assert found[0]["held_out_near_tokens"] == found[1]["held_out_near_tokens"]
    one = values.model_copy(update={"batch": values.batch.model_copy(update={"micro": 8})})
    distill(one, tmp_path / "eight", stop_at=1, quiet=True)
    other = read_log(tmp_path / "eight", "held_out_loss")[0]
    assert other["held_out_loss"] == pytest.approx(found[0]["held_out_loss"], rel=1e-5)


def test_evaluation_is_logged_and_does_not_change_the_run(run: Path, world: Path, tmp_path: Path) -> None:
    seen = []

    def look(lm: tad.LM, step: int) -> dict[str, float]:
        seen.append(step)
        assert not lm.model.training
        torch.rand(3)
        return {"accuracy": 0.5}

    distill(recipe(world, validate_every=4), tmp_path, evaluate=look, quiet=True)
    assert seen == [4, 6]
    assert [line["eval_accuracy"] for line in read_log(tmp_path, "eval_accuracy")] == [0.5, 0.5]
    assert same_weights(run / "adapter", tmp_path / "adapter")


# What is trained


def test_the_teacher_is_the_same_weights_and_only_adapters_learn(world: Path) -> None:
    lm = tad.load(world / "base", device="cpu")
    base = sum(p.numel() for p in lm.model.parameters())
    values = recipe(world)
    module = build_module(values, lm, build_objective(values, lm), bf16=True)
    learned = [p for p in module.parameters() if p.requires_grad]
    assert module.teacher is None
    assert sum(p.numel() for p in module.parameters()) == base + sum(p.numel() for p in learned)
    assert {p.dtype for p in learned} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_a_model_trained_whole_has_a_frozen_copy_as_teacher_and_loads_as_a_model(
    world: Path, tmp_path: Path
) -> None:
    values = recipe(world, full=True, learning={"lr": 1e-3, "steps": 2})
    outcome = distill(values, tmp_path / "whole", quiet=True)
    trained, base = (tad.load(path, device="cpu") for path in (outcome.path, world / "base"))
    assert not torch.equal(trained.model.embedding().weight, base.model.embedding().weight)
    assert trained.encode("abc") == base.encode("abc")
    distill(values, tmp_path / "parts", stop_at=1, quiet=True)
    distill(values, tmp_path / "parts", resume=True, quiet=True)
    left, right = (load_file(tmp_path / part / "model" / "model.safetensors") for part in ("whole", "parts"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_base_can_be_used_again_after_its_adapter_is_taken_out(
    run: Path, world: Path, tmp_path: Path
) -> None:
    lm = tad.load(world / "base", device="cpu")
    for turn in ("a", "b"):
        distill(recipe(world), tmp_path / turn, lm=lm, stop_at=2, quiet=True)
        assert same_weights(run / "checkpoint-2", tmp_path / turn / "checkpoint-2")
        detach(lm)


def test_bf16_trains_nearly_alike(run: Path, world: Path, tmp_path: Path) -> None:
    distill(recipe(world, precision="bf16"), tmp_path, stop_at=2, quiet=True)
    want = [line["loss"] for line in read_log(run)][:2]
    assert [line["loss"] for line in read_log(tmp_path)] == pytest.approx(want, rel=2e-2)


@pytest.mark.parametrize(("setting", "every"), [(True, 1), ("half", 2)])
def test_the_layers_that_are_checkpointed_are_run_again_in_backward(
    run: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: bool | str, every: int
) -> None:
    lm, calls = tad.load(world / "base", device="cpu"), Counter[int]()
    for index, layer in enumerate(lm.model.layers()):
        inner = layer.forward

        def count(*args, index=index, inner=inner, **named):
            calls[index] += torch.is_grad_enabled()
            return inner(*args, **named)

        monkeypatch.setattr(layer, "forward", count)
    distill(recipe(world, gradient_checkpointing=setting), tmp_path, lm=lm, stop_at=1, quiet=True)
    forwards = 2  # micro-batches of a step
    assert [calls[index] // forwards for index in sorted(calls)] == [
        2 if index % every == 0 else 1 for index in range(len(list(lm.model.layers())))
    ]
    assert read_log(tmp_path)[0]["loss"] == pytest.approx(read_log(run)[0]["loss"], rel=1e-5)


@pytest.mark.slow
def test_compiled_layers_train_alike(world: Path, tmp_path: Path) -> None:
    for name, compiled in (("eager", False), ("compiled", True)):
        values = {"adapter": {"rank": 4, "dropout": 0.0}, "learning": {"lr": 1e-2, "steps": 2}}
        distill(recipe(world, compile=compiled, **values), tmp_path / name, quiet=True)
    eager, compiled_losses = (
        [line["loss"] for line in read_log(tmp_path / n)] for n in ("eager", "compiled")
    )
    assert compiled_losses == pytest.approx(eager, rel=1e-4)


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "ffff"}, "model: ffff"),
        ({"tokenizer": "ffff"}, "tokenizer: ffff"),
        ({"family": "dream"}, "family: dream"),
    ],
)
def test_trajectories_of_something_else_are_refused(
    changes: dict[str, str], message: str, world: Path, tmp_path: Path
) -> None:
    lm = tad.load(world / "base", device="cpu")
    other = write_store(tmp_path / "other", lm, 4, seed=3, **changes)
    with pytest.raises(TadError, match=message):
        distill(recipe(world, trajectories=[str(other)]), tmp_path / "run", lm=lm, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"name": "tda"}}, "'tda'"),
        # before minutes are spent on reading a model
        ({"model": "nothing", "objective": {"name": "tad", "windw": 4}}, "'windw'.*'window'"),
        ({"objective": {"name": "tad", "window": "quality"}}, "window 'quality'.*tad window"),
        ({"objective": {"name": "tad", "window": "fast"}}, "window .*'fast'"),
        ({"objective": {"name": "sft"}, "states": "all"}, "states: all"),
        ({"batch": {"size": 8, "micro": 3}}, r"batch\.size 8 .*batch\.micro=2"),
        ({"batch": {"size": 800, "micro": 4}}, r"batch\.size 800 .*96"),
        ({"distributed": "fsdp"}, "distributed: fsdp"),
        ({"objective": {"name": "tad", "window": 4, "filler": False}, "filler_states": True, "states": 2,
          "batch": {"size": 1, "micro": 1}, "learning": {"steps": 24}}, r"objective\.window"),
    ],
)  # fmt: skip
def test_bad_recipes_are_one_line_errors(
    changes: dict[str, Any], message: str, world: Path, tmp_path: Path
) -> None:
    with pytest.raises(TadError, match=message) as error:
        distill(recipe(world, **changes), tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value)


def test_a_loss_that_is_not_a_number_stops_before_it_does_harm(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    forward = LossModule.forward

    def spoiled(self: LossModule, batch: Any, totals: Any) -> Any:
        calls.append(batch.rows)
        parts = forward(self, batch, totals)
        return parts._replace(total=parts.total * math.nan) if len(calls) == 6 else parts

    monkeypatch.setattr(LossModule, "forward", spoiled)
    with pytest.raises(TadError, match=r"step 3: .*nan") as error:
        distill(recipe(world), tmp_path, quiet=True)
    assert all(name in str(error.value) for name in calls[5])
    assert str(tmp_path / "checkpoint-2") in str(error.value)
    assert all(value.isfinite().all() for value in load_file(tmp_path / "checkpoint-2" / WEIGHTS).values())


def test_running_out_of_memory_names_the_settings_that_help(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LossModule, batch: Any, totals: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LossModule, "forward", full)
    with pytest.raises(TadError, match=r"batch\.micro=2 or gradient_checkpointing=true"):
        distill(recipe(world), tmp_path, quiet=True)


def test_a_directory_with_a_run_is_not_overwritten(run: Path, world: Path) -> None:
    with pytest.raises(TadError, match="--resume"):
        distill(recipe(world), run, quiet=True)


def test_a_gpu_that_is_named_is_the_one_that_is_trained_on(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    values = recipe(world, device="cuda:1", precision="fp32")
    arguments = training_arguments(values, tmp_path, Split(8, 4))
    assert arguments.device == torch.device("cuda:1")
    assert chosen[-1] == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"full": True, "adapter": {"rank": 4}}, "full: true"),
        ({"fp8_base_forward": True, "full": True}, "fp8_base_forward .*full: true"),
        ({"fp8_base_forward": True, "distributed": "fsdp"}, "fp8_base_forward .*distributed: fsdp"),
        ({"fp8_base_forward": True, "distributed": "deepspeed"}, "fp8_base_forward .*distributed: deepspeed"),
        ({"distributed": "fsdp", "evaluation": {"tasks": ["nano-math"]}}, "evaluation .*distributed: fsdp"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        DistillRecipe.model_validate({"name": "x", "model": "m", "trajectories": ["t"], **changes})
