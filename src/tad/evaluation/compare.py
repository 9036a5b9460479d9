"""Runs held to the first one, on the problems that all of them were asked.

Two runs are comparable where they asked the same examples of the same split with the same template and grader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tad.errors import TadError
from tad.evaluation.analysis import ResultTable, RowSpec, analyse
from tad.evaluation.labels import distinguish, label_runs, tell_apart
from tad.evaluation.measurement import RESAMPLES, MethodRuns, Outcomes
from tad.evaluation.methods import find_runs, read_outcomes, setting_of
from tad.evaluation.results import META, Results


@dataclass(frozen=True)
class Comparison:
    """`table`: every run as a method of one setting, the first one as the base; `notes`: what was left out."""

    table: ResultTable
    notes: list[str]


def compare_runs(folders: Sequence[str | Path], resamples: int = RESAMPLES) -> Comparison:
    """All runs against the first."""
    if len(folders) < 2:
        raise TadError("a comparison needs at least two runs")
    for folder in map(Path, folders):
        if folder.is_dir() and not (folder / META).is_file():
            within = [str(found) for found in find_runs(folder)]
            raise TadError(f"{folder}: no run here, but in it; name one of: {', '.join(within[:6])}")
    runs = [Results.open(folder) for folder in folders]
    names = _name(runs)
    for other, name in zip(runs[1:], names[1:], strict=True):
        _check_tasks(runs[0], other, name)
    outcomes, notes = _share([read_outcomes(run.folder) for run in runs], names)
    methods = [
        MethodRuns(name, [setting_of(run.meta)], [None], [[found]], run.meta.family)
        for run, name, found in zip(runs, names, outcomes, strict=True)
    ]
    specs = [RowSpec(one.name, one.name, one) for one in methods]
    return Comparison(analyse("comparison", "Comparison", specs, methods[0], resamples=resamples), notes)


def _name(runs: Sequence[Results]) -> list[str]:
    """Model and decoder; with the setting, and the directory, where runs share them."""
    paths = [run.folder.resolve() for run in runs]
    twice = next((run.folder for run in runs if paths.count(run.folder.resolve()) > 1), None)
    if twice is not None:
        raise TadError(f"{twice}: is named twice")
    labels = label_runs([run.meta for run in runs])
    settings = [setting_of(run.meta) for run in runs]
    names = [f"{label.model}, {one.decoder}" for label, one in zip(labels, settings, strict=True)]
    valued = [
        name if one.value is None else f"{name} at {one.value:g}"
        for name, one in zip(names, settings, strict=True)
    ]
    placed = [f"{name} ({folder})" for name, folder in zip(valued, tell_apart(paths), strict=True)]
    return distinguish(names, valued, placed)


def _check_tasks(first: Results, other: Results, name: str) -> None:
    """Refuse runs that asked other things in other ways; how many examples they asked may differ."""
    mine, theirs = ({entry["name"]: entry for entry in run.meta.tasks} for run in (first, other))
    shared = [task for task in mine if task in theirs]
    if not shared:
        raise TadError(f"{name}: no task in common: {', '.join(mine)} there and {', '.join(theirs)} here")
    for task in shared:
        for field in ("split", "templates", "options"):
            if mine[task][field] != theirs[task][field]:
                raise TadError(
                    f"{name}: {field} of '{task}' is {mine[task][field]!r} in the first run and {theirs[task][field]!r}"
                    " here; compare runs on the same examples"
                )


def _share(runs: Sequence[Outcomes], names: Sequence[str]) -> tuple[list[Outcomes], list[str]]:
    """The problems every run has, in the first one's order, and a note for each run that has others."""
    for run, name in zip(runs, names, strict=True):
        if np.isnan(run.correct).any():
            raise TadError(f"{name}: has rows without a verdict; run 'tad regrade' on it first")
    places = [{problem: i for i, problem in enumerate(run.problem.tolist())} for run in runs]
    for place, name in zip(places[1:], names[1:], strict=True):
        examples = [{problem.rpartition(" ")[0]: problem for problem in own} for own in (places[0], place)]
        changed = next(
            (key for key in examples[0] if examples[1].get(key, examples[0][key]) != examples[0][key]), None
        )
        if changed is not None:
            raise TadError(f"{name}: '{changed}' is another question than in {names[0]}; the data differ")
    shared = [problem for problem in places[0] if all(problem in place for place in places)]
    if not shared:
        raise TadError(f"{names[1]}: no example in common with {names[0]}")
    notes = [
        f"{name} has {len(place)} rows; the {len(shared)} that all runs share are compared"
        for place, name in zip(places, names, strict=True)
        if len(place) != len(shared)
    ]
    taken = [
        run.take(np.array([place[problem] for problem in shared]))
        for run, place in zip(runs, places, strict=True)
    ]
    return taken, notes
