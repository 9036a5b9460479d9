"""The tables of the page that are not of results: stores, training runs, and where the numbers come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tad.evaluation.report.gather import Gathered, StoreData, TrainingData
from tad.evaluation.tables import Grid, GridCell, GridGroup, cells, with_error


def grid_stores(stores: Sequence[StoreData]) -> Grid:
    head = ["store", "order", "reference shown", "kept / rollouts", "correct, %", "cannot judge", "mean steps", "mean confidence",
            "steps below 0.5", "quality window", "speed window", "seed"]  # fmt: skip
    rows = []
    for store in stores:
        recipe, summary = store.meta.recipe, store.summary
        correct = 100 * summary.correct / summary.graded if summary.graded else math.nan
        rows.append(
            cells(
                store.name,
                str(recipe.get("order", "-")),
                {True: "yes", False: "no"}.get(recipe.get("privileged"), "-"),  # type: ignore[arg-type]
                f"{summary.kept:,} / {summary.attempted:,}",
                with_error(correct, None, 1),
                f"{summary.unjudged:,}",
                with_error(summary.mean_length, None, 1),
                with_error(summary.mean_confidence, None, 3),
                "-" if math.isnan(summary.unsure) else f"{100 * summary.unsure:.1f} %",
                _window(store, "quality"),
                _window(store, "speed"),
                str(recipe.get("seed", "-")),
            )
        )
    return Grid("Trajectory stores", head, [GridGroup("", rows)])


def _window(store: StoreData, name: str) -> str:
    window = None if store.window is None else store.window.windows.get(name)
    return "not measured" if window is None else str(window)


def grid_trainings(trainings: Sequence[TrainingData]) -> Grid:
    head = ["run", "objective", "steps", "batch", "rate", "parameters", "last loss", "held out: first, last",
            "minutes", "seed", "machine", "commit"]  # fmt: skip
    rows = []
    for run in trainings:
        recipe, call = run.recipe, run.call
        steps = [line["step"] for line in run.log if "step" in line]
        done = call.get("steps") or (max(steps) if steps else 0)
        section = {key: value for key, value in (recipe.get("objective") or {}).items() if key != "name"}
        if call.get("window"):  # named in the recipe, and measured
            section["window"] = f"{section['window']}: {call['window']}"
        learning = recipe.get("learning") or recipe.get("optimization") or {}
        losses, held_out = (
            [line[key] for line in run.log if line.get(key) is not None] for key in ("loss", "held_out_loss")
        )
        tail = losses[-max(1, len(losses) // 20) :]  # as the thick line ends
        trained = call.get("trained_parameters")
        rows.append(
            [
                GridCell(run.name),
                GridCell(run.objective, ", ".join(f"{key} {value}" for key, value in section.items())),
                GridCell(f"{done:,}", "" if call.get("finished") is True else "not finished"),
                *cells(
                    str((recipe.get("batch") or {}).get("size", "-")),
                    str(learning.get("lr", "-")),
                    f"{trained:,}" if isinstance(trained, int) else "-",
                    f"{sum(tail) / len(tail):.4g}" if tail else "-",
                    f"{held_out[0]:.4g}, {held_out[-1]:.4g}" if held_out else "-",
                    str(call.get("minutes", "-")),
                    "-" if run.seed is None else str(run.seed),
                    call.get("device") or "-",
                    show_commit(call),
                ),
            ]
        )
    return Grid("Training runs", head, [GridGroup("", rows)])


def grid_sources(found: Gathered) -> Grid:
    """Where every number is from; the runs of one directory that agree in all of this are one row."""
    head = ["directory", "holds", "n", "seed", "machine", "commit", "tad", "made"]
    merged: dict[tuple[str, ...], list[str]] = {}
    for part in found.parts:
        for run in part.runs:
            folder = _shown(run.folder.parent) if part.group is not None else str(Path(part.name, "answers"))
            *made, when = _made(run.call)
            key = (folder, f"{run.meta.planned:,}", str(run.meta.seed), *made)
            merged.setdefault(key, []).append(when)
    rows = []
    for (folder, *rest), times in merged.items():
        holds = f"{len(times)} evaluation {'run' if len(times) == 1 else 'runs'}"
        rows.append(cells(folder, holds, *rest, max(times)))
    for store in found.stores:
        seed, code = str(store.meta.recipe.get("seed", "-")), store.meta.code or "-"
        kept = f"{store.summary.kept:,}"
        rows.append(
            cells(store.place or _shown(store.folder), "trajectories", kept, seed, "-", "-", code, "-")
        )
    for training in found.trainings:
        count = training.call.get("trajectories")
        trained = "-" if count is None else f"{count:,}"
        seed = "-" if training.seed is None else str(training.seed)
        rows.append(
            cells(training.place or _shown(training.folder), "training", trained, seed, *_made(training.call))
        )
    return Grid("Sources", head, [GridGroup("", rows)])


def _shown(path: Path) -> str:
    """The last three parts: enough to find it, and no one's home directory."""
    return str(Path(*path.parts[-3:]))


def _made(call: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Machine, commit, version and time of a record's call."""
    when = (call.get("time") or "-").replace("T", " ").removesuffix("Z")
    return (call.get("device") or "-", show_commit(call), call.get("versions", {}).get("tad", "-"), when)


def show_commit(call: Mapping[str, Any]) -> str:
    """Ten digits, and the + of a changed tree."""
    commit = call.get("commit") or "-"
    return commit[:10] + ("+" if commit.endswith("+") else "")
