"""Conversion: an autoregressive checkpoint learns to fill blocks of masks.

Objective, trainer, checkpoints and log are those of distillation; what is added is the mask token, the gate of the adapter,
texts as data, and the directory of the result. The run's own files (checkpoints, log, record) are in its folder `training`.

    adapter   the parent is frozen; the result is an adapter on masks, and finds its parent where it was
    all       all weights are trained; the result is an autoregressive checkpoint, with `block_size` and `mask_token_id` in its
              config.json, which other programs do not mind
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import TrainingArguments, set_seed

from tad.errors import TadError
from tad.files import create_folder, grant_usual_modes
from tad.models import LM, BlockLayout, load
from tad.models.checkpoint import Checkpoint
from tad.models.conversion import FILE as CONVERSION
from tad.models.conversion import Conversion, MaskToken, choose_mask, fingerprint_files
from tad.models.export import copy_companions
from tad.models.gated import gate
from tad.models.source import locate
from tad.models.stored import parse_dtype, read_json
from tad.runs.identity import find_rank
from tad.runs.record import write_record
from tad.training.batches import MicroBatches, Split
from tad.training.checkpoints import POSITION, check_position, checkpoints, open_run
from tad.training.distill import (
    Outcome,
    explained,
    load_batches,
    measure_held_out,
    training_arguments,
)
from tad.training.objectives import LossModule, Objective, get_objective
from tad.training.objectives.module import checkpoint_layers
from tad.training.recipe import ConvertRecipe
from tad.training.texts import read_texts
from tad.training.trainer import LossTrainer, RunSpec
from tad.training.weights import gather_weights, save_weights

RUN = "training"
"""The folder of the run's own files, in that of the result."""
_RESULT = ".result"
_MEASURED = 3  # micro-batches of which the time is taken; the first one warms up


@dataclass(frozen=True)
class Plan:
    """What a conversion will cost, from a few forwards and backwards of its own first rows."""

    parameters: int
    trained: int
    mask: MaskToken
    rows: int
    held_out: int
    too_long: int
    steps: int
    positions_per_step: int
    positions_per_second: float
    memory: int  # bytes at its peak so far, of the GPU or of this process

    @property
    def seconds(self) -> float:
        return self.steps * self.positions_per_step / self.positions_per_second

    def describe(self) -> str:
        """The plan as lines to be read."""
        rows = f"{self.rows:,} to learn, {self.held_out:,} held out"
        rows += f", {self.too_long:,} left out (too long)" if self.too_long else ""
        lines = {
            "parameters": f"{self.parameters:,}, of which {self.trained:,} are trained",
            "mask": f"token {self.mask.id}: {self.mask.row}",
            "rows": rows,
            "steps": f"{self.steps:,} of about {self.positions_per_step:,} positions",
            "time": f"{_duration(self.seconds)} at {self.positions_per_second:,.0f} positions/s (measured on its first rows)",
            "memory": f"{self.memory / 1e9:.1f} GB at its peak while measuring; the optimizer adds "
            f"{8 * self.trained / 1e9:.2f} GB",
        }
        return "\n".join(f"{name:<12}{value}" for name, value in lines.items())


def convert(
    recipe: ConvertRecipe,
    out: Path,
    resume: bool = False,
    minutes: float | None = None,
    stop_at: int | None = None,
    quiet: bool = False,
    lm: LM | None = None,
) -> Outcome:
    """Train, and leave the converted model in `out`. `minutes` takes the place of the recipe's steps: as many as fit, by the
    speed of the first rows. `lm` is the parent, where it is already loaded."""
    if any((out / name).exists() for name in (CONVERSION, "config.json")):
        raise TadError(f"{out}: already holds a model; choose another --out")
    if minutes is not None and find_rank()[1] > 1:
        raise TadError("--minutes is for one process, which measures its own speed; give --steps")
    if resume and minutes is not None:
        recipe = with_steps(recipe, _planned(out / RUN))
        minutes = None
    job = _Job(recipe, out / RUN, lm)  # bad input is refused before anything is written
    create_folder(out)
    with open_run(out / RUN, (), resume, recipe.content_hash_fields(), recipe.keep) as checkpoint:
        return _train(job, out, checkpoint, minutes, stop_at, quiet)


def plan(recipe: ConvertRecipe, lm: LM | None = None) -> Plan:
    """What a conversion would cost; nothing is written."""
    return _Job(recipe, Path("."), lm).plan()


def with_steps(recipe: ConvertRecipe, steps: int) -> ConvertRecipe:
    """The recipe with another number of steps."""
    return recipe.model_copy(update={"learning": recipe.learning.model_copy(update={"steps": steps})})


def _planned(run: Path) -> int:
    """The steps that a run was planned with."""
    found = checkpoints(run)
    if not found:
        raise TadError(f"{run}: no checkpoint to resume from; start without --resume")
    return int(read_json(found[-1] / POSITION)["recipe"]["learning"]["steps"])


class _Job:
    """A conversion before its first step: the model, its mask, its texts and what is trained."""

    def __init__(self, recipe: ConvertRecipe, run: Path, lm: LM | None = None) -> None:
        rank, ranks = find_rank()
        self.split = Split(recipe.batch.size, recipe.batch.micro, rank, ranks)
        self.arguments = training_arguments(recipe, run, self.split)
        self.recipe = recipe
        self.lm = lm or load(recipe.model, device=recipe.device, dtype=recipe.dtype)
        check_parent(self.lm)
        self.texts = read_texts(
            recipe.data,
            self.lm,
            recipe.longest,
            recipe.held_out,
            recipe.batch.size,
            recipe.seed,
            recipe.data_dir,
        )
        self.mask = open_blocks(self.lm, recipe.block, recipe.mask)
        self.objective = build_objective(recipe, self.lm)
        self.data = MicroBatches(
            self.texts.trained, self.objective, self.split, 1, recipe.seed, recipe.batch.pool
        )
        set_seed(recipe.seed)  # adapters start the same on every process
        self.module = build_module(recipe, self.lm, self.objective, self.arguments)
        set_seed(recipe.seed + self.split.rank)  # dropout does not

    @property
    def steps(self) -> int:
        learning = self.recipe.learning
        return learning.steps or max(1, round(learning.epochs * self.data.steps_per_epoch))

    def plan(self) -> Plan:
        """Time a few micro-batches. What they leave behind (gradients, random numbers drawn) is put back."""
        parameters = list(self.module.parameters())
        positions = per_second = 0.0
        self.module.to(self.arguments.device).train()
        with torch.random.fork_rng():
            for number in range(_MEASURED):
                batch = self.data[number % self.split.accumulation].to(self.arguments.device)
                began = time.monotonic()
                with _autocast(self.arguments):
                    found = self.module(batch, self.objective.counts(batch))
                found.total.backward()
                if self.arguments.device.type == "cuda":
                    torch.cuda.synchronize()
                per_second = batch.positions / (time.monotonic() - began)
                positions += batch.positions
        for weight in parameters:
            weight.grad = None
        return Plan(
            parameters=sum(weight.numel() for weight in parameters),
            trained=sum(weight.numel() for weight in parameters if weight.requires_grad),
            mask=self.mask,
            rows=self.texts.rows,
            held_out=0 if self.texts.held_out is None else len(self.texts.held_out),
            too_long=self.texts.too_long,
            steps=self.steps,
            positions_per_step=round(positions / _MEASURED * self.split.accumulation * self.split.ranks),
            positions_per_second=per_second * self.split.ranks,
            memory=_peak(self.arguments),
        )


def _train(
    job: _Job, out: Path, checkpoint: Path | None, minutes: float | None, stop_at: int | None, quiet: bool
) -> Outcome:
    began, run, recipe = time.monotonic(), out / RUN, job.recipe
    if minutes is not None:
        found = job.plan()
        per_step = found.seconds / found.steps
        recipe = job.recipe = with_steps(recipe, max(1, int(minutes * 60 / per_step)))
    steps, arguments = job.steps, job.arguments
    job.data.total_steps = arguments.max_steps = steps
    arguments.warmup_steps = round(recipe.learning.warmup * steps)
    start = 0 if checkpoint is None else int(read_json(checkpoint / POSITION)["step"])
    named = {"data": job.texts.trained.digest(), "mask": job.mask.id}
    if checkpoint is not None:
        check_position(checkpoint, "named", named)
    spec = RunSpec(
        batches=load_batches(job.data, start, steps, recipe, arguments),
        start=start,
        steps=steps,
        keep=recipe.keep,
        position=lambda step: {"step": step, "recipe": recipe.content_hash_fields(), "named": named},
        per_step={"rows": job.split.size},
        measures=measure_held_out(recipe, job.texts.held_out, job.objective, job.split, steps),
        adapter=None if job.lm.peft is None else job.lm.peft.peft_config["default"],
        stop_at=stop_at,
        quiet=quiet,
    )
    trainer = LossTrainer(job.module, spec, args=arguments)
    with explained(recipe):
        trainer.run(checkpoint)
    step = trainer.state.global_step
    finished = step >= steps
    if finished:
        write_result(trainer, recipe, job.lm, job.mask, out)
    if arguments.should_save:
        write_record(
            run,
            recipe.model_dump(mode="json"),
            finished=finished,
            steps=step,
            planned_steps=steps,
            objective=asdict(job.objective),
            mask=asdict(job.mask),
            rows=job.texts.rows,
            minutes=round((time.monotonic() - began) / 60, 2),
        )
    trainer.accelerator.wait_for_everyone()
    return Outcome(out, step, steps, finished, trainer.stop.asked)


def check_parent(lm: LM) -> None:
    """Refuse what is not an autoregressive checkpoint with a tokenizer."""
    layout = lm.model.shape.blocks
    if lm.conversion is not None or (layout is not None and layout.drafts):
        raise TadError(
            f"{lm.source}: is converted already; train it further with `tad distill`, or convert its parent again"
        )
    if layout is None or not layout.causal:
        raise TadError(
            f"{lm.source}: is a diffusion model already ({lm.family.name}); `tad convert` takes autoregressive checkpoints "
            "(llama, qwen2, qwen3)"
        )
    if lm.peft is not None:
        raise TadError(f"{lm.source}: the model already carries an adapter; load it without one")
    if lm.tokenizer is None:
        raise TadError(f"{lm.source}: has no tokenizer; put tokenizer.json beside the weights")


def open_blocks(lm: LM, block: int, mask: int | None) -> MaskToken:
    """Make an autoregressive model one that fills blocks of masks; its weights stay as they are."""
    chosen = choose_mask(lm.tokenizer, lm.model.shape.vocab, {*lm.tokens.all} - {None}, mask)
    lm.model.config.block_size, lm.model.config.mask_token_id = block, chosen.id
    lm.model.shape = replace(lm.model.shape, blocks=BlockLayout(block, "absolute", causal=True))
    lm.tokens = replace(lm.tokens, mask=chosen.id)
    return chosen


def build_objective(recipe: ConvertRecipe, lm: LM) -> Objective:
    """The recipe's objective; where all weights are trained, the next token of the text is learned too."""
    given = {**({"next_token": 0.5} if recipe.full else {}), **recipe.objective.settings}
    if not recipe.full and given.get("next_token"):
        raise TadError("objective.next_token: the parent is frozen; leave it out, or convert with how=all")
    return get_objective(
        recipe.objective.name,
        mask_token=lm.tokens.mask,
        family=lm.family,
        layout=lm.model.shape.blocks,
        **given,
    )


def build_module(
    recipe: ConvertRecipe, lm: LM, objective: Objective, arguments: TrainingArguments
) -> LossModule:
    """What is trained in fp32; under bf16, what is frozen in bf16."""
    if recipe.full:
        lm.model.float().requires_grad_(True)
        with torch.no_grad():  # the row of a token that no text has, or of none, says nothing
            table = lm.model.embedding().weight
            table[lm.tokens.mask] = table.mean(0)
    else:
        lm.model.to(torch.bfloat16 if arguments.bf16 else torch.float32)
        section = recipe.adapter
        handle = lm.attach(section.rank, section.alpha, section.dropout)
        handle.peft_config["default"].base_model_name_or_path = recipe.model
        gate(lm.model, lm.tokens.mask)
        for weight in lm.model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
    if recipe.gradient_checkpointing:
        checkpoint_layers(lm.model, every=2 if recipe.gradient_checkpointing == "half" else 1)
    if recipe.compile:
        for layer in lm.model.layers():
            layer.compile()
    module = LossModule(lm.model, objective)
    module._no_split_modules = lm.model._no_split_modules
    return module


def write_result(trainer: LossTrainer, recipe: ConvertRecipe, lm: LM, mask: MaskToken, out: Path) -> None:
    """The files of the converted model, into `out`; the one that makes it a model comes last."""
    state = gather_weights(trainer.accelerator.unwrap_model(trainer.model).student)
    if not trainer.args.should_save:
        return
    staging = out / _RESULT
    shutil.rmtree(staging, ignore_errors=True)
    parent = Checkpoint.open(locate(recipe.model))
    if recipe.full:
        last = "config.json"
        _save_whole(parent, state, lm, recipe.block, staging)
    else:
        last = CONVERSION
        save_weights(state, staging, trainer.spec.adapter)
        where = Path(recipe.model).expanduser()
        Conversion(
            folder=staging,
            parent=str(where.resolve()) if where.exists() else recipe.model,
            parent_files=fingerprint_files(parent.shards),
            family=lm.family.name,
            block_size=recipe.block,
            mask_token_id=mask.id,
            mask_row=mask.row,
        ).write(staging)
    grant_usual_modes(staging)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == last):
        path.replace(out / path.name)
    staging.rmdir()


def _save_whole(parent: Checkpoint, state: dict[str, torch.Tensor], lm: LM, block: int, folder: Path) -> None:
    """An autoregressive checkpoint in the released layout, with two more fields."""
    own = parent.with_blocks(block, lm.tokens.mask)
    model = own.family.model_class(own.config).to(own.dtype)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    copy_companions(parent.folder, folder)
    dtype = str(parse_dtype(own.dtype)).removeprefix("torch.")
    values = {**own.values, "torch_dtype": dtype, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def _autocast(arguments: TrainingArguments) -> torch.autocast | nullcontext[None]:
    return torch.autocast(arguments.device.type, torch.bfloat16) if arguments.bf16 else nullcontext()


def _peak(arguments: TrainingArguments) -> int:
    """Bytes at their peak until now: of the GPU, else of this process."""
    if arguments.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
