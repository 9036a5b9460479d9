"""Pretraining: from a recipe to a checkpoint in the released layout of its family."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments, set_seed

from tad.errors import TadError
from tad.models import Family, MaskedDiffusionModel, family_named
from tad.models.checkpoint import read_json
from tad.tasks.nano.tokenizer import build_tokenizer, save_tokenizer, special_ids
from tad.training.checkpoints import POSITION, open_run
from tad.training.objective import BlockStates, mask_answers, masked_diffusion_loss
from tad.training.optimizer import MuonAdam, RatePlan
from tad.training.recipe import OptimizationSection, PretrainRecipe
from tad.training.record import write_record
from tad.training.stream import StreamSpec, TokenStream
from tad.training.trainer import (
    JsonLog,
    Minutes,
    Objective,
    Progress,
    StreamTrainer,
    trim_log,
)

RESULT = "model"
LOG = "log.jsonl"


def pretrain(
    recipe: PretrainRecipe,
    out: Path,
    resume: bool = False,
    max_minutes: float | None = None,
    pause_after: float | None = None,
    quiet: bool = False,
) -> Path:
    """Train, and return the directory of the finished model (or of the run, where it paused before its end).

    `max_minutes` plans the whole run: the rate decays over the last part of that time. `pause_after` saves and stops
    after so many minutes of this call, to be resumed.
    """
    with open_run(out, (RESULT,), resume, recipe.decides(), recipe.keep) as checkpoint:
        return _train(recipe, out, checkpoint, max_minutes, pause_after, quiet)


def _train(
    recipe: PretrainRecipe,
    out: Path,
    checkpoint: Path | None,
    max_minutes: float | None,
    pause_after: float | None,
    quiet: bool,
) -> Path:
    started = time.monotonic()
    family = family_named(recipe.model.family)
    set_seed(recipe.seed)
    started_at = None if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    if int(os.environ.get("RANK", 0)) == 0:
        trim_log(out / LOG, started_at)
    stream = TokenStream(
        stream_spec(recipe),
        worker_count(recipe),
        read_json(checkpoint / POSITION) if checkpoint else None,
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
    )
    model = build_model(recipe)
    if recipe.compile if recipe.compile is not None else torch.cuda.is_available():
        compile_layers(model)
    plan = RatePlan(
        recipe.optimization.steps,
        recipe.optimization.warmup,
        recipe.optimization.decay,
        open_end=max_minutes is not None,
    )
    optimizer = build_optimizer(model, recipe)
    minutes = Minutes(plan, max_minutes, pause_after)
    log = JsonLog(out / LOG, recipe.optimization.tokens_per_step)
    trainer = StreamTrainer(
        stream,
        pretraining_objective(family, recipe.optimization),
        recipe.seed,
        recipe.keep,
        recipe.decides(),
        model=model,
        args=training_arguments(recipe, out),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, plan)),
        callbacks=[minutes, log] if quiet else [minutes, log, Progress(plan)],
    )
    values = recipe.model_dump(mode="json")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    facts = {
        "steps": trainer.state.global_step,
        "planned_steps": plan.total,
        "tokens": trainer.state.global_step * recipe.optimization.tokens_per_step,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    finished = trainer.state.global_step >= plan.total
    if trainer.args.should_save:
        write_record(out, values, finished=finished, **facts)
        if finished:
            export(model, family, out / RESULT, recipe)
    return out / RESULT if finished else out


def stream_spec(recipe: PretrainRecipe) -> StreamSpec:
    """The part of a recipe on which the data depends."""
    data = recipe.data
    return StreamSpec(
        family=recipe.model.family,
        mix=tuple(sorted(data.families.items())),
        privileged=data.privileged,
        widths=tuple(data.widths),
        room=data.room,
        chunk=data.chunk,
        chunks=-(-data.examples // data.chunk),
        tokens_per_step=recipe.optimization.tokens_per_step,
        seed=recipe.seed,
    )


def worker_count(recipe: PretrainRecipe) -> int:
    """Generating processes: as the recipe says, else all cores but two."""
    if recipe.data.workers is not None:
        return max(0, recipe.data.workers)
    return max(1, len(os.sched_getaffinity(0)) - 2)


def build_model(recipe: PretrainRecipe) -> MaskedDiffusionModel:
    """A fresh network of the recipe's shape, or the weights it starts from."""
    section = recipe.model
    family = family_named(section.family)
    config = model_config(recipe)
    dtype = getattr(torch, section.dtype)
    if section.start_from is None:
        model = family.model_class(config)
    else:
        model = family.model_class.from_pretrained(section.start_from, dtype=torch.float32)
        if model.config.shape != config.shape:
            raise TadError(f"model.start_from: {section.start_from} has another shape than the recipe")
    return model.to(dtype)


def model_config(recipe: PretrainRecipe) -> Any:
    """The config under the field names of the family's released checkpoints."""
    section = recipe.model
    family = family_named(section.family)
    ids = special_ids(family)
    tokens = {name: ids[name] for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")}
    vocab = -(-build_tokenizer(family).get_vocab_size() // 64) * 64
    return family.config_class.from_sizes(
        width=section.width,
        layers=section.layers,
        heads=section.heads,
        kv_heads=section.kv_heads or section.heads,
        mlp=section.mlp,
        vocab=vocab,
        context=section.context,
        **tokens,
    )


def compile_layers(model: MaskedDiffusionModel) -> None:
    """Compile layer by layer: one layer's kernels serve all, which takes seconds where the whole takes minutes."""
    for layer in model.layers():
        layer.compile(dynamic=False)


def build_optimizer(model: MaskedDiffusionModel, recipe: PretrainRecipe) -> MuonAdam:
    """Muon on the projections of the layers, Adam on embedding, head, norms and biases."""
    section = recipe.optimization
    matrices = [p for p in model.layers().parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return MuonAdam(matrices, others, section.matrix_lr, section.other_lr, section.weight_decay)


def pretraining_objective(family: Family, settings: OptimizationSection) -> Objective:
    """Masked diffusion on the answers."""
    ids_of = special_ids(family)
    mask_id = ids_of["mask_token_id"]
    blocks = BlockStates(settings.block_states, settings.block, ids_of["eos_token_id"])

    def objective(model: Any, batch: dict[str, Tensor], generator: torch.Generator) -> Tensor:
        ids = batch["ids"].long()
        noisy, weight = mask_answers(ids, batch["prompt"], mask_id, generator, settings.weight_floor, blocks)
        return masked_diffusion_loss(model, noisy, ids, weight, family.logit_shift)

    return objective


def training_arguments(recipe: PretrainRecipe, out: Path) -> TrainingArguments:
    """The library's settings for a run whose data, rate and end are ours."""
    return TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.optimization.steps,
        max_grad_norm=recipe.optimization.clip,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # it reads the loss of every step, and so waits for the GPU
        save_steps=recipe.save_every,
        save_strategy="steps",
        ignore_data_skip=True,  # the stream itself starts at the right step
        seed=recipe.seed,
        report_to="none",
        disable_tqdm=True,  # our own bar knows the plan
        remove_unused_columns=False,
    )


def export(model: MaskedDiffusionModel, family: Family, directory: Path, recipe: PretrainRecipe) -> None:
    """Write the released layout: config.json, bf16 safetensors, tokenizer files; whole or not at all."""
    staging = directory.with_name(f".{directory.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    state = {name: value.detach().to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
    saved = family.model_class(model_config(recipe)).to(torch.bfloat16)
    saved.load_state_dict(state)
    saved.save_pretrained(staging, max_shard_size=recipe.shard)
    save_tokenizer(family, staging, recipe.model.context)
    shutil.rmtree(directory, ignore_errors=True)
    staging.rename(directory)
