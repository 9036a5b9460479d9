"""`tad recipes`: the bundled recipes, which verb takes each, and a copy to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tad.cli.options import AsJson
from tad.errors import TadError


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("recipes")(recipes)


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
    from tad.config import recipe_text

    text = recipe_text(name)
    if copy is None:
        typer.echo(text, nl=False)
        return
    target = copy / f"{Path(name).stem}.yaml" if copy.is_dir() else copy
    if target.exists():
        raise TadError(f"--copy {target}: is there already; give another path")
    target.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {target}; use it with: tad {find_verb(text)} {target}")


def _list(as_json: bool) -> None:
    from tad.config import bundled_recipes, recipe_text

    texts = {name: recipe_text(name) for name in bundled_recipes()}
    rows = [{"name": name, "verb": find_verb(text), "about": _about(text)} for name, text in texts.items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    wide = max(len(row["name"]) for row in rows)
    for row in sorted(rows, key=lambda row: (row["verb"], row["name"])):
        typer.echo(f"{row['verb']:9s} {row['name']:{wide}s}  {row['about']}")


def find_verb(text: str) -> str:
    """The command that takes a recipe, by a key that only its recipes have."""
    import yaml

    keys = set(yaml.safe_load(text))
    marks = {"seeds": "study", "collect": "run", "trajectories": "distill", "data": "pretrain"}
    return next((verb for key, verb in marks.items() if key in keys), "collect")


def _about(text: str) -> str:
    """The first sentence of the comment a recipe begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).split(". ")[0].rstrip(".")
