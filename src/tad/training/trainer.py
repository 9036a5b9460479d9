"""The trainer: Hugging Face's, with batches from a stream, an objective, checkpoints that are whole or absent, and a log.

What is drawn at random in a step depends on the seed and the step alone, so a resumed run repeats what the uninterrupted
one would have done. Distribution over devices, mixed precision and the loop itself are the library's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from tad.files import append_lines, read_lines, write_json, write_whole
from tad.training.checkpoints import POSITION, UNFINISHED, prune, seal
from tad.training.optimizer import RatePlan
from tad.training.stream import TokenStream

Objective = Callable[[Any, dict[str, Tensor], torch.Generator], Tensor]
"""(model, batch, generator seeded for this step) -> scalar loss."""


class ResumableTrainer(Trainer):
    """The library's loop, with checkpoints that are whole or absent. Subclasses say what is trained on."""

    def __init__(self, keep: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.remove_callback(PrinterCallback)
        self.keep = keep

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint stores about the data."""
        return {"step": step}

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Only what clipping computed: the library would otherwise take the norm in every step, for the log alone."""
        return None if grad_norm is None else super()._get_grad_norm(model, grad_norm)

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / UNFINISHED)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write next to the checkpoints, then rename: a run killed while saving leaves the previous one usable."""
        staging = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process has written its part
        if self.args.should_save:
            out = Path(self.args.output_dir)
            write_json(staging / name / POSITION, self.position(self.state.global_step))
            seal(staging / name, out / name)
            staging.rmdir()
            prune(out, self.keep)
        self.accelerator.wait_for_everyone()


class StreamTrainer(ResumableTrainer):
    """Trains on a `TokenStream` with an `Objective`."""

    def __init__(
        self,
        stream: TokenStream,
        objective: Objective,
        seed: int,
        keep: int,
        decides: dict[str, Any],
        **settings: Any,
    ) -> None:
        super().__init__(keep, **settings)
        self.stream, self.objective, self.noise_seed, self.decides = stream, objective, seed, decides
        self.generator = torch.Generator(device=self.args.device)

    def position(self, step: int) -> dict[str, Any]:
        return {**self.stream.position(step), "recipe": self.decides}

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.stream, batch_size=None, pin_memory=self.args.device.type == "cuda")

    def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        # The library's version waits for every copy, and with it for the GPU.
        return {name: value.to(self.args.device, non_blocking=True) for name, value in inputs.items()}

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], **unused: Any) -> Tensor:
        self.generator.manual_seed(_mix(self.noise_seed, self.state.global_step, self.args.process_index))
        return self.objective(model, inputs, self.generator)


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    value = 0
    for number in numbers:
        value = (value * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return value


def trim_log(path: Path, step: int | None) -> None:
    """Drop the lines beyond the checkpoint that a run goes on from, which a killed run leaves; all where it begins anew."""
    if path.is_file():
        kept = [] if step is None else [line for line in read_lines(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


class Minutes(TrainerCallback):
    """Gives a run an end in time: `budget` minutes in all, or a pause (save and stop) after `pause` minutes."""

    def __init__(self, plan: RatePlan, budget: float | None = None, pause: float | None = None) -> None:
        self.plan, self.budget, self.pause = plan, budget, pause
        self.began = time.monotonic()
        self.steady: tuple[int, float] | None = None  # step and time from which speed is measured

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **unused: Any) -> None:
        now, step = time.monotonic(), state.global_step
        minutes = (now - self.began) / 60
        if self.steady is None and minutes >= (self.budget or 0) / 4:
            self.steady = (step, now)
        if self.plan.open_end and self.budget and self.steady and step > self.steady[0]:
            decay_minutes = self.budget * self.plan.decay
            if minutes >= self.budget - decay_minutes:
                rate = (step - self.steady[0]) / (now - self.steady[1])
                self.plan.decide(step, int(rate * (self.budget - minutes) * 60))
        if self.budget and minutes > self.budget * 1.04:
            self.plan.decide(step - 1, 1)  # slower than planned: end a little above a rate of zero
        if step >= self.plan.total:
            control.should_training_stop = True
        elif self.pause and minutes >= self.pause:
            control.should_save = control.should_training_stop = True


class Progress(ProgressCallback):
    """The library's progress bar, with the plan's total."""

    def __init__(self, plan: RatePlan) -> None:
        super().__init__()
        self.plan = plan

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if self.training_bar is not None and not self.plan.open_end:
            self.training_bar.total = self.plan.total
        super().on_step_end(args, state, control, **unused)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.4f}", refresh=False)


class JsonLog(TrainerCallback):
    """One line per logged step: step, loss, lr, tokens per second since the last line, seconds since the start."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens = path, tokens_per_step
        self.began = self.last = time.monotonic()
        self.step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        self.step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        now = time.monotonic()
        speed = (state.global_step - (self.step or 0)) * self.tokens / (now - self.last)
        line = {
            "step": state.global_step,
            "loss": float(logs["loss"]),
            "lr": float(logs["learning_rate"]),
            "tokens_per_s": round(speed),
            "seconds": round(now - self.began, 1),
        }
        self.step, self.last = state.global_step, now
        append_lines(self.path, [line])
