"""The tour behind `tad demo`: the method on the bundled 3M-parameter model, as far as the software goes.

Smoke size: a few dozen problems, so its numbers have wide errors and are printed with them. `MISSING` is what it cannot
show yet.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tad.models import LM
    from tad.tasks import Example, Task

MISSING = (
    "distillation: the trajectory losses and the student's trainer",
    "evaluation: full benchmark runs, sweeps and AUP",
    "serving: the OpenAI-compatible server",
)
TASKS = ("nano-word", "nano-math")
GEN_LENGTH = 96
DECODERS = ("one-by-one", "fast-dllm", "tad", "tad-cached")


def run(family: str = "llada", problems: int = 16) -> None:
    """Decode, collect trajectories and measure the window; `problems` of each task."""
    import torch
    from transformers.utils import logging

    from tad.models import load
    from tad.tasks import get_task

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    started = time.perf_counter()
    lm = load(f"nano-{family}", device="cpu", dtype="float32")
    size = sum(weight.numel() for weight in lm.model.parameters())
    typer.echo(
        f"nano-{family}: {size / 1e6:.1f}M parameters, trained on generated problems, bundled with this package"
    )
    typer.echo(f"Smoke size: {problems} problems of each task, so every number below has a wide error.")
    tasks = [get_task(name, size=problems) for name in TASKS]
    mix = [(task, example) for task in tasks for example in task.examples("test")]
    _show_one(lm, *mix[-1])
    _compare_decoders(lm, mix)
    _trajectories(lm, problems)
    typer.echo(f"\nDone in {time.perf_counter() - started:.0f} s. Not built yet:")
    for part in MISSING:
        typer.echo(f"  - {part}")


@contextmanager
def _stage(title: str) -> Iterator[None]:
    typer.echo(f"\n== {title}")
    began = time.perf_counter()
    yield
    typer.echo(f"   ({time.perf_counter() - began:.0f} s)")


def _show_one(lm: LM, task: Task, example: Example) -> None:
    from rich.console import Console

    from tad.cli.canvas import Canvas
    from tad.generation import generate

    console = Console()
    with _stage(
        "One problem, decoded with the multi-block decoder of TAD (colour: violet first, yellow last)"
    ):
        question = task.prompt(example).text
        typer.echo(f"   {question}")
        canvas = Canvas(GEN_LENGTH, 32, lambda ids: lm.decode(ids), lm.tokens.ends)
        answer = generate(lm, question, decoder="tad", gen_length=GEN_LENGTH, on_step=canvas.take)
        canvas.finish(answer.decoded)
        console.print(canvas.draw(console.width))
        verdict = task.grade(example, answer.text)
        typer.echo(f"   {'right' if verdict.correct else 'wrong'}; {answer.tpf:.2f} tokens per forward")


def _compare_decoders(lm: LM, mix: list[tuple[Task, Example]]) -> None:
    from tad.decoding import decode
    from tad.tasks import Score

    with _stage(f"The same {len(mix)} test problems with each decoder (base model, not distilled)"):
        typer.echo("   decoder          accuracy        tokens per forward   seconds")
        prompts = [lm.encode(task.prompt(example).text) for task, example in mix]
        for name in DECODERS:
            began = time.perf_counter()
            rows = decode(lm, prompts, name, GEN_LENGTH, batch_size=24)
            seconds = time.perf_counter() - began
            score = Score.of(
                [
                    task.grade(example, lm.decode(row.answer))
                    for (task, example), row in zip(mix, rows, strict=True)
                ]
            )
            tpf = sum(len(row.content) for row in rows) / sum(row.forwards for row in rows)
            typer.echo(
                f"   {name:15s} {100 * score.accuracy:5.1f} % +- {100 * score.standard_error:4.1f}"
                f"   {tpf:10.2f}           {seconds:7.1f}"
            )


def _trajectories(lm: LM, problems: int) -> None:
    from tad.config import parse_recipe
    from tad.trajectories.recipe import CollectRecipe
    from tad.trajectories.summary import summarise
    from tad.trajectories.window import choose_windows, measure_decay
    from tad.trajectories.workers import collect_here

    values: dict[str, Any] = {
        "model": lm.source,
        "tasks": [{"name": name, "options": {"size": problems}} for name in TASKS],
        "gen_length": GEN_LENGTH,
        "keep": "all",
        "shard_size": problems,
        "batch_size": problems,
    }
    with tempfile.TemporaryDirectory(prefix="tad-demo-") as scratch:
        for privileged in (False, True):
            shown = "with the reference in the prompt" if privileged else "without the reference"
            with _stage(f"The teacher decodes one token per step, {shown}"):
                recipe = parse_recipe(CollectRecipe, {**values, "privileged": privileged})
                store = collect_here(recipe, Path(scratch) / str(privileged), lm)
                summary = summarise(store)
                typer.echo(
                    f"   {summary.correct} of {summary.attempted} correct; mean length {summary.mean_length:.0f} steps; "
                    f"mean confidence {summary.mean_confidence:.3f}; {summary.bytes_per_row:.0f} bytes a trajectory"
                )
        with _stage(
            "How the student's confidence in the teacher's tokens decays with the steps until their reveal"
        ):
            decay, _, sums = measure_decay(lm, list(store.rows()), states=4, batch_size=24)
            marks = [d for d in (1, 2, 4, 8, 16, 32, 48) if d <= len(decay.mean)]
            typer.echo("   steps       " + "".join(f"{d:>7d}" for d in marks))
            typer.echo("   confidence  " + "".join(f"{decay.mean[d - 1]:>7.2f}" for d in marks))
            for name, window in choose_windows(decay, sums).items():
                reached = "" if window.crossing == window.crossing else f" (never falls to {window.level})"
                typer.echo(f"   {name} window: {window.window}{reached}")
