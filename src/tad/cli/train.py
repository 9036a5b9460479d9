"""`tad pretrain`."""

from __future__ import annotations

from pathlib import Path

import typer


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("pretrain")(pretrain)


def pretrain(
    recipe: str = typer.Argument(
        help="A recipe file, or the name of a bundled one (pretrain-nano-llada, ...)."
    ),
    overrides: list[str] = typer.Argument(None, help="section.field=value, any number of times."),
    out: Path = typer.Option(None, help="Directory of the run (default: runs/NAME)."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the newest checkpoint in the directory."),
    max_minutes: float = typer.Option(
        None, help="Plan the run to end, fully decayed, after this many minutes of this call."
    ),
    pause_after: float = typer.Option(None, help="Save and stop after this many minutes; resume later."),
) -> None:
    """Train a base model from scratch on the nano world."""
    from tad.config import load_recipe
    from tad.training.pretrain import RESULT
    from tad.training.pretrain import pretrain as run
    from tad.training.recipe import PretrainRecipe

    values = load_recipe(PretrainRecipe, recipe, overrides or ())
    directory = out or Path("runs") / values.name
    result = run(values, directory, resume, max_minutes, pause_after)
    if result.name == RESULT:
        typer.echo(f"model: {result}")
    else:
        typer.echo(f"paused; go on with: tad pretrain {recipe} --out {directory} --resume")
