"""Cells: a method and a seed, resolved to the recipes that decide the result, and named by a hash of those.

    store     <- base, collect recipe, how the window is measured; in later rounds the student that rolls out
    student   <- store, distill recipe (its seed in it)
    answers   <- base, student, dtype, questions
    cell      <- answers, decoder, thresholds

So cells share whatever they have in common, and a change of the recipe makes new what it changes and nothing else. The
version of the code is noted in every record and is not in the hash.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from tad.errors import TadError
from tad.evaluation.questions import Questions
from tad.evaluation.recipe import EvalTask
from tad.evaluation.sweep import Setting
from tad.models.stored import parse_dtype
from tad.pipeline.recipe import Values, lay_over
from tad.training.recipe import DistillRecipe
from tad_lab.study.recipe import NEVER, MethodSection, StudyRecipe, set_field

_OWN = ("title", "vary", "seeds", "absent")  # what a method does not take over from the one it is like


@dataclass(frozen=True)
class Base:
    """Which weights a study is about."""

    model: str  # fingerprints
    tokenizer: str
    family: str
    dtype: str  # of the checkpoint, which the recipe may override


@dataclass(frozen=True)
class ResolvedMethod:
    """A method with everything it inherits, and no `vary` left."""

    name: str
    title: str
    store: str | None
    layers: list[
        tuple[str, Values]
    ]  # changes of `distill`: those of the methods it is like first, then its own
    decoder: str
    settings: Values
    seeds: list[int] | None
    tuned_as: str | None  # whose trials decide its training
    absent: str | None
    before: str | None = None  # the method of the round before
    part: tuple[int, int] | None = None  # of the prompts

    def distill(self, trial: Values | None = None) -> Values:
        """All layers; a trial stands right above the method that was tuned, below what is changed in this one."""
        found: Values = {}
        for name, values in self.layers:
            found = lay_over(found, values)
            if trial is not None and name == self.tuned_as:
                found = lay_over(found, trial)
        return found


@dataclass(frozen=True)
class Source:
    """Trajectories: a store of the recipe, which part of its prompts, and whose student rolls out (None: the base)."""

    store: str
    part: tuple[int, int] | None = None
    teacher: Cell | None = None


@dataclass(frozen=True)
class Cell:
    """One thing to train and answer with. `seed` is None where nothing is trained, `trial` counts tuning trials."""

    method: str
    seed: int | None
    trial: int | None
    source: Source | None  # None: the base itself is decoded
    changes: Values  # of `distill`
    tasks: list[EvalTask]
    decoder: str
    settings: Values

    @property
    def label(self) -> str:
        """For people, and for names of directories."""
        name = as_folder(self.method)
        name += f"-trial{self.trial}" if self.trial is not None else ""
        return name if self.seed is None else f"{name}-seed{self.seed}"


def as_folder(method: str) -> str:
    """A method's name as part of a directory's."""
    return method.replace("/", "-").replace("=", "").replace(",", "-").replace(" ", "")


def resolve_methods(recipe: StudyRecipe) -> dict[str, ResolvedMethod]:
    """All methods by name, those of `vary` written out."""
    found: dict[str, ResolvedMethod] = {}
    for name in recipe.methods:
        layers = _lineage(recipe, name, ())
        tuned = [one for one, _ in layers if recipe.tuning is not None and one in recipe.tuning.methods]
        merged: Values = {}
        for one, values in layers:
            own = values if one == name else {k: v for k, v in values.items() if k not in _OWN}
            merged = lay_over(merged, own)
        if merged.get("after"):
            merged.pop("rounds", None)  # of the method it is like
        method = MethodSection.model_validate(merged)
        fields = [dotted.rpartition(".")[2] for dotted in method.vary]
        if len(set(fields)) < len(fields):
            raise TadError(
                f"{recipe.name}: methods.{name}.vary: {', '.join(method.vary)} end alike, so their methods would share names"
            )
        below = [(one, dict(values.get("distill", {}))) for one, values in layers]
        for words, varied in _with_rounds(method):
            full = _full_name(name, words)
            one_of = MethodSection.model_validate(lay_over({**merged, "vary": {}}, varied))
            number = words.get("round") if method.rounds else None
            before = {**words, "round": number - 1} if number and number > 1 else None
            found[full] = ResolvedMethod(
                name=full,
                title=_title(one_of.title or name, words, f"{recipe.name}: methods.{name}.title"),
                store=one_of.store,
                layers=[*below, (full, dict(varied.get("distill", {})))],
                decoder=one_of.decoder or "tad",
                settings=one_of.settings,
                seeds=one_of.seeds,
                tuned_as=tuned[-1] if tuned else None,
                absent=one_of.absent,
                before=method.after if before is None else _full_name(name, before),
                part=(number, method.rounds) if number and method.rounds and method.split_prompts else None,
            )
    _check(recipe, found)
    return found


def _check(recipe: StudyRecipe, found: dict[str, ResolvedMethod]) -> None:
    """Names that stand in one section and should be in another."""
    named = {"base": recipe.base, "baseline": recipe.baseline}
    named |= {f"tables.{name}.baseline": table.baseline for name, table in recipe.tables.items()}
    for where, wanted in named.items():
        if wanted is not None and (wanted not in found or found[wanted].absent):
            raise TadError(f"{recipe.name}: {where}: '{wanted}' should be one of the methods")
    if found[recipe.base].store is not None:
        raise TadError(f"{recipe.name}: base: '{recipe.base}' should be a method without a store")
    for method in found.values():
        if method.store is not None and method.store not in recipe.stores:
            raise TadError(
                f"{recipe.name}: methods.{method.name}.store: '{method.store}' is not one of the stores: {', '.join(recipe.stores)}"
            )
        if method.before is not None and (method.before not in found or found[method.before].store is None):
            raise TadError(
                f"{recipe.name}: methods.{method.name}.after: '{method.before}' is not a method that is trained"
            )
        if method.before is not None and found[method.before].tuned_as != method.tuned_as:
            raise TadError(
                f"{recipe.name}: methods.{method.name}.after: '{method.before}' is tuned by other trials; be like it"
            )
        line, one = [method.name], method
        while one.before is not None:
            one = found[one.before]
            if one.name in line:
                raise TadError(f"{recipe.name}: methods.{method.name}.after: comes after itself")
            line.append(one.name)
    if recipe.validation is not None and recipe.validation not in recipe.stores:
        raise TadError(f"{recipe.name}: validation: '{recipe.validation}' is not one of the stores")
    for name in recipe.tuning.methods if recipe.tuning else ():
        if not any(one.tuned_as == name and one.store is not None for one in found.values()):
            raise TadError(f"{recipe.name}: tuning.methods: '{name}' is not a method that is trained")


def _lineage(recipe: StudyRecipe, name: str, above: tuple[str, ...]) -> list[tuple[str, Values]]:
    """What each method of the line sets, the first ancestor first and the method itself last."""
    if name not in recipe.methods:
        raise TadError(f"{recipe.name}: methods.{above[-1]}.like: '{name}' is not one of the methods")
    if name in above:
        raise TadError(f"{recipe.name}: methods.{name}: is like itself, through {', '.join(above)}")
    own = recipe.methods[name]
    given = own.model_dump(exclude_defaults=True)
    before = [] if own.like is None else _lineage(recipe, own.like, (*above, name))
    return [*before, (name, given)]


def _vary(method: MethodSection) -> Iterator[tuple[dict[str, Any], Values]]:
    """Every combination of the varied fields: their last names with their values, and as changes of the method."""
    for combination in itertools.product(*method.vary.values()):
        values: Values = {}
        words: dict[str, Any] = {}
        for dotted, value in zip(method.vary, combination, strict=True):
            values = set_field(values, dotted, value)
            words[dotted.rpartition(".")[2]] = value
        yield words, values


def _with_rounds(method: MethodSection) -> Iterator[tuple[dict[str, Any], Values]]:
    """`_vary`, each as often as there are rounds."""
    for words, values in _vary(method):
        if method.rounds is None:
            yield words, values
        for number in range(1, (method.rounds or 0) + 1):
            yield {**words, "round": number}, values


def _full_name(name: str, words: dict[str, Any]) -> str:
    suffix = ",".join(f"{key}={value}" for key, value in words.items())
    return f"{name}/{suffix}" if suffix else name


def _title(title: str, words: dict[str, Any], where: str) -> str:
    """The title with what is varied in its braces; without braces, behind it."""
    if not words:
        return title
    if "{" not in title:
        return ", ".join((title, *(f"{key} {value}" for key, value in words.items())))
    try:
        return title.format_map(words)
    except (KeyError, ValueError, IndexError, AttributeError):
        known = ", ".join(f"{{{key}}}" for key in words)
        raise TadError(f"{where}: '{title}' may have {known} in braces, and no other names") from None


def choose(names: list[str], pattern: str, where: str) -> list[str]:
    """The methods that a name or pattern stands for, in order."""
    found = [name for name in names if name == pattern] or [name for name in names if fnmatch(name, pattern)]
    if not found:
        raise TadError(f"{where}: '{pattern}' is none of the methods: {', '.join(names)}")
    return found


class Hashes:
    """Names by content, for one base and one recipe."""

    def __init__(self, recipe: StudyRecipe, base: Base) -> None:
        self.recipe, self.base = recipe, base
        self._questions: dict[str, Questions] = {}

    def store(self, source: Source) -> str:
        values = self.recipe.collect_recipe(self.recipe.stores[source.store], source.part)
        window = self.recipe.window.model_dump()
        window.pop("batch_size")
        decides = [self.base.model, self.base.tokenizer, values.content_hash_fields(), window]
        return digest(decides if source.teacher is None else [*decides, self.student(source.teacher)])

    def student(self, cell: Cell) -> str | None:
        if cell.source is None:
            return None
        return digest([self.store(cell.source), self.training(cell, "", None).content_hash_fields()])

    def answers(self, cell: Cell) -> str:
        recipe = self.recipe.eval_recipe(cell.tasks)
        dtype = str(parse_dtype(self.recipe.dtype or self.base.dtype))
        asked = self.questions(cell.tasks).facts
        return digest(
            [
                self.base.model,
                self.base.tokenizer,
                self.student(cell),
                dtype,
                recipe.gen_length,
                recipe.seed,
                asked,
            ]
        )

    def cell(self, cell: Cell) -> str:
        return digest([self.answers(cell), [setting.name for setting in self.settings(cell)]])

    def training(
        self, cell: Cell, store: str, validation: str | None, start: Values | None = None
    ) -> DistillRecipe:
        """The recipe of a cell's training; `start` says what a later round starts from."""
        filled: Values = {"validation": [validation], "validate_every": NEVER} if validation else {}
        filled |= {"seed": cell.seed or 0, **(start or {})}
        return self.recipe.distill_recipe(cell.label, store, cell.changes, **filled)

    def settings(self, cell: Cell) -> list[Setting]:
        """The runs that make up a cell. A trial is scored by its speeds: it needs no run one token at a time."""
        length = self.recipe.eval_recipe(cell.tasks).gen_length
        found = self.recipe.evaluate.plan(cell.decoder, self.base.family, length, cell.settings)
        return found if cell.trial is None else found[1:]

    def questions(self, tasks: list[EvalTask]) -> Questions:
        """Made once: generating problems takes a while."""
        key = json.dumps([task.model_dump() for task in tasks])
        if key not in self._questions:
            self._questions[key] = Questions(tasks, self.recipe.data_dir)
        return self._questions[key]


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
