"""From directories of runs to methods and their tables.

A method is a model (the base, or a student of it; see `labels`) and a decoder, at the settings that were run. A table holds
the methods of one base that were asked the same problems.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tad.decoding import DECODERS, get_decoder
from tad.decoding.decoders import describe, parameters
from tad.errors import TadError
from tad.evaluation.analysis import TOLERANCE, ResultTable, RowSpec, analyse
from tad.evaluation.labels import BASE, RunLabel, distinguish, label_runs, path_name
from tad.evaluation.measurement import RESAMPLES, MethodRuns, Outcomes
from tad.evaluation.results import META, Results, RunMeta
from tad.evaluation.sweep import FIRST, KINDS, Setting
from tad.tasks import is_unjudged

BASELINE = "fast-dllm"  # the decoder of the base that methods are also held to
_VARIED = ("threshold", "steps")  # of a decoder: what a sweep varies


@dataclass(frozen=True)
class LoadedRun:
    """A complete, graded run."""

    folder: Path
    meta: RunMeta
    outcomes: Outcomes


SeededRun = tuple[LoadedRun, "int | None"]  # with its training seed


@dataclass
class RunGroup:
    """The runs of one base that were asked the same problems, as methods."""

    base: str  # the model's name
    fingerprint: str
    family: str
    tasks: list[str]
    runs: list[LoadedRun]
    methods: list[MethodRuns] = field(default_factory=list)
    folders: dict[str, list[list[Path]]] = field(default_factory=dict)  # of each method: [seeds][settings]

    def method(self, name: str) -> MethodRuns | None:
        return next((one for one in self.methods if one.name == name), None)


# Runs


def walk(folder: Path, *marks: str) -> Iterator[tuple[Path, list[str]]]:
    """Every directory in or under a folder with the names of its files, in order; none inside one that holds a marked file."""
    for path, inner, files in os.walk(folder):
        ends = any(mark in files for mark in marks)
        inner[:] = [] if ends else sorted(name for name in inner if not name.startswith("."))
        yield Path(path), files


def find_runs(folder: str | Path) -> list[Path]:
    """The directories of runs in or under a folder, in order."""
    found = [path for path, files in walk(Path(folder), META) if META in files]
    if not found:
        raise TadError(f"{folder}: no runs here; make some with 'tad eval'")
    return found


@lru_cache(maxsize=4096)
def _read_outcomes(folder: Path, *stamps: tuple[str, int, int]) -> tuple[Outcomes, int]:
    rows = Results.open(folder).rows()
    return Outcomes.of(rows), sum(is_unjudged(row.correct, row.reason) for row in rows)


def read_outcomes(folder: Path) -> Outcomes:
    """Of the rows that are there; read again only when their files change."""
    return _read_again(folder)[0]


def count_unjudged(folder: Path) -> int:
    """Answers of a run that their tests could not judge."""
    return _read_again(folder)[1]


def _read_again(folder: Path) -> tuple[Outcomes, int]:
    files = sorted([*folder.glob("rows.jsonl"), *folder.glob("part-*.jsonl")])
    return _read_outcomes(
        folder, *((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    )


def load_run(folder: Path, notes: list[str]) -> LoadedRun | None:
    """A run whose every row is there and judged; None, and a note, for any other."""
    meta, outcomes = Results.open(folder).meta, read_outcomes(folder)
    if len(outcomes.task) < meta.planned:
        notes.append(
            f"{folder}: {len(outcomes.task)} of {meta.planned} rows are there; run the same command again"
        )
        return None
    ungraded = int(np.isnan(outcomes.correct).sum())
    if ungraded:
        notes.append(f"{folder}: {ungraded} rows have no verdict; run 'tad regrade {folder}'")
        return None
    return LoadedRun(folder, meta, outcomes)


def load_runs(folders: Sequence[str | Path], notes: list[str]) -> list[LoadedRun]:
    """The complete, graded runs in or under directories, each once."""
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in find_runs(folder)))
    runs = [run for path in paths if (run := load_run(path, notes)) is not None]
    if not runs:
        raise TadError(f"{folders[0]}: no finished, graded run: {notes[-1]}")
    return runs


# Methods


def group_runs(
    runs: Sequence[LoadedRun],
    notes: list[str],
    trainings: Sequence[Path] = (),
    labels: Sequence[RunLabel] | None = None,
) -> list[RunGroup]:
    """Groups of runs on the same problems; test problems first. Tasks that only some runs have are groups of their own."""
    labels = labels or label_runs([run.meta for run in runs], trainings)
    bases = _name_bases(runs, labels)
    asked: dict[tuple[Any, ...], list[int]] = {}  # base, length, task and its problems -> runs
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        for entry in run.meta.tasks:
            problems = (entry["name"], str(entry["split"]), entry["digest"], *entry["templates"])
            asked.setdefault((label.base, run.meta.gen_length, run.meta.seed, problems), []).append(number)
    shared: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for (base, length, seed, problems), numbers in asked.items():
        shared.setdefault((base, length, seed, tuple(numbers)), []).append(problems[:2])
    found = []
    for (base, _, _, numbers), tasks in shared.items():
        members = [(runs[i], labels[i]) for i in numbers]
        split = all(split == "test" for _, split in tasks)
        group = RunGroup(
            bases[base],
            base,
            members[0][0].meta.family,
            [task for task, _ in tasks],
            [run for run, _ in members],
        )
        _add_methods(group, members, notes)
        found.append((not split, group))
    return [group for _, group in sorted(found, key=lambda entry: entry[0])]


def _name_bases(runs: Sequence[LoadedRun], labels: Sequence[RunLabel]) -> dict[str, str]:
    """Fingerprint -> name, each name once: the dtype tells copies of one model apart, else the fingerprint does."""
    named: dict[str, tuple[str, str]] = {}
    ordered = sorted(
        zip(runs, labels, strict=True), key=lambda entry: not entry[1].is_base
    )  # plain ones know it best
    for run, label in ordered:
        named.setdefault(label.base, (path_name(str(run.meta.source["model"])), run.meta.dtype))
    names = distinguish(
        [name for name, _ in named.values()],
        [f"{name} ({dtype})" for name, dtype in named.values()],
        [f"{name} ({key})" for key, (name, _) in named.items()],
    )
    return dict(zip(named, names, strict=True))


def _add_methods(group: RunGroup, members: Sequence[tuple[LoadedRun, RunLabel]], notes: list[str]) -> None:
    """The base first, then students by name; of each the decoders in their usual order."""
    names = {label.series: label.model for _, label in members}
    for series in sorted(names, key=lambda one: (names[one] != BASE, names[one])):
        own = [(run, label.seed) for run, label in members if label.series == series]
        firsts = [entry for entry in own if entry[0].meta.decoder["name"] == FIRST]
        swept: dict[str, list[SeededRun]] = {}
        for run, seed in own:
            if run.meta.decoder["name"] != FIRST:
                swept.setdefault(_decoder_identity(run.meta), []).append((run, seed))
        if firsts and (names[series] == BASE or not swept):
            chosen = firsts[:1] if names[series] == BASE else firsts
            _add_method(group, f"{names[series]}, {FIRST}", chosen, [], notes)
        order = [*DECODERS]
        decoders = [runs[0][0].meta.decoder["name"] for runs in swept.values()]
        order += [name for name in decoders if name not in order]
        for runs in sorted(swept.values(), key=lambda runs: order.index(runs[0][0].meta.decoder["name"])):
            meta = runs[0][0].meta
            name = f"{names[series]}, {meta.decoder['name']}"
            if decoders.count(meta.decoder["name"]) > 1:
                changed = ", ".join(f"{key} {value}" for key, value in _own_settings(meta).items())
                name += f" ({changed or 'published settings'})"
            _add_method(group, name, runs, firsts, notes)


def _add_method(
    group: RunGroup, name: str, runs: Sequence[SeededRun], firsts: Sequence[SeededRun], notes: list[str]
) -> None:
    """One method: the settings that all of its training seeds have, the run one token at a time first."""
    seeds = list(dict.fromkeys(seed for _, seed in runs))
    settings = {one.name: one for one in (setting_of(run.meta) for run, _ in runs)}
    found: dict[tuple[int | None, str], LoadedRun] = {}
    for run, seed in runs:
        kept = found.setdefault((seed, setting_of(run.meta).name), run)
        if kept is not run:
            notes.append(f"{run.folder}: the same run is at {kept.folder}; one of them counts")
    ordered = sorted(settings.values(), key=lambda one: _careful(one, runs[0][0].meta))
    shared = [one for one in ordered if all((seed, one.name) in found for seed in seeds)]
    if len(shared) < len(ordered):
        notes.append(f"{name}: settings that not every training seed has are left out")
    if not shared:
        return
    rows = [[found[seed, one.name] for one in shared] for seed in seeds]
    opening = [_first_of(seed, row[0], firsts) for seed, row in zip(seeds, rows, strict=True)]
    if None not in opening:
        rows = [[first, *row] for first, row in zip(opening, rows, strict=True) if first is not None]
        shared = [setting_of(rows[0][0].meta), *shared]
    outcomes = [[_tasks_of(run, group.tasks) for run in row] for row in rows]
    trained = not name.startswith(f"{BASE}, ")
    group.methods.append(MethodRuns(name, shared, list(seeds), outcomes, group.family, trained))
    group.folders[name] = [[run.folder for run in row] for row in rows]


def _first_of(seed: int | None, run: LoadedRun, firsts: Sequence[SeededRun]) -> LoadedRun | None:
    """The run one token at a time of the same weights; of several the one beside the method's own runs."""
    mine = [one for one, own in firsts if own == seed and one.meta.adapter == run.meta.adapter]
    return next((one for one in mine if one.folder.parent == run.folder.parent), mine[0] if mine else None)


def _tasks_of(run: LoadedRun, tasks: Sequence[str]) -> Outcomes:
    """The problems of these tasks, task by task: runs may have been asked them in another order."""
    asked = {entry["name"]: entry["templates"] for entry in run.meta.tasks}
    chosen = [
        task if template == "tad" else f"{task} ({template})" for task in tasks for template in asked[task]
    ]
    places = [np.flatnonzero(run.outcomes.task == label) for label in chosen]
    return run.outcomes.take(np.concatenate(places))


def _decoder_identity(meta: RunMeta) -> str:
    return json.dumps(
        {key: value for key, value in meta.decoder.items() if key not in _VARIED}, sort_keys=True
    )


def _own_settings(meta: RunMeta) -> dict[str, Any]:
    """What was set in the decoder beside what a sweep varies: where it differs from the published defaults."""
    name = meta.decoder["name"]
    if name not in DECODERS:
        return {}
    plain = get_decoder(name, meta.family)
    defaults = {**describe(plain), **parameters(plain)}
    mine = {key: value for key, value in meta.decoder.items() if key not in (*_VARIED, "name")}
    return {key: value for key, value in mine.items() if value != defaults.get(key)}


def setting_of(meta: RunMeta) -> Setting:
    """What was set in a run's decoder."""
    decoder = meta.decoder
    varied = next((key for key in _VARIED if decoder.get(key) is not None), None)
    if decoder["name"] == FIRST or varied is None:
        return Setting(decoder["name"], _own_settings(meta))
    return Setting(decoder["name"], {varied: decoder[varied], **_own_settings(meta)}, decoder[varied])


def _careful(setting: Setting, meta: RunMeta) -> float:
    """Sorts settings from careful to fast."""
    if setting.value is None:
        return -1.0
    return setting.value if KINDS.get(meta.decoder.get("rule", "")) == "entropy" else -setting.value


# Tables


def tabulate(
    group: RunGroup,
    tolerance: float = TOLERANCE,
    y_max: float | Mapping[str, float] | None = None,
    resamples: int = RESAMPLES,
    base: MethodRuns | None = None,
    title: str | None = None,
) -> ResultTable:
    """The methods of a group. `base` takes the place of the group's own base one token at a time."""
    base = base or group.method(f"{BASE}, {FIRST}")
    specs = [RowSpec(one.name, one.name, one, len(one.seeds)) for one in group.methods]
    return analyse(
        "main",
        title or group.base,
        specs,
        base,
        group.method(f"{BASE}, {BASELINE}"),
        tolerance,
        y_max=y_max,
        resamples=resamples,
    )


def tabulate_folders(
    folders: Sequence[str | Path],
    tolerance: float = TOLERANCE,
    y_max: float | Mapping[str, float] | None = None,
    base: str | Path | None = None,
    resamples: int = RESAMPLES,
) -> list[ResultTable]:
    """A table for each base and set of problems among the runs in or under the directories. `base` is a run, or a
    directory with one, whose accuracy one token at a time is the reference."""
    notes: list[str] = []
    groups = group_runs(load_runs(folders, notes), notes)
    reference = None if base is None else _load_base(base)
    return [tabulate(group, tolerance, y_max, resamples, reference) for group in groups]


def _load_base(folder: str | Path) -> MethodRuns:
    notes: list[str] = []
    found = [run for run in load_runs([folder], notes) if run.meta.decoder["name"] == FIRST]
    if not found:
        raise TadError(f"{folder}: the base should be a run of '{FIRST}', or a sweep that has one")
    return MethodRuns(
        f"{folder}", [setting_of(found[0].meta)], [None], [[found[0].outcomes]], found[0].meta.family
    )
