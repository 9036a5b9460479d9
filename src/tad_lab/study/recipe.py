"""The recipe of `tad study`, typed: stores, methods, tables and tuning.

It has the sections of `tad run` (`tad.pipeline.recipe`), and lays sections over each other in the same way.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from tad.config import Recipe
from tad.evaluation.analysis import TOLERANCE
from tad.evaluation.recipe import EvalTask
from tad.pipeline.recipe import ModelRecipe, Values

NEVER = 10**9  # steps


class MethodSection(Recipe):
    """A row of a table: how a student is trained (or that none is) and how it decodes."""

    title: str | None = None
    like: str | None = None
    """Another method whose fields are taken where this one has none; sections are laid over each other."""
    store: str | None = None
    """The trajectories it is trained on; without them the base itself is decoded."""
    distill: Values = Field(default_factory=dict)
    decoder: str | None = None
    """Default: tad."""
    settings: Values = Field(default_factory=dict)
    """Parameters of the decoder, other than what the grid sets."""
    rounds: PositiveInt | None = None
    """One method for each round, named NAME/round=1, ...: from the second on the student of the round before rolls out, is
    trained on and is the teacher. Steps are those of one round."""
    split_prompts: bool = False
    """Whether every round has its own part of the prompts, so that all rounds together roll out as often as one."""
    after: str | None = None
    """A method whose student this one starts from, as a next round does: it rolls out, is trained on and is the teacher.
    In place of `rounds`."""
    seeds: list[int] | None = None
    vary: dict[str, list[Any]] = Field(default_factory=dict)
    """Dotted field -> values: one method for each combination, named NAME/field=value,...; `title` may have {field}."""
    absent: str | None = None
    """Why this row has no numbers: it is shown, and nothing is run."""


class TableSection(Recipe):
    """A named group of methods."""

    title: str
    methods: list[str] = Field(min_length=1)
    """Names, or patterns such as `windows/*`, in the order of the rows."""
    seeds: list[int] | None = None
    """Those of the study by default; a method's own come first."""
    baseline: str | None = None
    """The method that the others are also compared with; default: the study's."""
    note: str | None = None


class TuningSection(Recipe):
    """Trials on problems that are not the test's. Every method gets the same number of them."""

    tasks: list[EvalTask] = Field(min_length=1)
    seed: int = 0
    trials: list[Values] = Field(default_factory=list)
    """Changes of `distill`, for the methods that have no list of their own."""
    methods: dict[str, list[Values] | None]
    """Which methods are tuned; null: with `trials`."""

    @model_validator(mode="after")
    def _check(self) -> TuningSection:
        counts = {name: len(self.trials_of(name)) for name in self.methods}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ValueError(f"every method gets the same number of trials, at least one; here: {counts}")
        if any(task.split in (None, "test") for task in self.tasks):
            raise ValueError("tuning needs a split that is not the test's, such as split: validation")
        return self

    def trials_of(self, method: str) -> list[Values]:
        return self.methods[method] or self.trials


class StudyRecipe(ModelRecipe):
    """Everything `tad study` needs."""

    seeds: list[int] = Field(default=[0], min_length=1)
    stores: dict[str, Values]
    """Name -> what is special about its collection."""
    validation: str | None = None
    """A store whose held-out loss is logged at the start and the end of every training."""
    tuning: TuningSection | None = None
    methods: dict[str, MethodSection]
    tables: dict[str, TableSection]
    base: str = "base"
    """The method, decoded one token at a time, that differences are taken to."""
    baseline: str | None = None
    """A method that the others are also compared with, unless their table names another."""
    tolerance: float = TOLERANCE
    """Points under the base's accuracy at which speeds are compared, in tables and in tuning."""


def set_field(values: Values, dotted: str, value: Any) -> Values:
    """A copy of nested values with one field changed."""
    name, _, rest = dotted.partition(".")
    inner = values.get(name)
    changed = set_field(inner if isinstance(inner, dict) else {}, rest, value) if rest else value
    return {**values, name: changed}
