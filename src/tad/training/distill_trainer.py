"""The trainer of distillation: the library's loop around a `LossModule`.

Its own part is small: denominators are counted over the global batch before its first forward, so a loss is never divided
by the number of micro-batches or processes again; sums for the log are taken over the global batch, once per optimizer
step; a loss that is not a number stops the run; held-out losses and quick evaluations happen between steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import save_fsdp_optimizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from tad.errors import TadError
from tad.files import append_lines
from tad.models import LM
from tad.training.batches import From, MicroBatches, Split, collate_items, padding_of
from tad.training.checkpoints import checkpoints
from tad.training.grouping import order_by_length
from tad.training.objectives import Batch, LossModule, Objective, Parts, averages
from tad.training.states import TrajectorySet, draw_items
from tad.training.trainer import ResumableTrainer
from tad.training.weights import gather_weights, load_weights, save_weights

Evaluate = Callable[[LM, int], Mapping[str, float]]
"""(the student, step) -> numbers to log. Runs on one process, between steps."""


class DistillTrainer(ResumableTrainer):
    """Trains `lm` through a `LossModule` on `MicroBatches`."""

    loss_is_scaled_for_ga = True  # shares of the global batch: sums, not means

    def __init__(
        self,
        lm: LM,
        module: LossModule,
        data: MicroBatches,
        steps: int,
        start: int,
        keep: int,
        decides: dict[str, Any],
        workers: int = 0,
        held_out: HeldOut | None = None,
        validate_every: int = 0,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(keep, model=module, **settings)
        self.model_accepts_loss_kwargs = True  # for versions that do not know loss_is_scaled_for_ga
        self.lm, self.data, self.steps, self.start, self.decides = lm, data, steps, start, decides
        self.workers = workers
        self.held_out, self.validate_every = held_out, validate_every
        self.evaluate_student, self.evaluate_every = evaluate, evaluate_every
        self.totals: dict[str, float] = {}
        self.sums: dict[str, Tensor | float] = defaultdict(float)
        self.looked: int | None = None
        self.clock = time.monotonic()
        self.add_callback(_AtStart(self))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:  # accelerate says nothing and does not shard
            raise TadError(
                "distributed: fsdp needs several GPU processes; start it with torchrun, or use ddp"
            )
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is not None and plugin.fsdp_version != 2:
            raise TadError(
                "FSDP version 1 is not supported; set fsdp_version: 2 in accelerate's configuration"
            )

    def position(self, step: int) -> dict[str, Any]:
        return {"step": step, **self.decides}

    def load_finished(self, checkpoint: Path) -> None:
        """Take over the last checkpoint of a run that was stopped between its last step and its result."""
        self._load_from_checkpoint(str(checkpoint))
        self.state.global_step = self.start

    def get_train_dataloader(self) -> DataLoader:
        parts = self.data.accumulation
        return DataLoader(
            self.data,
            batch_size=None,
            sampler=From(self.start * parts, self.steps * parts),
            num_workers=self.workers,
            pin_memory=self.args.device.type == "cuda",
            generator=torch.Generator(),  # the loader draws a seed for itself, which must not come from the run's
        )

    # One optimizer step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], int]:
        """The micro-batches of a step; their denominators are summed over all processes here."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        counted: dict[str, float] = defaultdict(float)
        for batch in batches:
            for name, value in self.data.objective.counts(batch).items():
                counted[name] += value
            padding, positions = padding_of(batch)
            fed = sum(self.data.objective.forward_tokens(batch).values())
            for name, value in (("padding", padding), ("positions", positions), ("fed", fed)):
                self.sums[name] += value
        self.totals = self.over_processes(counted)
        if self.totals.get("near") == 0:
            raise TadError(
                f"step {self.state.global_step + 1}: no near position in the whole batch (trajectories "
                f"{_name(batches[0].rows)}); check objective.window, objective.filler and filler_states"
            )
        return batches, 1  # any number: the loss is already a share of the global batch

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        return inputs.to(self.args.device, non_blocking=True)

    def compute_loss(self, model: Any, inputs: Batch, **unused: Any) -> Tensor:
        parts = model(inputs, self.totals)
        if not bool(torch.isfinite(parts.total)):
            raise TadError(self._not_finite(f"loss is {parts.total.item()}", inputs))
        for name, value in named_terms(parts).items():
            self.sums[name] += value.detach().double()
        self.last = inputs
        # Wrappers average gradients over processes; shares have to be summed.
        total: Tensor = parts.total * self.accelerator.num_processes
        return total

    def floating_point_ops(self, inputs: Batch) -> int:
        """Not estimated: what was fed to the models is in the log."""
        return 0

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        if norm is not None and not bool(torch.isfinite(torch.as_tensor(norm))):
            raise TadError(self._not_finite(f"gradient norm is {float(norm)}", self.last))
        return norm

    def _not_finite(self, what: str, batch: Batch) -> str:
        found = checkpoints(Path(self.args.output_dir))
        kept = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
        return (
            f"step {self.state.global_step + 1}: the {what}, in the micro-batch of trajectories {_name(batch.rows)}; {kept}; "
            "look at these trajectories, or lower learning.lr and resume"
        )

    # The log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, **self._drain()} if "loss" in logs else logs, start_time)

    def _drain(self) -> dict[str, float]:
        """What was summed since the last line, over all processes, as what one reads."""
        sums = self.over_processes(self.sums)
        self.sums.clear()
        now, steps = time.monotonic(), self.args.logging_steps
        seconds, self.clock = now - self.clock, now
        fed, padding, positions = (sums.pop(name) for name in ("fed", "padding", "positions"))
        terms = {name: sums.pop(name) / steps for name in list(sums) if name.startswith("loss_")}
        readable = {name.replace("/", "_"): value for name, value in averages(sums).items()}
        return {
            **terms,
            **readable,
            "padding": padding / positions,
            "states_per_s": steps * self.data.split.size / seconds,
            "trajectories_per_s": steps * self.data.split.size / seconds / self.data.states_per_trajectory,
            "tokens_per_s": fed / seconds,
        }

    def over_processes(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Sums over all processes, of numbers that every process has under the same names."""
        several = self.accelerator.num_processes > 1
        if not several and not any(isinstance(value, Tensor) for value in values.values()):
            return {name: float(value) for name, value in values.items()}  # nothing to wait for
        device = self.args.device
        row = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values.values()]
        )
        if several:
            row = self.accelerator.reduce(row, reduction="sum")
        return dict(zip(values, row.tolist(), strict=True))

    # Between steps

    def _maybe_log_save_evaluate(self, *arguments: Any, **settings: Any) -> None:
        super()._maybe_log_save_evaluate(*arguments, **settings)
        if not self.control.should_training_stop or self.state.global_step >= self.steps:
            self.look()

    def look(self) -> None:
        """Held-out loss and quick evaluation, where they are due."""
        step = self.state.global_step
        if step == self.looked:
            return
        self.looked = step
        last = step >= self.steps
        found: dict[str, float] = {}
        if self.held_out is not None and (step == 0 or last or step % self.validate_every == 0):
            found.update(self.held_out.measure(self))
        if self.evaluate_student is not None and (last or (step and step % self.evaluate_every == 0)):
            found.update(self._evaluate_student(self.evaluate_student, step))
        if found:
            self.log(found)
            self.clock = time.monotonic()

    def _evaluate_student(self, evaluate: Evaluate, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.args.process_index == 0:
            self.model.eval()
            with torch.no_grad(), torch.random.fork_rng():
                found = {f"eval_{name}": float(value) for name, value in evaluate(self.lm, step).items()}
        self.accelerator.wait_for_everyone()
        return found

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        module = self.accelerator.unwrap_model(self.model)
        state = gather_weights(module.student)
        if self.args.should_save:
            adapter = None if self.lm.peft is None else self.lm.peft.peft_config["default"]
            save_weights(state, Path(output_dir or self.args.output_dir), adapter)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        module = self.accelerator.unwrap_model(self.model if model is None else model)
        load_weights(module.student, Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the library, but sharded runs do not write the frozen weights a second time."""
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        plugin = self.accelerator.state.fsdp_plugin
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
        return None


class HeldOut:
    """The objective's loss on trajectories that are not trained on: the same states every time, no dropout."""

    def __init__(
        self, trajectories: TrajectorySet, objective: Objective, states: int, split: Split, seed: int
    ) -> None:
        items = draw_items(trajectories, states, seed, epoch=0)
        lengths = trajectories.lengths(privileged=True)[items[:, 0]]
        items = items[order_by_length(np.arange(len(items))[None], lengths)[0]]
        parts = np.array_split(items, -(-len(items) // split.micro))
        # Every process runs the same number of forwards, as sharded models need; what is too much does not count.
        rounds = -(-len(parts) // split.ranks)
        mine = [round * split.ranks + split.rank for round in range(rounds)]
        self.objective = objective
        self.batches = [
            (
                collate_items(trajectories, objective, parts[min(n, len(parts) - 1)], seed, progress=0.5),
                n < len(parts),
            )
            for n in mine
        ]

    @torch.no_grad()
    def measure(self, trainer: DistillTrainer) -> dict[str, float]:
        """Held-out terms and statistics, over all processes."""
        model = trainer.model_wrapped
        model.eval()
        counted: dict[str, float] = defaultdict(float)
        for batch, counts in self.batches:
            for name, value in self.objective.counts(batch).items():
                counted[name] += value * counts
        totals = trainer.over_processes(counted)
        sums: dict[str, Tensor | float] = defaultdict(float)
        for batch, counts in self.batches:
            parts = model(batch.to(trainer.args.device), totals)
            for name, value in ({"loss": parts.total} | named_terms(parts)).items():
                sums[name] += value.double() * counts
        found = averages(trainer.over_processes(sums))
        return {f"held_out_{name.replace('/', '_')}": value for name, value in found.items()}


def named_terms(parts: Parts) -> dict[str, Tensor]:
    """Terms and statistics of a loss under the names of the log."""
    return {**{f"loss_{term}": value for term, value in parts.terms.items()}, **parts.stats}


class _AtStart(TrainerCallback):
    """Looks once before the first step, when the model is in place."""

    def __init__(self, trainer: DistillTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step == 0:
            self.trainer.look()
        self.trainer.looked = state.global_step
        self.trainer.clock = time.monotonic()


class StepLog(TrainerCallback):
    """One JSON line per logged step, and per look at held-out data."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        numbers = {("lr" if name == "learning_rate" else name): float(value) for name, value in logs.items()}
        numbers.pop("epoch", None)
        line = {"step": state.global_step, **numbers, "seconds": round(time.monotonic() - self.began, 2)}
        append_lines(self.path, [line])


def _name(rows: tuple[str, ...]) -> str:
    """The trajectories of a batch, for a message of one line."""
    names = list(dict.fromkeys(rows))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
