"""`tad eval`, `tad regrade`, `tad points`, `tad compare`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli import options
from tad.cli.progress import Progress
from tad.errors import TadError

if TYPE_CHECKING:
    from tad.evaluation import EvalRecipe, Results
    from tad.evaluation.run import OnProgress, RunProgress
    from tad.evaluation.sweep import Setting


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A parameter of the decoder (threshold=0.4), or of a task (gsm8k.extraction=flexible); repeat it.",
    ),
]
Template = Annotated[str, typer.Option(help="The prompt template of tasks that name none.")]
Graders = Annotated[int | None, typer.Option(min=1, help="Graders at work at once (default: per core).")]
Levels = Annotated[bool, typer.Option("--levels", help="Print every level, too.")]
YMax = Annotated[
    str | None,
    typer.Option(
        help="AUP's y_max in percent: a number, or gsm8k=80.2,math=43.1; default: the table's highest accuracy."
    ),
]
Base = Annotated[
    Path | None, typer.Option(help="Run or sweep whose one-token accuracy the others are held to.")
]
Tolerance = Annotated[
    float, typer.Option(min=0, help="Points below the base's accuracy at which speeds are compared.")
]


def evaluate(
    model: options.Model,
    tasks: Annotated[
        str,
        typer.Option(
            help="Names from `tad tasks`, with commas; gsm8k:plain sets a task's own template; 'nano' is the three nano tasks."
        ),
    ],
    decoder: Annotated[
        str | None,
        typer.Option(
            help="From `tad decoders`, default: the model's own; a sweep takes several, with commas."
        ),
    ] = None,
    adapter: options.Adapter = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the run (default: under runs/eval).")] = None,
    split: Annotated[str | None, typer.Option(help="Which split (default: each task's own).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first N examples of each task.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="N examples of each task, drawn by their ids.")
    ] = None,
    batch: options.BatchSize = 16,
    gen_length: options.GenLength = None,
    settings: Settings = None,
    template: Template = "tad",
    templates: Annotated[
        str | None, typer.Option(help="Several with commas, or 'all': each, and the spread.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="The default grid of thresholds: points and AUP.")
    ] = False,
    threshold: Annotated[
        str | None, typer.Option(help="A threshold; several with commas make a sweep.")
    ] = None,
    y_max: YMax = None,
    base: Base = None,
    tolerance: Tolerance = 1.5,
    no_grade: Annotated[
        bool, typer.Option("--no-grade", help="Only decode; `tad regrade` grades later.")
    ] = False,
    graders: Graders = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = None,
    levels: Levels = False,
    as_json: options.AsJson = False,
) -> None:
    """Accuracy and tokens per forward on tasks. Run the same command again to continue."""
    values = [] if threshold is None else read_numbers("--threshold", threshold)
    named = None if decoder is None else options.split_names(decoder)
    for name in named or ():
        options.check_decoder(name)
    if named == []:
        raise TadError("--decoder: no name given; `tad decoders` lists them")
    swept = sweep or len(values) > 1 or len(named or ()) > 1
    if sweep and values:
        raise TadError("--sweep is the default grid and --threshold is your own: give one of them")
    if swept and workers == "ray":
        raise TadError("--workers ray makes one run; sweep in one process, or make the runs one by one")
    own, task_options = split_settings(settings, None if swept or not values else values[0])

    from tad.evaluation import EvalRecipe, list_tasks
    from tad.evaluation.questions import Questions
    from tad.evaluation.run import Identity
    from tad.evaluation.sweep import plan

    sections = list_tasks(
        options.split_names(tasks),
        split,
        limit,
        sample,
        [template] if templates is None else options.split_names(templates),
        task_options,
    )
    data = None if data_dir is None else str(data_dir)
    questions = Questions(sections, data)
    decoders, length, found = [], 0, own
    for one in named or (None,):
        first, length, found = options.fill_defaults(model, adapter, one, gen_length, own)
        decoders.append(first)
        if swept:
            plan(first, "llada", length, own, values or None)
    recipe = EvalRecipe(
        model=model,
        adapter=adapter,
        tasks=sections,
        decoder=decoders[0],
        settings=own if swept else found,
        gen_length=length,
        seed=seed,
        batch_size=batch,
        graders=graders,
        device=device,
        dtype=dtype,
        data_dir=data,
    )
    folder = out or _default_out(recipe, swept)
    if workers == "ray":
        from tad.evaluation.workers import evaluate_with_ray

        with Progress() as progress:
            results = evaluate_with_ray(recipe, folder, report_rows(progress), not no_grade)
        _show_run(results, levels, as_json)
        return
    with options.busy(f"loading {model}"):
        lm = options.load_model(model, adapter, device, dtype)
        identity = Identity.of(lm)
        if lm.conversion is None:
            lm.merge()
    with Progress("the batch in flight") as progress:
        if not swept:
            from tad.evaluation import evaluate as run

            report = report_rows(progress)
            results = run(lm, recipe, folder, report, progress.stopping, not no_grade, questions, identity)
            _show_run(results, levels, as_json)
        else:
            from tad.evaluation import run_sweep

            runs = run_sweep(
                lm,
                recipe,
                folder,
                decoders,
                values or None,
                lambda setting: report_rows(progress, setting),
                progress.stopping,
                not no_grade,
                questions,
                identity,
            )
            if progress.interrupted:
                pass
            elif no_grade:
                typer.echo(f"decoded; grade with: tad regrade {folder}")
            elif all(run.is_complete() for run in runs):
                _show_points([folder], y_max, base, tolerance, folder, as_json)
            else:  # another process of this run will be the last
                typer.echo(f"{folder}: this process's share is done", err=True)
    if progress.interrupted:
        typer.echo("stopped: run the same command again to continue", err=True)
        raise typer.Exit(130)


def regrade(
    folder: Annotated[
        Path,
        typer.Argument(help="A run of `tad eval`, a sweep of them, or trajectories that are graded later."),
    ],
    missing: Annotated[
        bool, typer.Option("--missing", help="Only rows without a verdict, as always of trajectories.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The model of the trajectories, for its tokenizer.", callback=options.check_source),
    ] = None,
    data_dir: options.DataDir = None,
    graders: Graders = None,
    levels: Levels = False,
    as_json: options.AsJson = False,
) -> None:
    """Grade the texts of a run again, or for the first time where they were decoded without grading."""
    from tad.evaluation import regrade as grade_again
    from tad.evaluation.methods import find_runs
    from tad.trajectories.store import META as STORE

    data = None if data_dir is None else str(data_dir)
    if (folder / STORE).is_file():
        _grade_trajectories(folder, model, data, graders, as_json)
        return
    for results, changed in grade_again(find_runs(folder), data, missing, graders):
        typer.echo(f"{results.folder}: {changed} verdicts changed", err=True)
        _show_run(results, levels, as_json)


def _grade_trajectories(
    folder: Path, model: str | None, data_dir: str | None, graders: int | None, as_json: bool
) -> None:
    from tad.files import finite
    from tad.models import load
    from tad.trajectories.grading import grade_store
    from tad.trajectories.store import TrajectoryStore
    from tad.trajectories.summary import describe_store, summarise

    if model is None:
        raise TadError(f"{folder}: trajectories are read with their tokenizer; name it with --model")
    store = TrajectoryStore.open(folder)
    with options.busy(f"grading {folder}"):
        for _ in grade_store(store, load(model, weights=False), data_dir, graders):
            pass
    typer.echo(json.dumps(finite(asdict(summarise(store)))) if as_json else "\n".join(describe_store(store)))


def points(
    folders: Annotated[
        list[Path], typer.Argument(help="Runs of `tad eval`, or directories of them, for one table.")
    ],
    y_max: YMax = None,
    base: Base = None,
    tolerance: Tolerance = 1.5,
    out: Annotated[Path | None, typer.Option(help="Write the tables there as JSON.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """The curves of sweeps: points, AUP, and the speed at the base's accuracy less the tolerance."""
    _show_points(list(folders), y_max, base, tolerance, out, as_json)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs of `tad eval`; the others are compared with the first.")
    ],
    as_json: options.AsJson = False,
) -> None:
    """Runs beside each other: paired differences on the same examples, and what difference would have been seen."""
    from tad.evaluation import compare_runs
    from tad.evaluation.tables import show_comparison
    from tad.files import finite

    found = compare_runs(runs)
    if as_json:
        typer.echo(json.dumps(finite(asdict(found))))
    else:
        typer.echo(show_comparison(found.table, found.notes))


# Options


def read_numbers(option: str, text: str, whole: bool = False) -> list[float]:
    try:
        found = [float(int(word)) if whole else float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise TadError(f"{option} {text}: should be numbers with commas between them") from None
    if not found:
        raise TadError(f"{option}: no number given")
    if len(set(found)) < len(found):
        raise TadError(f"{option} {text}: a number stands there twice")
    return found


def split_settings(
    settings: list[str] | None, threshold: float | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """`--set` as parameters of the decoder, and as options by task."""
    own: dict[str, Any] = {}
    by_task: dict[str, dict[str, Any]] = {}
    for key, value in options.read_settings(settings, threshold=threshold).items():
        task, _, name = key.rpartition(".")
        target = by_task.setdefault(task, {}) if task else own
        target[name] = value
    return own, by_task


def read_y_max(text: str | None) -> float | dict[str, float] | None:
    if text is None:
        return None
    try:
        if "=" not in text:
            return float(text)
        return {
            task.strip(): float(value)
            for task, _, value in (part.rpartition("=") for part in text.split(","))
        }
    except ValueError:
        raise TadError(
            f"--y-max {text}: should be a percentage, or TASK=PERCENT with commas between them"
        ) from None


def _default_out(recipe: EvalRecipe, swept: bool) -> Path:
    names = [Path(name).name for name in (recipe.model, recipe.adapter) if name]
    return Path("runs/eval") / "-".join([*names, "sweep" if swept else recipe.decoder])


# Progress and printing


def report_rows(progress: Progress, setting: Setting | None = None) -> OnProgress:
    """Draws how far a run is, with its accuracy and tokens per forward so far."""
    progress.begin("" if setting is None else setting.name)

    def report(found: RunProgress) -> None:
        parts = [f"accuracy {found.accuracy:.1f} % of {found.graded}" if found.graded else "not graded"]
        if found.forwards:
            tpf, tpf_all = found.tokens / found.forwards, found.tokens_all / found.forwards
            parts.append(f"TPF {tpf:.2f} ({tpf_all:.2f} with the filler)")
        progress.update(found.rows, found.total, "  ".join(parts), found.made)

    return report


def _show_run(results: Results, levels: bool, as_json: bool) -> None:
    from tad.evaluation.tables import show_summary

    text = (results.folder / "summary.json").read_text(encoding="utf-8")
    if (
        "WORLD_SIZE" in os.environ and not results.is_complete()
    ):  # another process of this run will be the last
        typer.echo(f"{results.folder}: this process's share is done", err=True)
        return
    if as_json:
        typer.echo(text.rstrip())
        return
    typer.echo(show_summary(json.loads(text), levels))
    typer.echo(f"written: {results.folder}")


def _show_points(
    folders: list[Path],
    y_max: str | None,
    base: Path | None,
    tolerance: float,
    out: Path | None,
    as_json: bool,
) -> None:
    from tad.evaluation import tabulate_folders
    from tad.evaluation.tables import show_points
    from tad.files import finite, write_json

    tables = tabulate_folders(folders, tolerance, read_y_max(y_max), base)
    record = [asdict(table) for table in tables]
    if out is not None:
        write_json(out / "points.json" if out.is_dir() else out, record)
    typer.echo(json.dumps(finite(record)) if as_json else "\n\n".join(map(show_points, tables)))
