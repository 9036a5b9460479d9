"""`tad recipes`: the bundled recipes, which verb takes each, and a copy to change; and how verbs read theirs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tad.cli.options import AsJson
from tad.errors import TadError
from tad.plugins import additions

if TYPE_CHECKING:
    from tad.config import Recipe

R = TypeVar("R", bound="Recipe")
# Where to begin: on a bundled model, and on a released one.
_START = ("run-nano-llada-ltr", "run-llada-small", "run-llada-ltr", "run-llada")
_WIDE = 26  # characters of a name, longest ones apart
_ORDER = ("run", "collect", "distill")
# Verb -> keys that only its recipes have.
_KEYS = {
    "convert": {"data", "how", "block", "held_out"},
    "collect": {"tasks", "gen_length", "shard_size"},
    "distill": {"trajectories", "objective", "learning"},
    "run": {"students", "student_decoders"},
}


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one, with its comments.")] = None,
    copy: Annotated[
        Path | None, typer.Option(help="Write it to this file or directory instead, to be changed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the bundled recipes, or show or copy one. A verb takes a name, a file, and section.field=value after it."""
    if name is None:
        if copy is not None:
            raise TadError("--copy: say which recipe to copy")
        _list(as_json)
        return
    from tad.config import read_recipe, recipe_text

    text = recipe_text(name)
    if copy is None:
        typer.echo(text, nl=False)
        return
    target = copy / f"{Path(name).stem}.yaml" if copy.is_dir() else copy
    if target.exists():
        raise TadError(f"--copy {target}: is there already; give another path")
    target.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {target}; use it with: tad {find_verb(read_recipe(name)) or 'VERB'} {target}")


def _list(as_json: bool) -> None:
    from tad.config import bundled_recipes, read_recipe, recipe_about

    rows = [
        {"name": name, "verb": find_verb(read_recipe(name)) or "-", "about": recipe_about(name)}
        for name in bundled_recipes()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    found = {row["name"] for row in rows}
    typer.echo("Start with one of these (or with `tad init` for your own questions):")
    _show([row for name in _START if name in found for row in rows if row["name"] == name])
    order = {verb: place for place, verb in enumerate(_ORDER)}
    for verb, group in groupby(
        sorted(rows, key=lambda row: (order.get(row["verb"], len(order)), row["verb"])),
        lambda row: row["verb"],
    ):
        typer.echo(f"\ntad {verb} NAME")
        _show(list(group))


def _show(rows: Sequence[Mapping[str, str]]) -> None:
    """A line per recipe, or more where what it says of itself is longer."""
    for row in rows:
        first = f"  {row['name']:{_WIDE}s} "
        typer.echo(
            textwrap.fill(
                row["about"].rstrip("."), 110, initial_indent=first, subsequent_indent=" " * len(first)
            )
        )


def load(schema: type[R], verb: str, source: str, overrides: Sequence[str] | None) -> R:
    """The recipe of a verb; one of another verb is named as such."""
    from tad.config import load_recipe, read_recipe

    try:
        return load_recipe(schema, source, overrides or ())
    except TadError:
        kind = find_verb(read_recipe(source))
        if kind in (verb, None):
            raise
        raise TadError(
            f"{source}: is a recipe for `tad {kind}`, not for `tad {verb}`; `tad recipes` lists both"
        ) from None


def find_verb(values: Mapping[str, Any]) -> str | None:
    """The command that takes a recipe, by the keys that only its recipes have; None where they point to several or none."""
    kinds = {**_KEYS, **additions("RECIPE_KEYS")}
    found = sorted((len(keys & values.keys()), verb) for verb, keys in kinds.items())
    return found[-1][1] if found[-1][0] > found[-2][0] else None
