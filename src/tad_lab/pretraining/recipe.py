"""The recipe of a pretraining run: model, data, optimization and bookkeeping, typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tad.config import FolderName, Positive, Recipe, Share
from tad.errors import TadError
from tad.training.recipe import ObjectiveSection

_OBJECTIVES = ("sft", "next-token", "fast-dllm-v2")


class ModelSection(Recipe):
    """The network to train, or the checkpoint to go on from."""

    family: str
    width: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive | None = None
    mlp: Positive
    context: Positive = 512
    block: Positive | None = None
    """Block size of block-causal attention, for block-diffusion families; 1 is token-causal."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations while training; the optimizer keeps fp32 copies of bfloat16 weights."""
    start_from: Path | None = None
    """A checkpoint directory whose weights to start from, with a fresh optimizer. Its block size may be another."""

    @field_validator("family")
    @classmethod
    def _check_family(cls, value: str) -> str:
        from tad.models import family_named

        try:
            return family_named(value).name
        except TadError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _check_heads(self) -> ModelSection:
        if (
            self.width % self.heads
            or self.heads % (self.kv_heads or self.heads)
            or (self.width // self.heads) % 2
        ):
            raise ValueError("width, heads and kv_heads do not fit together")
        return self


class DataSection(Recipe):
    """What the model sees."""

    families: dict[str, float]
    """Task names and their weights."""
    privileged: Share = 0.3
    """Share of prompts that carry the reference."""
    examples: Positive
    """Distinct examples; after these the run starts over, in another order."""
    widths: list[Positive]
    """Row lengths in tokens, ascending. A row is prompt, answer, and end tokens to the full width."""
    room: Positive = 96
    """Half of the rows get at least this much space for the answer, as decoding will give them."""
    chunk: Positive = 32768
    """Examples generated at a time; rows that do not fill a batch at the end of a chunk are left out."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that generate; default: all cores but two, 0 generates in the training process."""

    @model_validator(mode="after")
    def _check_widths(self) -> DataSection:
        if sorted(set(self.widths)) != self.widths:
            raise ValueError("widths should ascend")
        if not self.families or min(self.families.values()) <= 0:
            raise ValueError("families needs at least one task, with positive weights")
        from tad.tasks.nano import WORLD

        for name in self.families:
            if name not in WORLD:
                raise ValueError(f"families: '{name}' cannot be generated; known: {', '.join(WORLD)}")
        return self


class OptimizationSection(Recipe):
    """How it learns: Muon for the matrices inside layers, Adam for the rest; warm up, hold, decay to zero."""

    steps: Positive
    tokens_per_step: Positive
    matrix_lr: Annotated[float, Field(gt=0)] = 0.02
    other_lr: Annotated[float, Field(gt=0)] = 0.003
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup: Annotated[int, Field(ge=0)] = 100
    decay: Share = 0.4
    """The share of the run in which the rate falls."""
    clip: Annotated[float, Field(ge=0)] = 0.0
    """Largest gradient norm; 0 leaves gradients alone."""


class PretrainRecipe(Recipe):
    """Everything `tad pretrain` needs."""

    name: FolderName
    model: ModelSection
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection.model_validate({"name": "sft", "floor": 0.2})
    """One of `sft`, `next-token` and `fast-dllm-v2`, with its own settings."""
    optimization: OptimizationSection
    seed: int = 0
    compile: bool | None = None
    """torch.compile the layers; default: on a GPU."""
    log_every: Positive = 50
    save_every: Positive = 2000
    keep: Positive = 2
    """Checkpoints kept for resuming."""
    shard: str = "15MB"
    """Largest weight file of the result."""

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: ObjectiveSection) -> ObjectiveSection:
        if value.name not in _OBJECTIVES:
            raise ValueError(
                f"'{value.name}' learns from trajectories; pretrain with {', '.join(_OBJECTIVES)}"
            )
        return value

    @model_validator(mode="after")
    def _check_rows(self) -> PretrainRecipe:
        tokens, widest = self.optimization.tokens_per_step, max(self.data.widths)
        if tokens < widest:
            raise ValueError(f"optimization.tokens_per_step={tokens} is less than one row of {widest} tokens")
        return self

    def content_hash_fields(self) -> dict[str, Any]:
        """The part that decides the result of a run that has begun."""
        values = self.model_dump(mode="json")
        for name in ("name", "compile", "log_every", "save_every", "keep", "shard"):
            values.pop(name)
        values["data"].pop("workers")
        values["model"].pop("start_from")
        return values
