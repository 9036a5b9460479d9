"""Typed recipes: a YAML file, checked against a schema, with dotted overrides from the command line.

A schema is a subclass of `Recipe`. Unknown keys and wrong types are one-line errors that name the
field and the fix. This module knows no particular recipe: each room declares its own schema.

`about` says in a sentence what a recipe is, for lists: a text, or one for each variant. It decides nothing.

A file may hold several recipes that differ in a few lines: `variants` maps a recipe's name to what it changes, laid over
the rest of the file section by section; the name "{variant}" stands for its name. Bundled ones are found by these names; one
of a file of your own is FILE:NAME.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import reprlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tad.errors import TadError
from tad.plugins import recipe_folders

BUNDLED = Path(__file__).parent / "recipes"
_VARIANTS, _VARIANT_NAME, _ABOUT = "variants", "{variant}", "about"


DEEPEST = 40  # levels of a recipe
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _check_folder_name(name: str) -> str:
    if not name.isprintable() or "/" in name or name.startswith(".") or len(name) > 200:
        raise ValueError(
            "should be a plain name: it names a folder below runs/, so no '/', and no '.' in front"
        )
    return name


FolderName = Annotated[str, AfterValidator(_check_folder_name)]


class Recipe(BaseModel):
    """A section of a recipe, or a whole one. Unknown keys are refused; values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


R = TypeVar("R", bound=Recipe)


def load_recipe(schema: type[R], source: str | Path, overrides: Iterable[str] = ()) -> R:
    """Read a recipe: `source` is a file, FILE:VARIANT, or a bundled name; `overrides` are `section.field=value`."""
    values, given = read_recipe(source), list(overrides)
    for override in given:
        _apply(values, override)
    return parse_recipe(schema, values, str(find_recipe(source)[0]), given)


def read_recipe(source: str | Path) -> dict[str, Any]:
    """The values of a recipe, not yet checked against a schema."""
    return _read_values(*find_recipe(source))


def parse_recipe(
    schema: type[R], values: dict[str, Any], where: str = "recipe", overrides: Iterable[str] = ()
) -> R:
    """Check plain values against a schema; the first problem found becomes the error, which names the override it
    came with, else `where`."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problem = _choose_problem(schema, error)
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        for override in overrides:
            key = override.partition("=")[0]
            if problem["type"] != "missing" and f"{field}.".startswith(f"{key}."):
                where = f"override '{override}'"
        if problem["type"] == "extra_forbidden":
            raise TadError(f"{where}: unknown key '{field}'{_suggest(schema, problem['loc'])}") from None
        if problem["type"] == "missing":
            raise TadError(
                f"{where}: '{field}' is missing; add it to the recipe or pass {field}=VALUE"
            ) from None
        message = problem["msg"].removeprefix("Value error, ")
        raise TadError(f"{where}: '{field}': {message:.500} (got {_quote(problem['input'])})") from None


def _quote(value: Any) -> str:
    """A value as it stands in an error: a few levels and items of it, whatever it holds."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxdict, short.maxlist = 3, 80, 80, 4, 4
    try:
        return short.repr(value)[:500]
    except ValueError:  # a number of more digits than Python writes
        return "a very long number"


def _choose_problem(schema: type[Recipe], error: ValidationError) -> Any:
    """The first problem; before a missing key, an unknown one that looks like it."""
    problems = error.errors()
    absent = {problem["loc"] for problem in problems if problem["type"] == "missing"}
    for problem in (one for one in problems if one["type"] == "extra_forbidden"):
        *place, name = problem["loc"]
        near = [str(loc[-1]) for loc in absent if list(loc[:-1]) == place]
        if difflib.get_close_matches(str(name), near, n=1):
            return problem
    return problems[0]


def find_recipe(source: str | Path) -> tuple[Path, str | None]:
    """The file of a recipe, and which of its variants is meant: as given, else a bundled recipe of that name."""
    path = Path(source)
    if path.is_file():
        return path, None
    file, colon, variant = str(source).rpartition(":")
    if colon and Path(file).is_file():
        return Path(file), variant
    known, name = bundled_recipes(), path.name.removesuffix(".yaml")
    if len(path.parts) == 1 and name in known:
        found = known[name]
        return found, None if found.stem == name else name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"bundled recipes: {', '.join(sorted(known))}"
    raise TadError(f"no recipe '{source}': not a file and not a bundled name; {hint}")


def bundled_recipes() -> dict[str, Path]:
    """The names of the bundled recipes, those of plugins among them, and the file each is in."""
    found = {}
    for path in (path for folder in (*recipe_folders(), BUNDLED) for path in sorted(folder.glob("*.yaml"))):
        names = _read_yaml(path).get(_VARIANTS) or [path.stem]
        found.update(dict.fromkeys(names, path))
    return found


def recipe_text(source: str | Path) -> str:
    """A recipe as one would write it by itself: the file, or what a variant comes to, under the file's first comment."""
    path, variant = find_recipe(source)
    text = path.read_text(encoding="utf-8")
    if variant is None:
        return text
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return head + yaml.safe_dump(
        _read_values(path, variant), sort_keys=False, default_flow_style=None, width=110
    )


def recipe_about(source: str | Path) -> str:
    """What a recipe says of itself under `about`, else the first sentence of the comment it begins with."""
    path, variant = find_recipe(source)
    said = _read_yaml(path).get(_ABOUT)
    said = said.get(variant) if isinstance(said, dict) else said
    if said is not None:
        return str(said)
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
    )
    return " ".join(line.removeprefix("#").strip() for line in lines).split(". ")[0].rstrip(".")


def _read_values(path: Path, variant: str | None) -> dict[str, Any]:
    """The values of a file, or of one of its variants."""
    values = copy.deepcopy(_read_yaml(path))
    variants = values.pop(_VARIANTS, None)
    values.pop(_ABOUT, None)
    if variants is None and variant is None:
        return values
    if not isinstance(variants, dict) or variant not in variants:
        known = ", ".join(f"{path}:{name}" for name in variants or ()) or f"none: it is one recipe, {path}"
        raise TadError(f"{path}: say which of its variants is meant; known: {known}")
    merged = _lay_over(values, variants[variant] or {})
    return merged | {"name": variant} if merged.get("name") == _VARIANT_NAME else merged


def _lay_over(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged, everything else is replaced."""
    merged = dict(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _lay_over(merged[key], value) if both else value
    return merged


class _Loader(yaml.SafeLoader):
    """Plain YAML, except that a key given twice is an error and not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if str(key_node.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key_node.value}' stands there twice", key_node.start_mark
                )
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


def _problem(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _load(text: str) -> Any:
    """The value of a YAML text, at most DEEPEST levels of it."""
    try:
        value = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError(f"it is nested deeper than {DEEPEST} levels") from None
    except (ValueError, OverflowError) as error:  # dates that are none, numbers of thousands of digits
        raise yaml.YAMLError(f"{error}"[:200]) from None
    level: list[Any] = [[value]]
    seen = set[int]()
    for _ in range(DEEPEST):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [
            one
            for one in itertools.chain.from_iterable(inner)
            if isinstance(one, dict | list) and id(one) not in seen
        ]
        level = list({id(one): one for one in level}.values())
        seen.update(map(id, level))
        if not level:
            return value
    raise yaml.YAMLError(f"it is nested deeper than {DEEPEST} levels")


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    """Once for each text: to find a recipe by its name takes all bundled files."""
    return _load(text)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Not to be changed: it is handed out again."""
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise TadError(f"{path}:{line} is not valid YAML: {_problem(error)}") from None
    except UnicodeDecodeError:
        raise TadError(f"{path}: is not a UTF-8 text file") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise TadError(f"{path}: a recipe is a mapping of keys to values, this is a {type(values).__name__}")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in place. The value is read as YAML, so numbers, lists and null work."""
    key, equals, text = override.partition("=")
    *sections, field = key.split(".")
    override = f"{override[:200]} ..." if len(override) > 200 else override
    if not equals or not all((*sections, field)) or len(sections) > DEEPEST:
        raise TadError(f"override '{override}' should look like section.field=value")
    target: Any = values
    for name in sections:
        target = _step_into(target, name, override)
    place = _place(target, field, override)
    try:
        target[place] = _load(text)
    except yaml.YAMLError as error:
        raise TadError(
            f"override '{override}': the value is not valid YAML ({_problem(error)}); quote it if it is text"
        ) from None


def _step_into(target: Any, name: str, override: str) -> Any:
    """The section or list of that name; a section that is not there is made."""
    place = _place(target, name, override)
    if isinstance(target, dict) and target.get(place) is None:
        target[place] = {}
    if not isinstance(target[place], (dict, list)):
        raise TadError(f"override '{override}': '{name}' is a value, not a section")
    return target[place]


def _place(target: Any, name: str, override: str) -> Any:
    """A key of a section, or the number of an item of a list, counted from 0."""
    if not isinstance(target, list):
        return name
    if not name.isdecimal() or int(name) >= len(target):
        raise TadError(
            f"override '{override}': '{name}' should be a number from 0 to {len(target) - 1}, an item of the list"
        )
    return int(name)


def _suggest(schema: type[Recipe], loc: tuple[int | str, ...]) -> str:
    """'; did you mean x?' for a key that is nearly right, else the keys that exist there."""
    fields: dict[str, Any] = dict(schema.model_fields)
    for part in loc[:-1]:
        if isinstance(part, int):  # an item of a list: the list's annotation already gave the section
            continue
        inner = _schema_of(getattr(fields.get(str(part)), "annotation", None))
        fields = dict(inner.model_fields) if inner else {}
    close = difflib.get_close_matches(str(loc[-1]), fields, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known keys here: {', '.join(sorted(fields))}" if fields else ""


def _schema_of(annotation: Any) -> type[BaseModel] | None:
    """The recipe section inside an annotation such as `Section`, `Section | None` or `list[Section]`."""
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _schema_of(part))), None)
