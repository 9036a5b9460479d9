"""`tad run`, `tad study`."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tad.evaluation.run import Progress, Report
    from tad.evaluation.study.plan import Entry
    from tad.evaluation.sweep import Setting
    from tad.trajectories.store import ShardStats

_SELDOM = 5.0  # seconds between lines of progress where nothing can be drawn over


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("run")(run)
    app.command("study")(study)


Source = Annotated[str, typer.Argument(help="A recipe file, or the name of a bundled one.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.field=value, any number of times.", show_default=False)
]


def run(
    recipe: Source,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the run (default: runs/NAME).")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this stage: collect, window, distill, evaluate or report; any number of times."
        ),
    ] = None,
) -> None:
    """The whole method: collect, window, distil, evaluate, report. Run the same command again to continue."""
    from tad.config import load_recipe
    from tad.evaluation.study.chain import STAGES, Chain
    from tad.evaluation.study.recipe import RunRecipe
    from tad.evaluation.study.tables import as_text

    values = load_recipe(RunRecipe, recipe, overrides or ())
    folder = out or Path("runs") / values.name
    chosen = tuple(stage) if stage else STAGES
    quieten()
    chain = Chain(values, folder, Watch())
    if not chain.run(chosen):
        words = ["tad", "run", recipe, *(overrides or ()), "--out", str(folder)]
        words += [word for name in stage or () for word in ("--stage", name)]
        stop(words)
    if "evaluate" in chosen:
        typer.echo(f"\n{as_text(chain.table())}")
    typer.echo(f"written: {folder}")


def study(
    recipe: Source,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the study (default: runs/NAME).")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only tables or methods of this name or pattern; any number of times."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="What is done and what is missing; run nothing.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing that would end after so many minutes.")
    ] = None,
    no_grade: Annotated[
        bool, typer.Option("--no-grade", help="Leave finished runs without a verdict as they are.")
    ] = False,
) -> None:
    """Train and evaluate a matrix of methods and seeds, and write its tables. Run the same command again to continue."""
    from tad.config import load_recipe
    from tad.evaluation.study.recipe import StudyRecipe
    from tad.evaluation.study.study import Study
    from tad.evaluation.study.tables import as_markdown

    values = load_recipe(StudyRecipe, recipe, overrides or ())
    folder = out or Path("runs") / values.name
    quieten()
    watch = Watch()
    work = Study(values, folder, watch)
    if show:
        typer.echo(describe_entries(work.entries(only or ())))
        return
    complete = work.run(only or (), minutes, not no_grade)
    for table in work.tables():
        typer.echo(f"\n{as_markdown(table)}")
    typer.echo(f"written: {folder / 'tables'}")
    if not complete:
        words = ["tad", "study", recipe, *(overrides or ()), "--out", str(folder)]
        words += [word for name in only or () for word in ("--only", name)]
        if watch.stopping():
            stop(words)
        typer.echo(f"not complete; go on with: {shlex.join(words)}")


def describe_entries(entries: list[Entry]) -> str:
    """`--list`: a line per cell, then sums."""
    from tad.evaluation.tables import align

    rows = [("table", "method", "seed", "state", "about")]
    for one in entries:
        seed = "-" if one.seed is None else f"{one.seed}"
        method = one.method if one.trial is None else f"{one.method}, trial {one.trial}"
        about = "" if one.seconds == 0 else "?" if one.seconds is None else f"{one.seconds:.0f} s"
        rows.append((one.table, method, seed, one.state, about))
    known = [one.seconds for one in entries if one.seconds]
    unknown = sum(one.seconds is None for one in entries)
    done = sum(one.seconds == 0 for one in entries)
    rest = f", about {sum(known) / 60:.0f} min left" if known else ""
    rest += f", {unknown} of unknown length" if unknown else ""
    return f"{align(rows)}\n{done} of {len(entries)} cells are decoded{rest}"


def stop(words: list[str]) -> None:
    """Say how to go on, and leave as Ctrl-C does."""
    typer.echo(f"stopped; go on with: {shlex.join(words)}", err=True)
    raise typer.Exit(130)


def quieten() -> None:
    """The library's own bars and warnings would break the lines of progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class Watch:
    """Prints how a chain or a study goes on. A first Ctrl-C lets the piece of work in flight finish."""

    def __init__(self) -> None:
        self.interrupted = False
        self._drawn, self._open = 0.0, False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        typer.echo("\nfinishing what is in flight; press Ctrl-C again to drop it", err=True)

    def stopping(self) -> bool:
        return self.interrupted

    def say(self, line: str) -> None:
        self._end()
        typer.echo(f"   {line}")

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        self._end()
        typer.echo(f"\n== {title}")
        began = time.monotonic()
        yield
        self.say(f"({time.monotonic() - began:.0f} s)")

    def shard(self, shard: int, stats: ShardStats) -> None:
        self.draw(
            f"shard {shard}: {stats.correct} of {stats.attempted - stats.ungraded} graded rollouts right",
            True,
        )

    def begin(self, setting: Setting) -> Report:
        began = time.monotonic()

        def report(progress: Progress) -> None:
            last = progress.rows == progress.total
            left = (progress.total - progress.rows) * (time.monotonic() - began) / max(1, progress.made)
            right = f"accuracy {progress.accuracy:.1f} %, " if progress.graded else ""
            ending = f"{time.monotonic() - began:.1f} s" if last else f"{left:.0f} s left"
            speed = f"{right}TPF {progress.count.tpf:.2f}" if progress.made else "done before"
            self.draw(f"{setting.name}: {progress.rows}/{progress.total}  {speed}  {ending}", last)

        return report

    def step(self, step: int, steps: int | None) -> None:
        self.draw(f"step {step}" + (f" of {steps}" if steps else ""), step == steps)

    def draw(self, line: str, last: bool) -> None:
        """A line of progress: drawn over the one before on a terminal, else now and then."""
        live, now = sys.stderr.isatty(), time.monotonic()
        if not last and now - self._drawn < (0.2 if live else _SELDOM):
            return
        self._drawn = now
        typer.echo(f"\r\x1b[K   {line}" if live else f"   {line}", err=True, nl=last or not live)
        self._open = live and not last

    def _end(self) -> None:
        """Close a line that is being drawn over."""
        if self._open:
            typer.echo("", err=True)
            self._open = False
