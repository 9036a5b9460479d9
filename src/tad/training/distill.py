"""Distillation: from a recipe and stored trajectories to an adapter (or a model trained whole), its log and its record."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainingArguments, set_seed

from tad.decoding import decoders_for
from tad.errors import MissingExtraError, TadError
from tad.files import hash_file
from tad.models import LM, load
from tad.models.conversion import Conversion
from tad.models.defaults import write_defaults
from tad.models.gated import go_on
from tad.models.lora import WEIGHTS, Factors
from tad.models.source import locate
from tad.models.stored import read_json
from tad.runs.identity import find_rank
from tad.runs.record import ADAPTER, MODEL, write_record
from tad.training.batches import MicroBatches, RangeSampler, Split
from tad.training.checkpoints import POSITION, check_position, open_run, replacing
from tad.training.fp8_base import fp8_buffers, quantize_base, restore_base
from tad.training.held_out import HeldOut
from tad.training.objectives import LossModule, Objective, check_settings, get_objective
from tad.training.objectives.module import checkpoint_layers
from tad.training.recipe import DistillRecipe, TrainingRecipe
from tad.training.states import TrajectorySet, read_stores
from tad.training.trainer import BetweenSteps, LossTrainer, RunSpec, base_arguments
from tad.training.weights import gather_weights, save_model, save_stacked, save_weights
from tad.trajectories.window_report import LEVELS, read_report, read_window

Evaluate = Callable[[LM, int], Mapping[str, float]]
"""(the student, step) -> numbers to log. Runs on one process, between steps."""
ZERO2 = {
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
    },
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}
"""DeepSpeed's configuration for distributed: deepspeed; `auto` is filled in from the recipe."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended. `path` is the adapter or model directory of a finished run, else the run's directory."""

    path: Path
    step: int
    steps: int
    finished: bool
    interrupted: bool = False


def distill(
    recipe: DistillRecipe,
    out: Path,
    resume: bool = False,
    evaluate: Evaluate | None = None,
    lm: LM | None = None,
    stop_at: int | None = None,
    quiet: bool = False,
) -> Outcome:
    """Train, and leave adapter, checkpoints, log and record in `out`.

    `lm` is a base that is already loaded, without an adapter; it comes back with the trained one attached. `stop_at`
    saves and stops after that step, to be resumed.
    """
    check_settings(recipe.objective.name, recipe.objective.settings)
    with open_run(out, (ADAPTER, MODEL), resume, recipe.content_hash_fields(), recipe.keep) as checkpoint:
        return _train(recipe, out, checkpoint, evaluate, lm, stop_at, quiet)


def _train(
    recipe: DistillRecipe,
    out: Path,
    checkpoint: Path | None,
    evaluate: Evaluate | None,
    lm: LM | None,
    stop_at: int | None,
    quiet: bool,
) -> Outcome:
    began = time.monotonic()
    rank, ranks = find_rank()
    split = Split(recipe.batch.size, recipe.batch.micro, rank, ranks)
    arguments = training_arguments(recipe, out, split)
    lm, started = open_model(recipe, lm)
    trajectories = read_stores([Path(folder) for folder in recipe.trajectories], lm)
    objective = build_objective(recipe, lm)
    data = MicroBatches(
        trajectories, objective, split, recipe.states, recipe.seed, recipe.batch.pool, recipe.filler_states
    )
    data.total_steps = steps = recipe.learning.steps or math.ceil(
        recipe.learning.epochs * data.steps_per_epoch
    )
    arguments.max_steps, arguments.warmup_steps = steps, round(recipe.learning.warmup * steps)
    measures = _measures(recipe, lm, objective, split, steps, evaluate)
    set_seed(recipe.seed)  # adapters start the same on every process
    module = build_module(recipe, lm, objective, arguments.bf16)
    set_seed(recipe.seed + rank)  # dropout does not
    start = 0 if checkpoint is None else int(read_json(checkpoint / POSITION)["step"])
    # What the recipe only names: stores may have been collected, windows measured anew.
    named = {"objective.window": asdict(objective).get("window"), "trajectories": trajectories.digest()}
    named["start"] = hash_file(locate(recipe.start) / WEIGHTS) if recipe.start else None
    if checkpoint is not None:
        check_position(checkpoint, "named", named)
    spec = RunSpec(
        batches=load_batches(data, start, steps, recipe, arguments),
        start=start,
        steps=steps,
        keep=recipe.keep,
        position=lambda step: {"step": step, "recipe": recipe.content_hash_fields(), "named": named},
        per_step={"states": split.size, "trajectories": split.size / data.states_per_trajectory},
        measures=measures,
        adapter=None if lm.peft is None else lm.peft.peft_config["default"],
        stop_at=stop_at,
        quiet=quiet,
    )
    trainer = LossTrainer(module, spec, args=arguments)
    with explained(recipe):
        trainer.run(checkpoint)
    finished = trainer.state.global_step >= steps
    defaults: dict[str, Any] = {"gen_length": trajectories.metas[0].gen_length}
    if (decoder := student_decoder(recipe, lm)) is not None:
        defaults["decoder"] = decoder
    path = write_result(trainer, recipe, out, defaults, started, lm.conversion) if finished else out
    if recipe.fp8_base_forward:
        restore_base(lm.model)
    if arguments.should_save:
        write_record(
            out,
            recipe.model_dump(mode="json"),
            finished=finished,
            objective=asdict(objective),
            window=_describe_window(recipe),
            **facts(lm, trajectories, data, trainer),
            minutes=round((time.monotonic() - began) / 60, 2),
        )
    trainer.accelerator.wait_for_everyone()
    return Outcome(path, trainer.state.global_step, steps, finished, trainer.stop.asked)


def _measures(
    recipe: DistillRecipe, lm: LM, objective: Objective, split: Split, steps: int, evaluate: Evaluate | None
) -> tuple[BetweenSteps, ...]:
    """Held-out loss at the start, the end and between; the quick evaluation at the end and between."""
    held = read_stores([Path(folder) for folder in recipe.validation], lm) if recipe.validation else None
    found = [*measure_held_out(recipe, held, objective, split, steps)]
    if evaluate is not None:
        every = recipe.evaluation.every if recipe.evaluation else recipe.validate_every

        def measure(trainer: LossTrainer) -> dict[str, float]:
            numbers: dict[str, float] = {}
            if trainer.args.process_index == 0:
                trainer.model.eval()
                with torch.no_grad(), torch.random.fork_rng():
                    told = evaluate(lm, trainer.state.global_step)
                numbers = {f"eval_{name}": float(value) for name, value in told.items()}
            trainer.accelerator.wait_for_everyone()
            return numbers

        found.append(BetweenSteps(lambda step: step > 0 and (step % every == 0 or step >= steps), measure))
    return tuple(found)


def measure_held_out(
    recipe: TrainingRecipe, held: TrajectorySet | None, objective: Objective, split: Split, steps: int
) -> tuple[BetweenSteps, ...]:
    """The loss on held-out rows, where there are any."""
    if held is None:
        return ()
    held_out = HeldOut(held, objective, recipe.validation_states, split, recipe.seed)
    due = BetweenSteps(lambda step: step % recipe.validate_every == 0 or step >= steps, held_out.measure)
    return (due,)


def load_batches(
    data: MicroBatches, start: int, steps: int, recipe: TrainingRecipe, arguments: TrainingArguments
) -> DataLoader:
    """This process's micro-batches from a step on."""
    cuda, parts = arguments.device.type == "cuda", data.split.accumulation
    return DataLoader(
        data,
        batch_size=None,
        sampler=RangeSampler(start * parts, steps * parts),
        num_workers=recipe.workers if recipe.workers is not None else 4 * cuda,
        pin_memory=cuda,
        generator=torch.Generator(),  # the loader draws a seed for itself, which must not come from the run's
    )


def open_model(recipe: DistillRecipe, lm: LM | None) -> tuple[LM, Factors | None]:
    """The model that is trained, and what the recipe's `start` has added to its weights."""
    if recipe.start is not None:
        locate(recipe.start)  # a wrong path is refused before minutes are spent on the weights
    lm = lm or load(recipe.model, device=recipe.device, dtype=recipe.dtype)
    if lm.conversion is not None:
        if recipe.full or recipe.start is not None or "adapter" in recipe.model_fields_set:
            raise TadError(
                f"{lm.source}: its parent is frozen and its own adapter learns on; leave out full, start and adapter"
            )
        if recipe.fp8_base_forward:
            raise TadError(
                f"{lm.source}: fp8_base_forward does not go with an adapter on masks; leave it out"
            )
    return lm, None if recipe.start is None else lm.start_from(recipe.start)


def build_objective(recipe: DistillRecipe, lm: LM) -> Objective:
    """The recipe's objective for this model; a measured window is read from beside the first store."""
    settings = recipe.objective.settings
    if "window" in settings and settings["window"] != "all":
        settings["window"] = read_window(recipe.trajectories[0], settings["window"])
    return get_objective(
        recipe.objective.name,
        mask_token=lm.tokens.mask,
        family=lm.family,
        layout=lm.model.shape.blocks,
        **settings,
    )


def _describe_window(recipe: DistillRecipe) -> str | None:
    """What a window that the recipe names was measured as; None where it is given, or there is none."""
    window = recipe.objective.settings.get("window")
    return str(read_report(recipe.trajectories[0]).windows[window]) if window in LEVELS else None


def build_module(recipe: DistillRecipe, lm: LM, objective: Objective, bf16: bool) -> LossModule:
    """The model with what is trained in fp32 and, under bf16, everything frozen in bf16.

    Trained whole, the model has no adapter to switch off: a teacher is then a frozen copy, one more time the weights.
    """
    if lm.peft is not None and lm.conversion is None:
        raise TadError("the model already carries an adapter; load it without one")
    frozen = torch.bfloat16 if bf16 else torch.float32
    teacher = None
    if recipe.full:
        if objective.needs_teacher:
            teacher = copy.deepcopy(lm.model).to(frozen)
        lm.model.float().requires_grad_(True)
    else:
        section = recipe.adapter
        lm.model.to(frozen)
        if lm.conversion is not None:
            go_on(lm.model)
        else:
            handle = lm.attach(section.rank, section.alpha, section.dropout)
            handle.peft_config["default"].base_model_name_or_path = recipe.model
        for weight in lm.model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
        if recipe.fp8_base_forward:
            quantize_base(lm.model)
    if recipe.gradient_checkpointing:
        checkpoint_layers(lm.model, every=2 if recipe.gradient_checkpointing == "half" else 1)
    if recipe.compile:
        for layer in lm.model.layers():  # rows have many lengths, so shapes stay open
            layer.compile()
    module = LossModule(lm.model, objective, teacher)
    module._no_split_modules = lm.model._no_split_modules  # what FSDP wraps one by one
    module._ddp_params_and_buffers_to_ignore = fp8_buffers(module)
    return module


def training_arguments(recipe: TrainingRecipe, out: Path, split: Split) -> TrainingArguments:
    """The library's settings for a run whose data, denominators and end are ours."""
    learning, cuda = recipe.learning, torch.cuda.is_available() and recipe.device != "cpu"
    bf16 = cuda if recipe.precision == "auto" else recipe.precision == "bf16"
    report_to = recipe.report_to
    if report_to is None:
        report_to = ["tensorboard"] if find_spec("tensorboard") else []
    schedule = (
        "constant_with_warmup" if learning.schedule == "constant" and learning.warmup else learning.schedule
    )
    settings: dict[str, Any] = {}
    if recipe.distributed == "fsdp":
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": True,
            "state_dict_type": "FULL_STATE_DICT",
        }
    elif recipe.distributed == "deepspeed":
        if find_spec("deepspeed") is None:
            raise MissingExtraError("DeepSpeed, which distributed: deepspeed needs,", "deepspeed")
        settings["deepspeed"] = copy.deepcopy(ZERO2)
    if split.ranks > 1 and not cuda:
        settings["ddp_backend"] = "gloo"
    arguments = base_arguments(
        out,
        steps=1,  # known once the trajectories are read
        save_every=recipe.save_every,
        seed=recipe.seed,
        per_device_train_batch_size=split.micro,
        gradient_accumulation_steps=split.accumulation,
        learning_rate=learning.lr,
        lr_scheduler_type=schedule,
        weight_decay=learning.weight_decay,
        adam_beta1=learning.betas[0],
        adam_beta2=learning.betas[1],
        max_grad_norm=learning.clip,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        bf16=bf16,
        use_cpu=not cuda,
        logging_steps=1,
        ddp_find_unused_parameters=False,
        report_to=report_to or "none",
        **settings,
    )
    if cuda and split.ranks == 1 and recipe.device is not None:
        _choose_gpu(arguments, torch.device(recipe.device))
    return arguments


def _choose_gpu(arguments: TrainingArguments, device: torch.device) -> None:
    """Train on the GPU that the recipe names: the library itself always takes the first."""
    if device.index is not None:
        torch.cuda.set_device(device)
        arguments.__dict__["_setup_devices"] = device  # a cached property


def student_decoder(recipe: DistillRecipe, lm: LM) -> str | None:
    """The decoder that goes with the objective, where there is one and it fits the model; None: the base's own."""
    name = recipe.objective.name
    return name if name in decoders_for(lm.model.shape.blocks) else None


def write_result(
    trainer: LossTrainer,
    recipe: DistillRecipe,
    out: Path,
    defaults: Mapping[str, Any],
    started: Factors | None = None,
    conversion: Conversion | None = None,
) -> Path:
    """The adapter directory, or the model's released layout; whole or not at all. `defaults` say how it is decoded."""
    path = out / (MODEL if recipe.full else ADAPTER)
    state = gather_weights(trainer.accelerator.unwrap_model(trainer.model).student)
    if trainer.args.should_save:
        with replacing(path) as folder:
            if recipe.full:
                save_model(state, folder, locate(recipe.model))
            elif started is not None:
                save_stacked(state, folder, trainer.spec.adapter, started)
            else:
                save_weights(state, folder, trainer.spec.adapter)
            if conversion is not None:
                conversion.write(folder)
            write_defaults(folder, **defaults)
    return path


def facts(lm: LM, trajectories: TrajectorySet, data: MicroBatches, trainer: LossTrainer) -> dict[str, Any]:
    """What the record says about a call beside the recipe."""
    meta = trajectories.metas[0]
    return {
        "steps": trainer.state.global_step,
        "planned_steps": trainer.spec.steps,
        "fingerprints": {"model": meta.model, "tokenizer": meta.tokenizer},
        "stores": [
            {"folder": str(folder), "order": meta.recipe.get("order"), "examples": meta.examples}
            for folder, meta in zip(trajectories.folders, trajectories.metas, strict=True)
        ],
        "trajectories": len(trajectories),
        "states_per_epoch": round(data.states_per_trajectory * len(trajectories)),
        "steps_per_epoch": data.steps_per_epoch,
        "trained_parameters": sum(p.numel() for p in lm.model.parameters() if p.requires_grad),
        "processes": data.split.ranks,
    }


@contextmanager
def explained(recipe: TrainingRecipe) -> Iterator[None]:
    """Out of memory, in words that help."""
    try:
        yield
    except torch.OutOfMemoryError:
        fixes = []
        if recipe.batch.micro > 1:
            fixes.append(f"batch.micro={recipe.batch.micro // 2}")
        if not recipe.gradient_checkpointing:
            fixes.append("gradient_checkpointing=true")
        fixes.append("distributed=fsdp on several GPUs")
        raise TadError(f"out of GPU memory; the result stays the same with {' or '.join(fixes)}") from None
