"""Pretraining: from a recipe to a checkpoint in the released layout of its family.

Objectives and trainer are those of distillation; what is added is the data, the optimizer and its rate plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, set_seed

from tad.errors import TadError
from tad.models import Family, MaskedDiffusionModel, family_named
from tad.models.stored import read_json
from tad.runs.identity import find_rank
from tad.runs.record import write_record
from tad.tasks.nano.tokenizer import build_tokenizer, save_tokenizer, special_ids
from tad.training.checkpoints import POSITION, open_run, replacing
from tad.training.objectives import Batch, LossModule, TextObjective, get_objective
from tad.training.trainer import LossTrainer, RunSpec, base_arguments
from tad_lab.pretraining.optimizer import MuonAdam, RatePlan
from tad_lab.pretraining.recipe import PretrainRecipe
from tad_lab.pretraining.stream import TokenStream

RESULT = "model"


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
    with open_run(out, (RESULT,), resume, recipe.content_hash_fields(), recipe.keep) as checkpoint:
        return _train(recipe, out, checkpoint, max_minutes, pause_after, quiet)


def _train(
    recipe: PretrainRecipe,
    out: Path,
    checkpoint: Path | None,
    max_minutes: float | None,
    pause_after: float | None,
    quiet: bool,
) -> Path:
    began, section = time.monotonic(), recipe.optimization
    rank, ranks = find_rank()
    family = family_named(recipe.model.family)
    arguments = base_arguments(
        out,
        steps=section.steps,
        save_every=recipe.save_every,
        seed=recipe.seed,
        max_grad_norm=section.clip,
        logging_steps=recipe.log_every,
        report_to="none",
    )
    set_seed(recipe.seed)
    position = None if checkpoint is None else read_json(checkpoint / POSITION)
    start = 0 if position is None else int(position["step"])
    stream = TokenStream(recipe, position)
    objective = build_objective(family, recipe)
    model = build_model(recipe)
    if recipe.compile if recipe.compile is not None else torch.cuda.is_available():
        compile_layers(model)
    batches = NoisyStream(stream, objective, special_ids(family)["eos_token_id"], recipe.seed, rank, ranks)
    plan = RatePlan(section.steps, section.warmup, section.decay, open_end=max_minutes is not None)
    spec = RunSpec(
        batches=DataLoader(batches, batch_size=None, pin_memory=arguments.device.type == "cuda"),
        start=start,
        steps=section.steps,
        keep=recipe.keep,
        position=lambda step: {**stream.position(step), "recipe": recipe.content_hash_fields()},
        quiet=quiet,
    )
    optimizer = build_optimizer(model, recipe)
    trainer = LossTrainer(
        LossModule(model, objective),
        spec,
        args=arguments,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, plan)),
        callbacks=[Minutes(plan, max_minutes, pause_after)],
    )
    trainer.run(checkpoint)
    step = trainer.state.global_step
    finished = step >= plan.total
    if arguments.should_save:
        write_record(
            out,
            recipe.model_dump(mode="json"),
            finished=finished,
            steps=step,
            planned_steps=plan.total,
            tokens=step * section.tokens_per_step,
            minutes=round((time.monotonic() - began) / 60, 2),
            parameters=sum(p.numel() for p in model.parameters()),
        )
        if finished:
            export(model, family, out / RESULT, recipe)
    return out / RESULT if finished else out


class NoisyStream(IterableDataset):
    """The stream as batches of the objective. The noise of a step depends on the seed and the step alone."""

    def __init__(
        self,
        stream: TokenStream,
        objective: TextObjective,
        filler: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.stream, self.objective, self.filler, self.seed = stream, objective, filler, seed
        self.mine = slice(rank, None, ranks)

    def __iter__(self) -> Iterator[Batch]:
        for step, (ids, prompts) in enumerate(self.stream, self.stream.first_step):
            noise = int(np.random.default_rng([self.seed, 3, step]).integers(2**63))
            generator = torch.Generator().manual_seed(noise)
            yield self.objective.noise_rows(ids, prompts, self.filler, generator, self.mine)


class Minutes(TrainerCallback):
    """Gives a run an end in time: `budget` minutes in all, or a pause (save and stop) after `pause` minutes."""

    def __init__(self, plan: RatePlan, budget: float | None = None, pause: float | None = None) -> None:
        self.plan, self.budget, self.pause = plan, budget, pause
        self.began = time.monotonic()
        self.steady: tuple[int, float] | None = None  # step and time from which speed is measured

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
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
        state.max_steps = self.plan.total
        if step >= self.plan.total:
            control.should_training_stop = True
        elif self.pause and minutes >= self.pause:
            control.should_save = control.should_training_stop = True


def build_model(recipe: PretrainRecipe) -> MaskedDiffusionModel:
    """A fresh network of the recipe's shape, or the weights it starts from."""
    section = recipe.model
    family = family_named(section.family)
    config = model_config(recipe)
    dtype = getattr(torch, section.dtype)
    if section.start_from is None:
        return family.model_class(config).to(dtype)
    given = family.config_class.from_pretrained(section.start_from)
    if replace(given.shape, blocks=config.shape.blocks) != config.shape:
        raise TadError(f"model.start_from: {section.start_from} has another shape than the recipe")
    return family.model_class.from_pretrained(section.start_from, config=config, dtype=torch.float32).to(
        dtype
    )


def model_config(recipe: PretrainRecipe) -> Any:
    """The config under the field names of the family's released checkpoints."""
    section = recipe.model
    family = family_named(section.family)
    ids = special_ids(family)
    given = {name: ids[name] for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")}
    if section.block is not None:
        given["block"] = section.block
    vocab = -(-build_tokenizer(family).get_vocab_size() // 64) * 64
    return family.config_class.from_sizes(
        width=section.width,
        layers=section.layers,
        heads=section.heads,
        kv_heads=section.kv_heads or section.heads,
        mlp=section.mlp,
        vocab=vocab,
        context=section.context,
        **given,
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


def build_objective(family: Family, recipe: PretrainRecipe) -> TextObjective:
    """The recipe's objective, on the answers."""
    objective = get_objective(
        recipe.objective.name,
        mask_token=special_ids(family)["mask_token_id"],
        family=family,
        layout=model_config(recipe).shape.blocks,
        **recipe.objective.settings,
    )
    assert isinstance(objective, TextObjective)  # the recipe takes no other
    return objective


def export(model: MaskedDiffusionModel, family: Family, directory: Path, recipe: PretrainRecipe) -> None:
    """Write the released layout: config.json, bf16 safetensors, tokenizer files; whole or not at all."""
    state = {name: value.detach().to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
    saved = family.model_class(model_config(recipe)).to(torch.bfloat16)
    saved.load_state_dict(state)
    with replacing(directory) as folder:
        saved.save_pretrained(folder, max_shard_size=recipe.shard)
        save_tokenizer(family, folder, recipe.model.context)
