"""The recipe of `tad run`, typed, and what it shares with every recipe that drives whole chains.

Sections named `collect` and `distill` hold fields of those verbs' own recipes, without the model, the stores and the seed,
which the chain fills in. A section laid over another changes the fields it names; a mapping whose `name` differs
(another objective) takes the place of the one below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tad.config import FolderName, Recipe, parse_recipe
from tad.errors import TadError
from tad.evaluation.analysis import TOLERANCE
from tad.evaluation.recipe import EvalRecipe, EvalTask
from tad.evaluation.sweep import FIRST, Setting, plan
from tad.models import find_defaults
from tad.tasks import Example, check_contamination, get_task
from tad.tasks.selection import exclude_questions
from tad.training.recipe import DistillRecipe, ObjectiveSection
from tad.trajectories.mix import list_examples
from tad.trajectories.recipe import CollectRecipe, TaskSection, WindowSection

Values = dict[str, Any]
_UNNAMED = ObjectiveSection().name  # what an objective without a name is


class EvaluateSection(Recipe):
    """Which questions are asked, and at which thresholds."""

    tasks: list[EvalTask] = Field(min_length=1)
    gen_length: PositiveInt | None = None
    """Default: that of the trajectories."""
    batch_size: PositiveInt = 16
    thresholds: dict[str, list[float]] = Field(default_factory=dict)
    """By kind of threshold, `entropy` or `confidence`, in place of the grids of `tad eval --sweep`."""
    settings: Values = Field(default_factory=dict)
    """Parameters that all decoders share, such as `block`."""
    graders: PositiveInt | None = None

    @model_validator(mode="after")
    def _check(self) -> EvaluateSection:
        for kind in self.thresholds:
            if kind not in ("entropy", "confidence"):
                raise ValueError(f"thresholds are given for entropy and confidence, not for '{kind}'")
        return self

    def plan(self, decoder: str, family: str, gen_length: int, settings: Values) -> list[Setting]:
        """The runs of a method: one token at a time, then its grid."""
        return plan(decoder, family, gen_length, {**self.settings, **settings}, self.thresholds)


class RatesSection(Recipe):
    """What was measured of a model on a machine, for the estimates of `--list`."""

    machine: str
    """Where the rates were measured, and of what."""
    rollout_ms: PositiveFloat
    """Milliseconds of collecting per row and step."""
    state_ms: PositiveFloat
    """Milliseconds of training per state: a student's and a teacher's forward, and the step's share."""
    forward_ms: PositiveFloat
    """Milliseconds of decoding per row and forward."""
    tokens_per_forward: PositiveFloat = 4.0
    """Assumed of every setting but one token at a time."""
    rollout_cached_ms: PositiveFloat | None = None
    """The same as `rollout_ms`, with a `cache`; not given: taken to be no faster."""
    decode_gb: PositiveFloat | None = None
    """Memory on the device while collecting and decoding: the weights."""
    train_gb: PositiveFloat | None = None
    """Memory on the device while training: the highest measured, with `train_micro` sequences and an adapter of rank 128."""
    train_micro: PositiveInt = 4
    sequence_gb: float = 0.0
    """Of `train_gb`, what every sequence of the micro-batch holds."""
    adapter_gb: float = 0.0
    """Of `train_gb`, the adapter of rank 128 with its gradient and the optimizer's state."""


class ModelRecipe(Recipe):
    """What every recipe of whole chains has."""

    name: FolderName
    model: str
    device: str | None = None
    dtype: str | None = None
    """Of collecting and decoding; default: the checkpoint's own. Training has `distill.precision`."""
    data_dir: str | None = None
    collect: Values
    """Fields of `tad collect`, without `model`."""
    window: WindowSection = WindowSection()
    distill: Values = Field(default_factory=dict)
    """Fields of `tad distill` that all students share, without `model` and `trajectories`."""
    evaluate: EvaluateSection
    allow_contamination: bool = False
    """Whether problems may be evaluated that were trained on."""
    rates: RatesSection | None = None
    """Measured rates, from which `--list` estimates hours and memory."""

    def check_problems(self, *stores: Values) -> None:
        """Refuse to evaluate on the problems that trajectories are collected of, unless the recipe allows it."""
        if self.allow_contamination:
            return
        asked = {self._problems(task, ()) for task in self.evaluate.tasks}
        for changes in stores:
            trained = self.collect_recipe(changes).tasks
            check_contamination([task.name for task in trained], [task.name for task in self.evaluate.tasks])
            for task in trained:
                if self._problems(task, ("train",)) in asked:
                    raise TadError(
                        f"{self.name}: evaluate.tasks: '{task.name}' is also what trajectories are collected of; "
                        "give another split, or allow_contamination: true"
                    )

    def check_overlap(self, collect: CollectRecipe, asked: Sequence[Example]) -> None:
        """Refuse trajectories of a question that is evaluated, whatever task it is from, unless the recipe allows it."""
        if self.allow_contamination:
            return
        trained = list_examples(collect)
        shared = len(trained) - len(exclude_questions(trained, asked))
        if shared:
            raise TadError(
                f"{self.name}: collect.tasks: {shared} of {len(trained)} questions are also evaluated; name the evaluated task "
                "in their 'exclude', or set allow_contamination: true"
            )

    def _problems(self, task: TaskSection | EvalTask, preferred: tuple[str, ...]) -> tuple[str, str, str]:
        """Task, file and split; one that is not named is a preferred one, where the task has it, else its own default."""
        found = get_task(task.name, self.data_dir, **task.options)
        name, _, path = task.name.partition(":")
        splits = [split for split in preferred if split in found.splits]
        path = str(Path(path or task.options.get("path", "")).absolute())
        return name, path, task.split or (splits or [found.default_split])[0]

    def collect_recipe(
        self, changes: Values | None = None, part: tuple[int, int] | None = None
    ) -> CollectRecipe:
        """`part`: of the prompts, for a round that has its own."""
        values = {**self.collect, **(changes or {})} | ({"part": part} if part else {})
        return parse_recipe(CollectRecipe, self._placed(values), where=f"{self.name}: collect")

    def distill_recipe(self, name: str, store: str, changes: Values, **filled: Any) -> DistillRecipe:
        values: Values = {"report_to": [], **lay_over(self.distill, changes)}
        values |= {"name": name, "model": self.model, "trajectories": [store], **filled}
        if values.get("full"):  # whatever the adapters of the others share
            values.pop("adapter", None)
        if self.device is not None:
            values.setdefault("device", self.device)
        return parse_recipe(DistillRecipe, values, where=f"{self.name}: distill of '{name}'")

    def eval_recipe(self, tasks: list[EvalTask], name: str | None = None) -> EvalRecipe:
        """Of all runs of a model; a run's decoder and settings come later."""
        section = self.evaluate
        values = {
            "name": name,
            "tasks": [task.model_dump() for task in tasks],
            "settings": section.settings,
            "gen_length": section.gen_length or self.collect_recipe().gen_length,
            "batch_size": section.batch_size,
            "graders": section.graders,
        }
        return parse_recipe(EvalRecipe, self._placed(values), where=f"{self.name}: evaluate")

    def _placed(self, values: Values) -> Values:
        """With model and machine, which the sections leave out."""
        where = {"model": self.model, "device": self.device, "dtype": self.dtype, "data_dir": self.data_dir}
        for key in where:
            if key in values:
                raise TadError(f"{self.name}: '{key}' stands at the top of the recipe, not in a section")
        return {**values, **where}


@dataclass(frozen=True)
class Training:
    """A student of a run: the section it is trained with, its trajectories, and the student of the round before."""

    name: str
    values: Values
    round: int
    part: tuple[int, int] | None  # of the prompts
    store: str  # a directory's name; the students of the first round share theirs
    before: Training | None
    collect: Values  # what is special about its collection


class RoundSection(Recipe):
    """What a round does in another way than the others."""

    collect: Values = Field(default_factory=dict)
    """Fields of `collect`, such as `order: parallel`."""
    distill: Values = Field(default_factory=dict)
    """Fields of `distill`, laid over every student's."""


class RunRecipe(ModelRecipe):
    """Everything `tad run` needs."""

    rounds: PositiveInt = 1
    """How often a student is made: from the second round on the last student rolls out, is trained on and is its teacher."""
    split_prompts: bool = False
    """Whether every round has its own part of the prompts, so that all rounds together roll out as often as one."""
    last_round: RoundSection = RoundSection()
    """What the last round does in another way."""
    students: dict[str, Values] = Field(min_length=1)
    """Name -> fields of `distill` laid over the shared ones; another `objective.name` replaces the whole objective."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """Students that are there already, by name, evaluated beside the others as their directories say: by their own decoder at
    its own threshold."""
    decoders: list[str] = Field(default=["fast-dllm"])
    """Of the base, beside one token at a time."""
    student_decoders: list[str] = Field(default=["tad"], min_length=1)
    student_first: bool = True
    """Whether students decode one token at a time too: the slowest run of all, and the first point of their curves."""
    tolerance: float = TOLERANCE
    """Points under the base's accuracy at which speeds are compared."""

    @model_validator(mode="after")
    def _check(self) -> RunRecipe:
        for name in (*self.students, *self.adapters):
            if not name.replace("-", "").replace("_", "").isalnum() or name == "base":
                raise ValueError(
                    f"'{name}' names a directory: letters, digits, - and _ only, and 'base' is taken"
                )
        for name in self.adapters:
            if name in self.students:
                raise ValueError(f"'{name}' is both a student to train and an adapter that is there")
        return self

    def check(self) -> None:
        """Parse every section now, so that nothing is refused after an hour."""
        self.check_problems({}, self.last_round.collect)
        for one in self.trainings():
            self.collect_recipe(one.collect, one.part)
            self.distill_recipe(one.name, "store", one.values)
        self.eval_recipe(self.evaluate.tasks)

    def trainings(self) -> list[Training]:
        """The students to make, round by round."""
        found: list[Training] = []
        for number in range(1, self.rounds + 1):
            before: Sequence[Training | None] = found[-len(self.students) :] or [None] * len(self.students)
            part = (number, self.rounds) if self.split_prompts else None
            own = self.last_round if number == self.rounds else RoundSection()
            for (student, values), last in zip(self.students.items(), before, strict=True):
                name = student if self.rounds == 1 else f"{student}-round{number}"
                store = "trajectories" if last is None else f"trajectories-{name}"
                values = lay_over(values, own.distill)
                found.append(Training(name, values, number, part, store, last, own.collect))
        return found

    def settings_of(self, model: str, family: str) -> list[Setting]:
        """The runs of the base or of a student."""
        if model in self.adapters:
            return [self._own_setting(self.adapters[model])]
        length = self.eval_recipe(self.evaluate.tasks).gen_length
        decoders = [FIRST, *self.decoders] if model == "base" else self.student_decoders
        found = [one for decoder in decoders for one in self.evaluate.plan(decoder, family, length, {})]
        return [one for one in found if one.decoder != FIRST or model == "base" or self.student_first]

    def _own_setting(self, adapter: str) -> Setting:
        """How the directory of a student says that it is decoded."""
        defaults = find_defaults(self.model, adapter)
        shared = dict(self.evaluate.settings)
        if defaults.threshold is None:
            return Setting(defaults.decoder, shared)
        return Setting(defaults.decoder, {"threshold": defaults.threshold, **shared}, defaults.threshold)


def lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """`below` with the fields of `above`; see the module."""
    found: Values = dict(below)
    for key, value in above.items():
        under = found.get(key)
        same = isinstance(under, Mapping) and isinstance(value, Mapping)
        name = under.get("name", _UNNAMED) if same else None  # type: ignore[union-attr]
        if same and value.get("name", name) == name:
            found[key] = lay_over(under, value)  # type: ignore[arg-type]
        else:
            found[key] = value
    return found
