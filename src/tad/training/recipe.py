"""The recipes of `tad distill` and `tad convert`, typed. Defaults of distillation are the paper's training settings for LLaDA."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from tad.config import FolderName, Positive, Recipe, Share


class ObjectiveSection(Recipe):
    """What is learned: an objective's name, and its own settings beside it (`window`, `lambda`, `tau`, ...)."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    name: str = "tad"

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class AdapterSection(Recipe):
    """LoRA on all seven projections of every layer."""

    rank: Positive = 128
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Default: the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05


class LearningSection(Recipe):
    """AdamW and how long."""

    lr: Annotated[float, Field(gt=0)] = 2e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Share = 0.0
    """The share of the run in which the rate rises from zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[Share, Share] = (0.9, 0.999)
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; 0 leaves gradients alone."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    steps: Positive | None = None
    """Optimizer steps; takes the place of `epochs`."""


class BatchSection(Recipe):
    """The global batch, and how it is cut to fit. Only `size` changes what is learned, and `pool` a little."""

    size: Positive = 256
    """States per optimizer step, over all processes."""
    micro: Positive = 4
    """States per forward; the rest of a process's share is accumulated."""
    pool: Positive = 1
    """Batches among which states are sorted by length. 1 keeps a batch a random sample; more pad less, but a batch then has
    rows of one length, which often means of one task."""


class EvaluationSection(Recipe):
    """A quick look at accuracy and tokens per forward while training."""

    tasks: list[str] = Field(min_length=1)
    every: Positive = 500
    limit: Positive = 64
    """Examples of each task."""
    split: str | None = None
    decoder: str | None = None
    """Default: the student's own."""
    gen_length: Positive | None = None
    """Default: that of the trajectories."""
    batch_size: Positive = 16
    settings: dict[str, Any] = Field(default_factory=dict)
    """The decoder's own parameters."""


class TrainingRecipe(Recipe):
    """What all trainings of a student have in common."""

    name: FolderName
    model: str
    objective: ObjectiveSection = ObjectiveSection()
    adapter: AdapterSection = AdapterSection()
    learning: LearningSection = LearningSection()
    batch: BatchSection = BatchSection()
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the computation; auto: bf16 on a GPU. What is trained is kept in fp32."""
    gradient_checkpointing: bool | Literal["half"] = False
    """Make the activations of all layers, or of every other one, again in backward: less memory, more time."""
    compile: bool = False
    """Compile the layers."""
    validation_states: Positive = 4
    """Held-out states of each trajectory."""
    validate_every: Positive = 200
    seed: int = 0
    save_every: Positive = 500
    keep: Positive = 2
    """Checkpoints kept for resuming."""
    report_to: list[str] | None = None
    """tensorboard, wandb, trackio, ...; default: tensorboard where it is installed. The JSONL log is always written."""
    distributed: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    """How the processes of torchrun or accelerate share the work; deepspeed is ZeRO-2."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that prepare batches; default: 4 on a GPU, none on a CPU."""
    device: str | None = None
    dtype: str | None = None
    """Of the weights as loaded; default: the checkpoint's own."""

    def content_hash_fields(self) -> dict[str, Any]:
        """The part that decides the result. Where, how split and how often saved may change between calls."""
        values = self.model_dump(mode="json")
        for name in _MAY_CHANGE & values.keys():
            values.pop(name)
        values["batch"].pop("micro")
        return values


class DistillRecipe(TrainingRecipe):
    """Everything `tad distill` needs."""

    start: str | None = None
    """An adapter that is added to the weights first: training starts from that student, which is also the teacher. The
    result is one adapter over `model`, of both ranks together."""
    trajectories: list[str] = Field(min_length=1)
    """Stores made by `tad collect`."""
    states: Positive | Literal["all"] = "all"
    """States per trajectory and epoch; for objectives that draw their own noise, draws per trajectory."""
    filler_states: bool = False
    """Also visit states in which only end filler is left to reveal."""
    full: bool = False
    """Train all weights instead of adapters. A teacher then costs a second, frozen copy of the model."""
    fp8_base_forward: bool = False
    """Run the frozen projections under adapters in fp8; gradients go through the weights as they are."""
    validation: list[str] = Field(default_factory=list)
    """Stores whose held-out loss is logged at the start, the end and every `validate_every` steps."""
    evaluation: EvaluationSection | None = None
    """A quick look at accuracy and speed while training."""

    @model_validator(mode="after")
    def _check(self) -> DistillRecipe:
        if self.full and "adapter" in self.model_fields_set:
            raise ValueError("full: true trains no adapter; leave out one of the two sections")
        if self.fp8_base_forward and self.full:
            raise ValueError("fp8_base_forward needs frozen weights; leave it out with full: true")
        if self.fp8_base_forward and self.distributed != "ddp":
            raise ValueError(
                f"fp8_base_forward keeps whole weights on every process; leave it out with distributed: {self.distributed}"
            )
        if self.distributed == "fsdp" and self.evaluation is not None:
            raise ValueError(
                "evaluation needs whole weights on one process; leave it out with distributed: fsdp"
            )
        return self

    def count_epochs(self, trajectories: int, mean_length: float) -> float:
        """How often training would visit each state it has; `mean_length` is that of a trajectory, in steps."""
        if self.learning.steps is None:
            return self.learning.epochs
        states = mean_length if self.states == "all" else min(self.states, mean_length)
        return self.learning.steps * self.batch.size / max(1.0, trajectories * states)


class TextSection(Recipe):
    """Texts that a conversion is trained on."""

    source: str
    """A file of rows (jsonl, jsonl.gz, parquet) with `question` and `answer`, or with `messages` that end with the
    assistant's; a task's name, whose solutions are the answers; or a store made by `tad collect`, whose answers are the
    model's own."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often a row is visited per epoch; below 1, that share of the rows is taken."""
    split: str | None = None
    """Of a task; default: `train` where it has one."""
    limit: Positive | None = None
    """The first so many rows; all by default."""


class ConvertRecipe(TrainingRecipe):
    """Everything `tad convert` needs."""

    data: list[TextSection] = Field(min_length=1)
    how: Literal["adapter", "all"] = "adapter"
    """adapter: the parent stays as it is, and an adapter acts on masks only. all: all weights are trained, also on the next
    token of the text; the result is an autoregressive checkpoint of its own."""
    block: Annotated[int, Field(ge=2, le=4096)] = 16
    """Positions of a block: how many masks the model fills at a time."""
    mask: Annotated[int, Field(ge=0)] | None = None
    """The token that stands for a mask; default: one that no text uses."""
    longest: Positive = 1024
    """Tokens of a row, question and answer; longer ones are left out."""
    held_out: Annotated[int, Field(ge=0)] = 64
    """Rows that are not trained on, and measured at the start, the end and every `validate_every` steps; at most a tenth."""
    data_dir: str | None = None
    """Where tasks have their data; default: TAD_DATA, else the hub."""

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, value: ObjectiveSection) -> ObjectiveSection:
        if value.name != "causal-blocks":
            raise ValueError(f"a conversion learns by causal-blocks, not by '{value.name}'")
        return value

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.how == "all"


_MAY_CHANGE = {
    "name", "model", "start", "trajectories", "validation", "validation_states", "validate_every", "evaluation", "save_every",
    "keep", "report_to", "distributed", "workers", "device", "compile", "gradient_checkpointing", "data_dir",
}  # fmt: skip
