"""The recipe of an evaluation, typed: which model, which examples, which decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from tad.config import Recipe
from tad.errors import TadError

GROUPS = {"nano": ("nano-word", "nano-math", "nano-code")}
ALL = "all"  # every template of a task


class EvalTask(Recipe):
    """Examples of one task."""

    name: str
    split: str | None = None
    """Default: the task's own, usually `test`."""
    limit: PositiveInt | None = None
    """The first so many examples of the data; all by default."""
    sample: PositiveInt | None = None
    """Instead of the first ones, this many drawn by a hash of their ids. A smaller sample is part of a larger one."""
    templates: list[str] = Field(default=["tad"], min_length=1)
    """Prompt templates; each is asked about every example. `all`: each that the task has."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's own options, such as `extraction`."""


class EvalRecipe(Recipe):
    """Everything `tad eval` needs for one run."""

    model: str
    adapter: str | None = None
    name: str | None = None
    """What tables call the model; default: the directory of its adapter."""
    tasks: list[EvalTask] = Field(min_length=1)
    decoder: str = "tad"
    settings: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the decoder that differ from its defaults."""
    gen_length: PositiveInt = 256
    seed: int = 0
    """Only matters with a temperature."""
    batch_size: PositiveInt = 16
    """Rows decoded at once; decides the speed, not the rows."""
    graders: PositiveInt | None = None
    """Graders at work at once; default: one per core."""
    device: str | None = None
    dtype: str | None = None
    data_dir: str | None = None


def list_tasks(
    names: Sequence[str],
    split: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    templates: Sequence[str] = ("tad",),
    options: dict[str, dict[str, Any]] | None = None,
) -> list[EvalTask]:
    """Tasks by name, alike in everything but their own `options` (task name -> options) and their templates: `gsm8k:plain`
    is asked with that one, other tasks with `templates`. `nano` is its three tasks."""
    if limit is not None and sample is not None:
        raise TadError("limit takes the first examples and sample draws some: give one of them")
    own_templates: dict[str, list[str]] = {}
    every: list[str] = []
    for given in names:
        name, _, template = given.partition(":")
        if name == "jsonl":  # what follows is its file
            name, template = given, ""
        found = GROUPS.get(name, (name,))
        every += found
        own_templates |= dict.fromkeys(found, [template] if template else list(templates))
    if not every:
        raise TadError("no task given; `tad tasks` lists them")
    twice = next((name for name in every if every.count(name) > 1), None)
    if twice is not None:
        raise TadError(f"task '{twice}' is named twice")
    own = dict(options or {})
    tasks = [
        EvalTask(
            name=name,
            split=split,
            limit=limit,
            sample=sample,
            templates=own_templates[name],
            options=own.pop(name.partition(":")[0], {}),
        )
        for name in every
    ]
    if own:
        raise TadError(f"options for '{next(iter(own))}', which is not one of the tasks: {', '.join(every)}")
    return tasks
