"""The recipe of a collection run, and of the window measured on it, typed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from tad.config import Positive, Recipe


class TaskSection(Recipe):
    """Examples of one task."""

    name: str
    split: str | None = None
    """Default: `train` where the task has it, else the task's own default."""
    limit: Positive | None = None
    """The first so many examples; all by default."""
    sample: Positive | None = None
    """Instead of the first ones, this many drawn by a hash of their ids."""
    exclude: list[str] = Field(default_factory=list)
    """Tasks whose test questions are left out, such as `math` for MATH's own training split."""
    template: str = "tad"
    """Which of the task's plain prompts the student is given."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's own options, such as `path` for jsonl."""
    graded: bool | Literal["later"] = True
    """False keeps every rollout of the task without a verdict. `later` does so until `tad regrade` has judged them where
    there is a sandbox; before that nothing is trained on the store."""


class CollectRecipe(Recipe):
    """Everything `tad collect` needs. The defaults are the paper's, but for stopping at the end of the answer."""

    model: str
    adapter: str | None = None
    """An adapter that is added to the weights first: a student becomes the teacher."""
    tasks: list[TaskSection] = Field(min_length=1)
    part: tuple[Positive, Positive] | None = None
    """[i, n]: the i-th of n equal parts of every task's examples; parts have nothing in common."""
    gen_length: Positive = 256
    block: Positive = 32
    privileged: bool = True
    """Show the teacher the reference; without it, teacher and student see the same prompt."""
    prompt: Literal["rollout", "system"] = "rollout"
    """Where the reference stands: in the user turn with an instruction, or in a system turn."""
    order: Literal["teacher", "student", "student-max", "left-to-right", "random", "parallel"] = "teacher"
    """Whose certainty decides the position: the teacher's (the paper); the student's in the teacher's token, or in any token
    (`student-max`); or none. `parallel` reveals several tokens per step, as decoder `tad-leftmost` does at `threshold`."""
    tokens: Literal["teacher", "reference"] = "teacher"
    """What is written: the teacher's token, or the reference solution's."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the teacher is less sure than this at the chosen position, take its own best position."""
    threshold: Annotated[float, Field(ge=0)] = 0.1
    """For order `parallel`: masks of a lower entropy are revealed, and the leftmost."""
    samples: Positive = 1
    """Rollouts per example; more than one needs a temperature."""
    stop_at_end: bool = True
    """A row ends with its answer; the rest is filler with later steps. False decodes all steps, as the paper does."""
    keep: Literal["correct", "all"] = "correct"
    """Which rollouts are kept."""
    cache: Literal["none", "prefix", "dual"] = "none"
    """Approximate but faster, for orders 'teacher' and 'left-to-right' only."""
    compile: bool = False
    """Compile the layers first: a minute or so, then faster; for order 'teacher' only."""
    reference: Literal["gold", "majority", "where-needed"] = "gold"
    """Where the teacher's reference comes from: the data, or an unprivileged sample with the majority's answer. `where-needed`
    shows the data's only where rollouts without it are wrong; tasks that are not graded are always shown it."""
    attempts: Positive = 1
    """Rollouts without the reference before it is shown, for `where-needed`: the first as all, further ones sampled."""
    votes: Positive = 5
    """Unprivileged samples behind a majority; keeping then means agreeing with it, and the gold answer is not used."""
    vote_temperature: Annotated[float, Field(gt=0)] = 0.7
    """Of the votes, and of attempts after the first."""
    student_adapter: str | None = None
    """For the orders of the student: an adapter on its weights."""
    shard_size: Positive = 64
    """Examples per shard: what an interruption can lose."""
    batch_size: Positive = 16
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    data_dir: str | None = None

    @field_validator("reference")
    @classmethod
    def _check_reference(cls, value: str, info: ValidationInfo) -> str:
        """A round that shows the reference where it is needed, or a majority of it, asks for verdicts at once."""
        later = [task.name for task in info.data.get("tasks", ()) if task.graded == "later"]
        if later and value != "gold":
            raise ValueError(f"needs verdicts while collecting, and task '{later[0]}' is graded: later")
        return value

    def content_hash_fields(self) -> dict[str, Any]:
        """The part that decides the content of a shard; where it runs and from which path is not in it."""
        values = self.model_dump(mode="json")
        for name in ("model", "adapter", "device", "data_dir", "batch_size", "compile"):
            values.pop(name)
        usual = {"part": None, "attempts": 1, "threshold": 0.1}  # as in stores made before there was a choice
        for name in [name for name, value in usual.items() if values[name] == value]:
            del values[name]
        for task in values["tasks"]:
            if task["graded"] == "later":  # once it is graded, nothing tells when
                task["graded"] = True
            defaults: dict[str, Any] = {"graded": True, "sample": None, "exclude": []}  # likewise
            for name in [name for name, value in defaults.items() if task[name] == value]:
                del task[name]
        return values


class WindowSection(Recipe):
    """How the decay of confidence is measured. Trajectories are taken evenly over the store."""

    limit: Positive = 256
    states: Positive = 8
    distances: Positive | None = None
    """The longest distance measured, default half of the canvas. A window whose level is not reached within it is this."""
    batch_size: Positive = 16
