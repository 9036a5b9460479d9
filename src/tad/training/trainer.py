"""The trainer: Hugging Face's loop around a `LossModule`, for distillation and pretraining alike.

Its own part is small: denominators are counted over the global batch before its first forward, so a loss is never divided
by the number of micro-batches or processes again; sums for the log are taken over the global batch; a loss that is not a
number stops the run; held-out losses and quick evaluations happen between steps; checkpoints are whole or absent.
Distribution over devices, mixed precision, logging integrations and the loop itself are the library's.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import save_fsdp_optimizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from tad.errors import TadError
from tad.files import read_lines, write_json, write_whole
from tad.runs.record import LOG
from tad.training.checkpoints import POSITION, UNFINISHED, checkpoints, prune, seal
from tad.training.objectives import Batch, LossModule, LossOutput, averages
from tad.training.weights import gather_weights, load_weights, save_weights


@dataclass(frozen=True)
class BetweenSteps:
    """Something to measure while training: at these steps (0 is before the first), it gives numbers to log."""

    is_due: Callable[[int], bool]
    measure: Callable[[LossTrainer], Mapping[str, float]]


@dataclass(frozen=True)
class RunSpec:
    """What a run of the trainer consists of, beside the model and the library's own settings."""

    batches: DataLoader  # this process's micro-batches from step `start` on
    start: int  # 0, or the step of the checkpoint that the run goes on from
    steps: int
    keep: int  # checkpoints
    position: Callable[[int], dict[str, Any]]  # by step: what a checkpoint says of the data and the recipe
    stop_at: int | None = None  # save and stop after this step
    quiet: bool = False  # no progress bar
    per_step: Mapping[str, float] = field(default_factory=dict)  # logged as NAME_per_s, such as states
    measures: tuple[BetweenSteps, ...] = ()
    adapter: Any = None  # PEFT's configuration, where an adapter is trained


class LossTrainer(Trainer):
    """Trains the student of a `LossModule`; writes log.jsonl and checkpoints."""

    loss_is_scaled_for_ga = True  # shares of the global batch: sums, not means

    def __init__(self, module: LossModule, spec: RunSpec, **settings: Any) -> None:
        super().__init__(model=module, **settings)
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # for versions that do not know loss_is_scaled_for_ga
        self.spec, self.objective = spec, module.objective
        self.totals: dict[str, float] = {}
        self.sums: dict[str, Tensor | float] = defaultdict(float)
        self.looked: int | None = None
        self.clock, self.logged = time.monotonic(), spec.start
        self.stop = Stop(self, spec.stop_at)
        log = Path(self.args.output_dir) / LOG
        bar = [] if spec.quiet else [ProgressBar()]
        for callback in (_AtStart(self), self.stop, StepLog(log), *bar):
            self.add_callback(callback)

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

    def run(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint or from the start, until the end or until `stop` says so."""
        if self.args.should_save:
            trim_log(Path(self.args.output_dir) / LOG, None if checkpoint is None else self.spec.start)
        with self.stop.listening():
            if checkpoint is not None and self.spec.start >= self.spec.steps:
                # It was stopped between its last step and its result.
                self._load_from_checkpoint(str(checkpoint))
                self.state.global_step = self.spec.start
            else:
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def get_train_dataloader(self) -> DataLoader:
        return self.spec.batches

    # One optimizer step

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], int]:
        """The micro-batches of a step; their denominators are summed over all processes here."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        counted: dict[str, float] = defaultdict(float)
        for batch in batches:
            for name, value in self.objective.counts(batch).items():
                counted[name] += value
            self.sums["positions"] += batch.positions
            self.sums["tokens"] += batch.tokens
            self.sums["fed"] += batch.tokens
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
        found = model(inputs, self.totals)
        if not bool(torch.isfinite(found.total)):
            raise TadError(self._not_finite(f"loss is {found.total.item()}", inputs))
        for name, value in named_terms(found).items():
            self.sums[name] += value.detach().double()
        self.last = inputs
        # Wrappers average gradients over processes; shares have to be summed.
        total: Tensor = found.total * self.accelerator.num_processes
        return total

    def floating_point_ops(self, inputs: Batch) -> int:
        """Not estimated: what was fed to the models is in the log."""
        return 0

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        if norm is not None and not bool(torch.isfinite(torch.as_tensor(norm))):
            raise TadError(self._not_finite(f"gradient norm is {float(norm)}", self.last))
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Only what clipping computed: the library would otherwise take the norm in every step, for the log alone."""
        return None if grad_norm is None else super()._get_grad_norm(model, grad_norm)

    def _not_finite(self, what: str, batch: Batch) -> str:
        found = checkpoints(Path(self.args.output_dir))
        kept = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
        rows = f", in the micro-batch of trajectories {_name(batch.rows)}" if batch.rows else ""
        return (
            f"step {self.state.global_step + 1}: the {what}{rows}; {kept}; "
            "look at what was trained on, or lower the learning rate and resume"
        )

    # The log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({**logs, **self._drain()} if "loss" in logs else logs, start_time)

    def _drain(self) -> dict[str, float]:
        """What was summed since the last line, over all processes, as what one reads."""
        sums = self.over_processes(self.sums)
        self.sums.clear()
        now, step = time.monotonic(), self.state.global_step
        seconds, steps = now - self.clock, step - self.logged
        self.clock, self.logged = now, step
        fed, tokens, positions = (sums.pop(name) for name in ("fed", "tokens", "positions"))
        terms = {name: sums.pop(name) / steps for name in list(sums) if name.startswith("loss_")}
        return {
            **terms,
            **{name.replace("/", "_"): value for name, value in averages(sums).items()},
            "padding": 1 - tokens / positions,
            **{f"{name}_per_s": steps * amount / seconds for name, amount in self.spec.per_step.items()},
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
        if not self.control.should_training_stop or self.state.global_step >= self.spec.steps:
            self.look()

    def look(self) -> None:
        """Measure what is due."""
        step = self.state.global_step
        if step == self.looked:
            return
        self.looked = step
        found: dict[str, float] = {}
        for measure in self.spec.measures:
            if measure.is_due(step):
                found.update(measure.measure(self))
        if found:
            self.log(found)
            self.clock = time.monotonic()

    # Checkpoints

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
            write_json(staging / name / POSITION, self.spec.position(self.state.global_step))
            seal(staging / name, out / name)
            staging.rmdir()
            prune(out, self.spec.keep)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        state = gather_weights(self.accelerator.unwrap_model(self.model).student)
        if self.args.should_save:
            save_weights(state, Path(output_dir or self.args.output_dir), self.spec.adapter)

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


def base_arguments(out: Path, steps: int, save_every: int, seed: int, **settings: Any) -> TrainingArguments:
    """The library's settings for a run whose data, denominators, progress bar and end are ours."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        save_steps=save_every,
        save_strategy="steps",
        seed=seed,
        logging_nan_inf_filter=False,  # it reads the loss of every step, and so waits for the GPU
        ignore_data_skip=True,  # the data itself starts at the right step
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # several GPUs are for several processes, not for one
    return arguments


def named_terms(found: LossOutput) -> dict[str, Tensor]:
    """Terms and statistics of a loss under the names of the log."""
    return {**{f"loss_{term}": value for term, value in found.terms.items()}, **found.stats}


def trim_log(path: Path, step: int | None) -> None:
    """Drop the lines beyond the checkpoint that a run goes on from, which a killed run leaves; all where it begins anew."""
    if path.is_file():
        kept = [] if step is None else [line for line in read_lines(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


class _AtStart(TrainerCallback):
    """Looks once before the first step, when the model is in place."""

    def __init__(self, trainer: LossTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step == 0:
            self.trainer.look()
        self.trainer.looked = state.global_step
        self.trainer.clock = time.monotonic()


class Stop(TrainerCallback):
    """Ends a run early with a checkpoint: at a step, or when the user or the cluster asks for it."""

    def __init__(self, trainer: LossTrainer, at: int | None = None) -> None:
        self.trainer, self.at, self.asked = trainer, at, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Ctrl-C and termination ask politely; a second Ctrl-C does not wait."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self._ask) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _ask(self, kind: int, frame: Any) -> None:
        if self.asked and kind == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        self.asked = self.trainer.over_processes({"asked": float(self.asked)})["asked"] > 0
        if self.asked or state.global_step == self.at:
            control.should_save = control.should_training_stop = True


class ProgressBar(ProgressCallback):
    """The library's bar, with the last loss, and a total that may change while a run is planned in minutes."""

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps
        super().on_step_end(args, state, control, **unused)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.4f}", refresh=False)


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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _name(rows: tuple[str, ...]) -> str:
    """The trajectories of a batch, for a message of one line."""
    names = list(dict.fromkeys(rows))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
