"""`tad convert`, `tad distill`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tad.cli import options, recipes
from tad.errors import TadError


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="An autoregressive checkpoint (Llama, Qwen2, Qwen3): a directory, a hub id or a GGUF file.",
            callback=options.check_source,
        ),
    ],
    overrides: options.Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The directory of the converted model.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Texts to learn from, instead of the recipe's; any number of times: a file of rows with question and answer, "
            "a task, or a store made by `tad collect`."
        ),
    ] = None,
    how: Annotated[
        str | None,
        typer.Option(
            help="adapter: the parent is frozen (default). all: train all weights.",
            callback=options.check_among("--how", ("adapter", "all")),
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Instead of steps: as many as fit, by the speed of the first rows."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe file or a bundled name; default: convert-adapter, or convert-all with --how all."
        ),
    ] = None,
    as_list: Annotated[
        bool, typer.Option("--list", help="Say what it would cost (hours, memory), and write nothing.")
    ] = False,
    resume: options.Resume = False,
    stop_at: Annotated[
        int | None, typer.Option(min=1, help="Save and stop after this step; resume later.")
    ] = None,
    device: options.Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Teach an autoregressive checkpoint to fill blocks of masks: it then drafts for itself, and nothing is lost."""
    from tad.training.convert import convert as run
    from tad.training.convert import plan, with_steps
    from tad.training.recipe import ConvertRecipe

    if steps is not None and minutes is not None:
        raise TadError("give one of --steps and --minutes")
    if out is None and not as_list:
        raise TadError("--out DIR: say where the converted model goes")
    changes = [f"model={json.dumps(source)}", *(overrides or ())]
    changes += [f"data={json.dumps([{'source': one} for one in data])}"] if data else []
    changes += [f"how={how}"] if how else []
    changes += [f"learning.steps={steps}"] if steps else []
    changes += [f"device={device}"] if device else []
    chosen = recipe or ("convert-all" if how == "all" else "convert-adapter")
    values = recipes.load(ConvertRecipe, "convert", chosen, changes)
    options.quieten()
    if as_list:
        found = plan(values)
        if minutes is not None:
            per_step = found.seconds / found.steps
            values = with_steps(values, max(1, int(minutes * 60 / per_step)))
            found = replace(found, steps=values.learning.steps or 1)
        typer.echo(found.describe())
        return
    assert out is not None
    outcome = run(values, out, resume, minutes, stop_at, quiet)
    if outcome.finished:
        typer.echo(
            f"converted: {outcome.path}; try it with: tad generate {shlex.quote(str(out))} 'a question'"
        )
        return
    words = [word for word in sys.argv[1:] if word != "--resume"]
    typer.echo(
        f"stopped after step {outcome.step} of {outcome.steps}; go on with: {shlex.join(['tad', *words, '--resume'])}",
        err=outcome.interrupted,
    )
    if outcome.interrupted:
        raise typer.Exit(130)


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
