"""`tad distill`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tad.cli import options, recipes


def distill(
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    out: options.RunDir = None,
    trajectories: Annotated[
        list[str] | None,
        typer.Option(help="A store made by `tad collect`; instead of the recipe's, any number of times."),
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="A store to measure the held-out loss on.")
    ] = None,
    resume: options.Resume = False,
    stop_at: Annotated[
        int | None, typer.Option(min=1, help="Save and stop after this step; resume later.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Teach a model to reveal many tokens at a time, from trajectories it has made itself."""
    from tad.evaluation.quick import quick_evaluation
    from tad.training.batches import warn_of_epochs
    from tad.training.distill import distill as run
    from tad.training.recipe import DistillRecipe
    from tad.trajectories.store import TrajectoryStore

    changes = list(overrides or ())
    changes += [f"trajectories={trajectories}"] if trajectories else []
    changes += [f"validation={validation}"] if validation else []
    values = recipes.load(DistillRecipe, "distill", recipe, changes)
    # Before minutes are spent on the weights.
    stores = [TrajectoryStore.open(store) for store in (*values.trajectories, *values.validation)]
    for store in stores:
        store.check_graded()
    if (warning := warn_of_epochs(values, stores[: len(values.trajectories)])) is not None:
        typer.echo(warning, err=True)
    directory = out or Path("runs") / values.name
    outcome = run(values, directory, resume, quick_evaluation(values), stop_at=stop_at, quiet=quiet)
    if outcome.finished:
        typer.echo(f"{'model' if values.full else 'adapter'}: {outcome.path}")
        return
    again = ["tad", "distill", recipe, *changes, "--out", str(directory), "--resume"]
    typer.echo(f"stopped after step {outcome.step} of {outcome.steps}; go on with: {shlex.join(again)}")
    if outcome.interrupted:
        raise typer.Exit(130)
