"""`tad init`, `tad run`, `tad study`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tad.cli import options, recipes
from tad.cli.trajectories import CollectConsole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tad.evaluation.run import OnProgress
    from tad.evaluation.study.estimate import StageEstimate
    from tad.evaluation.study.plan import CellState
    from tad.evaluation.study.recipe import ModelRecipe
    from tad.evaluation.sweep import Setting


def init(
    data: Annotated[
        Path,
        typer.Option(help="Questions to learn from: jsonl with question and answer or tests (`tad tasks`)."),
    ],
    model: Annotated[str, typer.Option(help="The model to distil.", callback=options.check_source)],
    test: Annotated[
        Path | None, typer.Option(help="Questions to be asked at the end (default: every fifth is held out).")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="What the teacher is asked to do with the reference answer.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The recipe to write.")] = Path("my.yaml"),
) -> None:
    """Write a commented recipe for your own questions; `tad run` takes it to a report."""
    from tad.evaluation.study.own_data import write_recipe

    written = write_recipe(out, model, data, test, instruction)
    for line in written.warnings:
        typer.echo(line, err=True)
    for path in (*written.files, written.recipe):
        typer.echo(f"wrote {path}")
    typer.echo(f"go on with: {shlex.join(['tad', 'run', str(written.recipe)])}")


def run(
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    out: options.RunDir = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this stage: collect, window, distill, evaluate or report; any number of times."
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="Estimated hours and memory of each stage; run nothing.")
    ] = False,
) -> None:
    """The whole method: collect, window, distil, evaluate, report. Run the same command again to continue."""
    from tad.evaluation.study.chain import STAGES, Chain
    from tad.evaluation.study.recipe import RunRecipe
    from tad.evaluation.tables import show_table

    values = recipes.load(RunRecipe, "run", recipe, overrides)
    folder = out or Path("runs") / values.name
    if show:
        from tad.evaluation.study.estimate import estimate_run

        values.check()
        typer.echo(list_estimates(values, estimate_run(values)))
        return
    chosen = tuple(stage) if stage else STAGES
    options.quieten()
    with ConsoleListener() as listener:
        chain = Chain(values, folder, listener)
        complete = chain.run(chosen)
    if not complete:
        words = ["tad", "run", recipe, *(overrides or ()), "--out", str(folder)]
        words += [word for name in stage or () for word in ("--stage", name)]
        stop(words)
    if "evaluate" in chosen:
        typer.echo(f"\n{show_table(chain.table())}")
    typer.echo(f"written: {folder}")


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
    from tad.evaluation.study.recipe import StudyRecipe
    from tad.evaluation.study.study import Study
    from tad.evaluation.tables import as_markdown

    values = recipes.load(StudyRecipe, "study", recipe, overrides)
    folder = out or Path("runs") / values.name
    options.quieten()
    with ConsoleListener() as listener:
        work = Study(values, folder, listener)
        if show:
            from tad.evaluation.study.estimate import estimate_study

            if values.rates is not None:
                typer.echo(list_estimates(values, estimate_study(work)))
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
    from tad.evaluation.study.plan import DONE, UNGRADED
    from tad.evaluation.tables import align

    rows = [("table", "method", "seed", "state")]
    for one in states:
        method = one.method if one.trial is None else f"{one.method}, trial {one.trial}"
        rows.append((one.table, method, "-" if one.seed is None else f"{one.seed}", one.state))
    done = sum(one.state in (DONE, UNGRADED) for one in states)
    return f"{align(rows)}\n{done} of {len(states)} cells are decoded"


def list_estimates(recipe: ModelRecipe, stages: Sequence[StageEstimate]) -> str:
    """`--list`: a line per stage with hours and memory, then what was assumed."""
    from tad.evaluation.tables import align

    rates = recipe.rates
    if rates is None:
        return f"{recipe.name}: has no section 'rates', so there is nothing to estimate from"
    rows = [("stage", "work", "hours", "GB")]
    rows += [(one.stage, one.work, f"{one.hours:.1f}", f"{one.gigabytes:.0f}") for one in stages]
    rows.append(("all", "", f"{sum(one.hours for one in stages):.1f}", ""))
    return "\n".join(
        [
            align(rows),
            f"Estimated from {rates.rollout_ms:g} ms per row and step of collecting, {rates.state_ms:g} ms per state of training and "
            f"{rates.forward_ms:g} ms per row and forward of decoding ({rates.machine}).",
            "Assumed: every answer fills its canvas, every rollout is kept, and settings other than one token at a time make "
            f"{rates.tokens_per_forward:g} tokens per forward. Loading, grading and the window are left out. GB: of weights while "
            "decoding, the highest measured while training.",
        ]
    )


def stop(words: list[str]) -> None:
    """Say how to go on, and leave as Ctrl-C does."""
    typer.echo(f"stopped; go on with: {shlex.join(words)}", err=True)
    raise typer.Exit(130)


class ConsoleListener(CollectConsole):
    """Prints how a chain or a study goes on. A first Ctrl-C lets the piece of work in flight finish."""

    def __init__(self) -> None:
        super().__init__("what is in flight")

    def say(self, line: str) -> None:
        super().say(line if line.startswith("\n") else f"   {line.strip()}")

    def decoding(self, setting: Setting) -> OnProgress:
        from tad.cli.evaluate import report_rows

        return report_rows(self, setting)

    def step(self, step: int, steps: int | None) -> None:
        if steps is None:
            self.draw(f"step {step}")
        else:
            self.update(step, steps)
