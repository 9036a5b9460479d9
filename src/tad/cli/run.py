"""`tad init`, `tad run`."""

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
    from tad.evaluation.sweep import Setting
    from tad.pipeline.estimate import StageEstimate
    from tad.pipeline.recipe import RatesSection


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
    from tad.pipeline.own_data import write_recipe

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
    from tad.evaluation.tables import show_table
    from tad.pipeline.chain import STAGES, Chain
    from tad.pipeline.recipe import RunRecipe

    values = recipes.load(RunRecipe, "run", recipe, overrides)
    folder = out or Path("runs") / values.name
    if show:
        from tad.pipeline.estimate import estimate_run
        from tad.pipeline.rates import find_rates

        values.check()
        options.quieten()
        with options.busy("measuring this machine" if values.rates is None else "counting"):
            rates = find_rates(values)
        typer.echo(list_estimates(rates, estimate_run(values, rates)))
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
        typer.echo("\n".join(["", *chain.conclude()]))
    typer.echo(f"written: {folder}")


def list_estimates(rates: RatesSection, stages: Sequence[StageEstimate]) -> str:
    """`--list`: a line per stage with hours and memory, then what was assumed."""
    from tad.evaluation.tables import align

    rows = [("stage", "work", "hours", "GB")]
    rows += [(one.stage, one.work, f"{one.hours:.1f}", _gigabytes(one)) for one in stages]
    rows.append(("all", "", f"{sum(one.hours for one in stages):.1f}", ""))
    return "\n".join(
        [
            align(rows),
            f"Estimated from {rates.rollout_ms:.3g} ms per row and step of collecting, {rates.state_ms:.3g} ms per state of training and "
            f"{rates.forward_ms:.3g} ms per row and forward of decoding ({rates.machine}).",
            "Assumed: every answer fills its canvas, every rollout is kept, and settings other than one token at a time make "
            f"{rates.tokens_per_forward:g} tokens per forward. Loading, grading and the window are left out. GB: of weights while "
            "decoding, the highest measured while training.",
        ]
    )


def _gigabytes(one: StageEstimate) -> str:
    if one.gigabytes is None:
        return "-"
    return f"{one.gigabytes:.0f}" if one.gigabytes >= 10 else f"{one.gigabytes:.2g}"


def stop(words: list[str]) -> None:
    """Say how to go on, and leave as Ctrl-C does."""
    typer.echo(f"stopped; go on with: {shlex.join(words)}", err=True)
    raise typer.Exit(130)


class ConsoleListener(CollectConsole):
    """Prints how a chain goes on. A first Ctrl-C lets the piece of work in flight finish."""

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
