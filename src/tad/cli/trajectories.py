"""`tad collect`, `tad trajectories`, `tad window`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli import options, recipes
from tad.cli.progress import Progress
from tad.errors import TadError
from tad.files import finite

if TYPE_CHECKING:
    from tad.models import LM
    from tad.trajectories.listener import CollectProgress
    from tad.trajectories.recipe import CollectRecipe
    from tad.trajectories.store import ShardStats, Trajectory, TrajectoryStore


def collect(
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    out: Annotated[Path, typer.Option(help="Directory of the store.")] = Path("runs/trajectories"),
    no_privileged: Annotated[bool, typer.Option("--no-privileged", help="Hide the reference.")] = False,
    workers: options.Workers = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the prompts of each task's first question; collect nothing.")
    ] = False,
) -> None:
    """Roll out the privileged teacher on a task mix, grade, and store the trajectories. Run it again to continue."""
    from tad.trajectories.recipe import CollectRecipe
    from tad.trajectories.summary import describe_store
    from tad.trajectories.workers import collect_here, collect_with_ray, load_teacher

    changes = list(overrides or ())
    changes += ["privileged=false"] if no_privileged else []
    values = recipes.load(CollectRecipe, "collect", recipe, changes)
    if show:
        _show_prompts(values)
        return
    with CollectConsole("the shard in flight") as progress:
        if workers == "ray":
            store = collect_with_ray(values, out, progress)
        else:
            with options.busy(f"loading {values.model}"):
                options.quieten()
                lm = load_teacher(values, values.device)
            progress.begin()
            store = collect_here(values, out, lm, progress)
    typer.echo("\n".join(describe_store(store)))
    if left := len(store.missing()):
        typer.echo(
            f"{left} of {store.meta.shards} shards are missing: run the same command again to continue"
        )
        raise typer.Exit(130 if progress.interrupted else 0)


class CollectConsole(Progress):
    """Prints how a collection goes on: a bar or lines of rollouts, and a line for each shard."""

    def rollouts(self, progress: CollectProgress) -> None:
        right = f", {progress.right} of {progress.graded} right" if progress.graded else ""
        self.update(progress.done, progress.total, f"rollouts{right}")

    def shard(self, shard: int, stats: ShardStats) -> None:
        from tad.tasks import CANNOT_JUDGE

        steps = stats.steps / max(1, stats.attempted)
        unjudged = stats.reasons.get(CANNOT_JUDGE, 0)
        self.draw(
            f"shard {shard}: {stats.correct} of {stats.attempted - stats.ungraded} graded rollouts right, "
            + (f"{unjudged} cannot be judged, " if unjudged else "")
            + f"{stats.kept} kept, {steps:.0f} steps on average",
            last=True,
        )


def _show_prompts(recipe: CollectRecipe) -> None:
    """What teacher and student are given, control tokens included. Needs no weights."""
    from tad.trajectories.collect import Collector

    lm, seen = _load_words(recipe.model), set[int]()
    collector = Collector(lm, recipe.model_copy(update={"compile": False}))
    for item in collector.items:
        if id(item.task) in seen:
            continue
        seen.add(id(item.task))
        shown = next(iter(collector.requests(item)))
        for who, ids in (("teacher", shown.privileged), ("student", shown.plain)):
            typer.secho(
                f"{item.task.name}, {item.example.id}: the {who}'s prompt, {len(ids)} tokens", bold=True
            )
            typer.echo(lm.decode(ids, skip_special=False))
            typer.echo()


def trajectories(
    folder: options.Store,
    show: Annotated[str | None, typer.Option(help="Draw one trajectory; needs --model for text.")] = None,
    model: options.ModelOption = None,
    wrong: Annotated[
        int, typer.Option(min=0, help="Print so many wrong rollouts: question, reference, text, reason.")
    ] = 0,
    animate: Annotated[bool, typer.Option("--animate", help="With --show: step by step.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(help="Write the published trainer's JSONL, references included; needs --model."),
    ] = None,
    import_from: Annotated[
        Path | None, typer.Option("--import", help="Make the store from such a JSONL; needs --model.")
    ] = None,
    data_dir: options.DataDir = None,
    as_json: options.AsJson = False,
) -> None:
    """What a store holds: counts, accuracy by task, lengths, the teacher's confidence; or one trajectory as a picture."""
    from tad.trajectories.store import TrajectoryStore
    from tad.trajectories.summary import describe_store, summarise

    if import_from is not None:
        from tad.trajectories.jsonl_format import import_rows

        if model is None:
            raise TadError("--import makes a store of a model; name it with --model")
        lm = options.load_model(model, device="cpu")  # its weights say whose trajectories they are
        store = import_rows(lm, import_from, folder)
        typer.echo("\n".join(describe_store(store)))
        return
    store = TrajectoryStore.open(folder)
    if wrong:
        _show_wrong(store, wrong)
    elif show is not None:
        _show(store.find(show), store, _load_words(model) if model else None, animate)
    elif export is not None:
        if model is None:
            raise TadError("--export writes text and needs --model for the tokenizer")
        _export(store, export, _load_words(model), None if data_dir is None else str(data_dir))
    elif as_json:
        typer.echo(json.dumps(finite(asdict(summarise(store)))))
    else:
        typer.echo("\n".join(describe_store(store)))


def window(
    folder: options.Store,
    model: Annotated[
        str,
        typer.Option(
            help="The student: the model the trajectories come from.", callback=options.check_source
        ),
    ],
    adapter: options.Adapter = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Trajectories to use, taken evenly over the store (256).")
    ] = None,
    states: Annotated[int | None, typer.Option(min=1, help="States per trajectory (8).")] = None,
    distances: Annotated[
        int | None, typer.Option(min=2, help="Longest distance to measure (half of the canvas).")
    ] = None,
    batch_size: options.BatchSize = 16,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a window that was measured in more states.")
    ] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how the student's confidence decays with the steps until a reveal, and choose the two windows."""
    from tad.runs.fingerprint import fingerprint_model
    from tad.trajectories.recipe import WindowSection
    from tad.trajectories.store import TrajectoryStore
    from tad.trajectories.window import measure_window
    from tad.trajectories.window_report import explain_windows, keep_better_window, show_decay

    store = TrajectoryStore.open(folder)
    given = {"limit": limit, "states": states, "distances": distances, "batch_size": batch_size}
    section = WindowSection.model_validate({name: value for name, value in given.items() if value})
    if not overwrite:
        keep_better_window(folder, section.limit, section.states)
    with options.busy(f"loading {model}"):
        lm = options.load_model(model, adapter, device, dtype)
        if adapter is not None and fingerprint_model(lm) != store.meta.model:  # rolled out by that student?
            lm = options.load_model(model, None, device, dtype)
            lm.start_from(adapter)
    found = fingerprint_model(lm)
    if found != store.meta.model:
        raise TadError(
            f"{folder}: its trajectories were made by another model than {model}; give the one they were collected with "
            f"(fingerprints {store.meta.model}, {found})"
        )
    report = measure_window(lm, store, use_adapter=lm.peft is not None, **section.model_dump())
    if as_json:
        typer.echo((folder / "window.json").read_text(encoding="utf-8"))
        return
    for line in (*show_decay(report), *explain_windows(report)):
        typer.echo(line)
    typer.echo("written: " + ", ".join(str(folder / f"window.{kind}") for kind in ("json", "png", "svg")))


def _load_words(model: str) -> LM:
    """A model for its tokenizer."""
    from tad.models import load

    return load(model, weights=False)


def _show(row: Trajectory, store: TrajectoryStore, lm: LM | None, animate: bool) -> None:
    from rich.console import Console

    from tad.canvas.terminal import Canvas, LiveCanvas
    from tad.decoding import Step

    def spell(ids: list[int]) -> str:
        return lm.decode(ids) if lm is not None else " ".join(str(i) for i in ids) + " "

    block = int(store.meta.recipe.get("block", 32))
    canvas = Canvas(len(row.tokens), block, spell, tuple(store.meta.ends), title=row.id)
    console = Console()
    revealed = [i for i, step in enumerate(row.reveal) if step <= row.n_real]
    if lm is not None:
        console.print(lm.decode(row.plain_ids), style="dim", markup=False, highlight=False)

    def steps() -> Any:
        for position in sorted(revealed, key=lambda i: row.reveal[i]):
            sure = float(row.teacher_confidence[position])
            created = position // block + 1
            yield Step(0, row.reveal[position], [position], [row.tokens[position]], [sure], 0, created)

    if animate and console.is_terminal:
        with LiveCanvas(canvas, console) as live:
            for step in steps():
                live.take(step)
                time.sleep(0.04)
    else:
        for step in steps():
            canvas.take(step)
        console.print(canvas.draw(console.width))
    verdict = row.reason if row.correct is None else f"{'correct' if row.correct else 'wrong'}: {row.reason}"
    console.print(f"{verdict}; {row.n_real} steps, then end filler", markup=False)


def _show_wrong(store: TrajectoryStore, most: int) -> None:
    from itertools import islice

    from tad.canvas.text import printable

    found = list(islice(store.wrong(), most))
    if not found:
        typer.echo(f"{store.folder}: no wrong rollout is kept here")
    for one in found:
        typer.secho(f"{one.id}: {one.reason}", bold=True)
        for name, text in (("question", one.question), ("reference", one.reference), ("answer", one.text)):
            typer.echo(f"  {name}: {printable(text).rstrip()}")
        typer.echo()


def _export(store: TrajectoryStore, path: Path, lm: LM, data_dir: str | None) -> None:
    from tad.trajectories.jsonl_format import export_rows

    with open(path, "w", encoding="utf-8") as file:
        for row in export_rows(lm, store, data_dir):
            file.write(json.dumps(row) + "\n")
    typer.echo(f"written: {path}")
