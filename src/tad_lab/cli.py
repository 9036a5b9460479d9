"""`tad pretrain`, `tad study`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tad.cli import options, recipes
from tad.cli.run import ConsoleListener, list_estimates, stop

if TYPE_CHECKING:
    from tad_lab.study.plan import CellState


def pretrain(
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    out: options.RunDir = None,
    resume: options.Resume = False,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Plan the run to end, fully decayed, after this many minutes of this call."),
    ] = None,
    pause_after: Annotated[
        float | None, typer.Option(help="Save and stop after this many minutes; resume later.")
    ] = None,
) -> None:
    """Train a base model from scratch on the nano world."""
    from tad_lab.pretraining.pretrain import RESULT
    from tad_lab.pretraining.pretrain import pretrain as run
    from tad_lab.pretraining.recipe import PretrainRecipe

    values = recipes.load(PretrainRecipe, "pretrain", recipe, overrides)
    directory = out or Path("runs") / values.name
    result = run(values, directory, resume, max_minutes, pause_after)
    if result.name == RESULT:
        typer.echo(f"model: {result}")
    else:
        again = ["tad", "pretrain", recipe, *(overrides or ()), "--out", str(directory), "--resume"]
        typer.echo(f"paused; go on with: {shlex.join(again)}")


def study(
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    out: options.RunDir = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only tables or methods of this name or pattern; any number of times."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="What is done and what is missing; run nothing.")
    ] = False,
    no_grade: Annotated[
        bool, typer.Option("--no-grade", help="Leave finished runs without a verdict as they are.")
    ] = False,
) -> None:
    """Train and evaluate a matrix of methods and seeds, and write its tables. Run the same command again to continue."""
    from tad.evaluation.tables import as_markdown
    from tad_lab.study.recipe import StudyRecipe
    from tad_lab.study.study import Study

    values = recipes.load(StudyRecipe, "study", recipe, overrides)
    folder = out or Path("runs") / values.name
    options.quieten()
    with ConsoleListener() as listener:
        work = Study(values, folder, listener)
        if show:
            from tad_lab.study.estimate import estimate_study

            if values.rates is not None:
                typer.echo(list_estimates(values.rates, estimate_study(work, only or ())))
            if (
                values.rates is None or folder.is_dir()
            ):  # else nothing is done, and to say so would need the weights
                typer.echo(list_states(work.states(only or ())))
            return
        complete = work.run(only or (), not no_grade)
    for table in work.tables():
        typer.echo(f"\n{as_markdown(table)}")
    typer.echo(f"written: {folder / 'tables'}")
    if not complete:
        words = ["tad", "study", recipe, *(overrides or ()), "--out", str(folder)]
        words += [word for name in only or () for word in ("--only", name)]
        if listener.stopping():
            stop(words)
        typer.echo(f"not complete; go on with: {shlex.join(words)}")


def list_states(states: list[CellState]) -> str:
    """`--list`: a line per cell, then their number."""
    from tad.evaluation.tables import align
    from tad_lab.study.plan import DONE, UNGRADED

    rows = [("table", "method", "seed", "state")]
    for one in states:
        method = one.method if one.trial is None else f"{one.method}, trial {one.trial}"
        rows.append((one.table, method, "-" if one.seed is None else f"{one.seed}", one.state))
    done = sum(one.state in (DONE, UNGRADED) for one in states)
    return f"{align(rows)}\n{done} of {len(states)} cells are decoded"
