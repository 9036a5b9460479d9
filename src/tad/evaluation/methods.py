"""From directories of runs to methods: which model made a run, what it is called, and which runs are one method.

A method is a model (the base, or a student of it) and a decoder. Training runs are one student only where everything but the
seed is equal: recipe, data, steps and base, as their records say; without a record, only where the weights are the same. A
table holds the methods of one base that were asked the same problems.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tad.decoding import DECODERS, get_decoder
from tad.decoding.decoders import describe, parameters
from tad.errors import TadError
from tad.evaluation.analysis import RESAMPLES, TOLERANCE, MethodRuns, Outcomes, ResultTable, RowSpec, analyse
from tad.evaluation.questions import short_digest
from tad.evaluation.results import META, Results, RunMeta
from tad.evaluation.sweep import FIRST, KINDS, Setting
from tad.training.distill import ADAPTER, MODEL
from tad.training.record import RECORD

BASE = "base"
BASELINE = "fast-dllm"  # the decoder of the base that methods are also held to
_WHERE = (
    "seed",
    "name",
    "device",
    "workers",
    "report_to",
)  # of a training recipe: what does not make it another method
_VARIED = ("threshold", "steps")  # of a decoder: what a sweep varies


@dataclass(frozen=True)
class LoadedRun:
    """A complete, graded run."""

    folder: Path
    meta: RunMeta
    outcomes: Outcomes


@dataclass(frozen=True)
class RunLabel:
    """Which model made a run. Runs of one `series` differ in the training seed alone."""

    base: str  # fingerprint
    model: str  # 'base', or the student's name
    series: str
    seed: int | None = None

    @property
    def is_base(self) -> bool:
        return self.model == BASE


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


def find_runs(folder: str | Path) -> list[Path]:
    """The directories of runs in or under a folder, in order."""
    found = [Path(path) for path, files in _walk(Path(folder)) if META in files]
    if not found:
        raise TadError(f"{folder}: no runs here; make some with 'tad eval'")
    return found


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for path, inner, files in os.walk(folder):
        inner[:] = [] if META in files else sorted(name for name in inner if not name.startswith("."))
        yield path, files


@lru_cache(maxsize=4096)
def _read_outcomes(folder: Path, *stamps: tuple[str, int, int]) -> Outcomes:
    return Outcomes.of(Results.open(folder).rows())


def read_outcomes(folder: Path) -> Outcomes:
    """Of the rows that are there; read again only when their files change."""
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


# Names


def read_record(meta: RunMeta, trainings: Sequence[Path] = ()) -> dict[str, Any] | None:
    """The record of the training that the adapter, or the model trained whole, came from; None for a base.

    It is looked for where the weights were, then among `trainings`: directories may have been moved together, and then the
    last two names still fit.
    """
    source = meta.source["adapter"] or meta.source["model"]
    path = Path(str(source))
    folder = path.parent if path.name in (ADAPTER, MODEL) else path
    moved = (one for one in trainings if one.resolve().parts[-2:] == folder.parts[-2:])
    for place in (folder, *moved):
        if (place / RECORD).is_file():
            record = json.loads((place / RECORD).read_text(encoding="utf-8"))
            # A base that was pretrained here has a record too, and is a base all the same.
            trained = isinstance(record, dict) and "recipe" in record
            if trained and (meta.adapter is not None or "objective" in record["recipe"]):
                return dict(record)
    return None


def label_runs(metas: Sequence[RunMeta], trainings: Sequence[Path] = ()) -> list[RunLabel]:
    """Which model made each run. A name belongs to one series: where two would share it, their directories tell them apart."""
    labels: list[RunLabel] = []
    sources: dict[str, str] = {}  # series -> where its weights were
    weights: dict[tuple[str, int | None], str] = {}
    for meta in metas:
        record = read_record(meta, trainings)
        if meta.adapter is None and record is None:
            labels.append(RunLabel(meta.model, BASE, meta.model))
            continue
        own = str(meta.adapter or meta.model)
        calls = [{}] if record is None else record.get("calls") or [{}]
        facts: dict[str, Any] = dict(calls[-1])
        base = meta.model if meta.adapter else str(facts.get("fingerprints", {}).get("model", meta.model))
        source = str(meta.source["adapter"] or meta.source["model"])
        name, seed = unseeded(str(meta.source.get("name") or path_name(source)))
        series = own
        if record is not None:
            seed = record["recipe"].get("seed", seed)
            recipe = {key: value for key, value in record["recipe"].items() if key not in _WHERE}
            data = {key: facts.get(key) for key in ("fingerprints", "stores", "trajectories", "steps")}
            series = json.dumps([base, recipe, data], sort_keys=True)
        if (
            weights.setdefault((series, seed), own) != own
        ):  # the same seed and other weights: something else differs
            series = own
        sources.setdefault(series, source)
        labels.append(RunLabel(base, name, series, seed))
    return _tell_apart(labels, sources)


def _tell_apart(labels: Sequence[RunLabel], sources: Mapping[str, str]) -> list[RunLabel]:
    """With one name per series: the first one's, with more of its path where another series has the same."""
    names: dict[str, str] = {}
    for label in labels:
        names.setdefault(label.series, label.model)
    taken = list(names.values())
    for series, name in list(names.items()):
        if taken.count(name) > 1 and series in sources:
            parts = [part for part in Path(sources[series]).parts if part not in (ADAPTER, MODEL, "/")]
            names[series] = "/".join(parts[-2:])
    for series, name in list(names.items()):
        if list(names.values()).count(name) > 1 and series in sources:
            names[series] = f"{name} ({short_digest(series)[:8]})"
    return [RunLabel(one.base, names[one.series], one.series, one.seed) for one in labels]


def unseeded(name: str) -> tuple[str, int | None]:
    """'speed-seed2' as 'speed' and 2."""
    found = re.fullmatch(r"(.+?)[-_., ]*seed[-_= ]?(\d+)", name)
    return (found[1], int(found[2])) if found else (name, None)


def path_name(source: str) -> str:
    """The last part of a path that says something."""
    path = Path(source)
    return path.parent.name if path.name in (ADAPTER, MODEL) and path.parent.name else path.name


def tell_apart(folders: Sequence[Path]) -> list[str]:
    """The directories' names, each with as many parents as it takes to be the only one of its name."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        depth = 1
        while sum(other[-depth:] == own[-depth:] for other in parts) > 1 and depth < len(own):
            depth += 1
        names.append("/".join(own[-depth:]))
    return names


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
    names = {key: name for key, (name, _) in named.items()}
    for finer in (lambda key: f"{named[key][0]} ({named[key][1]})", lambda key: f"{named[key][0]} ({key})"):
        counts = list(names.values())
        names = {key: finer(key) if counts.count(name) > 1 else name for key, name in names.items()}
    return names


def _add_methods(group: RunGroup, members: Sequence[tuple[LoadedRun, RunLabel]], notes: list[str]) -> None:
    names = {label.series: label.model for _, label in members}
    models = sorted(names, key=lambda series: (names[series] != BASE, names[series]))
    for series in models:
        own = [(run, label.seed) for run, label in members if label.series == series]
        firsts = [(run, seed) for run, seed in own if run.meta.decoder["name"] == FIRST]
        swept: dict[str, list[tuple[LoadedRun, int | None]]] = {}
        for run, seed in own:
            if run.meta.decoder["name"] != FIRST:
                swept.setdefault(_decoder_identity(run.meta), []).append((run, seed))
        known = list(DECODERS)
        ordered = sorted(swept.values(), key=lambda entry: _rank(known, entry[0][0].meta.decoder["name"]))
        if firsts and (names[series] == BASE or not swept):
            _add_method(group, names[series], [firsts[:1]] if names[series] == BASE else [firsts], [], notes)
        for chosen in ordered:
            several = (
                sum(one[0][0].meta.decoder["name"] == chosen[0][0].meta.decoder["name"] for one in ordered)
                > 1
            )
            _add_method(group, names[series], [chosen], firsts, notes, several)


def _rank(known: Sequence[str], name: str) -> int:
    return known.index(name) if name in known else len(known)


def _add_method(
    group: RunGroup,
    model: str,
    parts: Sequence[Sequence[tuple[LoadedRun, int | None]]],
    firsts: Sequence[tuple[LoadedRun, int | None]],
    notes: list[str],
    several: bool = False,
) -> None:
    """One method: the settings that all of its training seeds have, the run one token at a time first."""
    runs = [entry for part in parts for entry in part]
    seeds = list(dict.fromkeys(seed for _, seed in runs))
    settings = list({setting_of(run.meta).name: setting_of(run.meta) for run, _ in runs}.values())
    settings.sort(key=lambda one: _careful(one, runs[0][0].meta))
    table: dict[tuple[int | None, str], LoadedRun] = {}
    for run, seed in runs:
        if (seed, setting_of(run.meta).name) in table:
            notes.append(
                f"{run.folder}: the same run is at {table[seed, setting_of(run.meta).name].folder}; one of them counts"
            )
        table.setdefault((seed, setting_of(run.meta).name), run)
    shared = [one for one in settings if all((seed, one.name) in table for seed in seeds)]
    decoder = runs[0][0].meta.decoder["name"]
    name = f"{model}, {decoder}" + (f" ({_other_settings(runs[0][0].meta)})" if several else "")
    if len(shared) < len(settings):
        notes.append(f"{name}: settings that not every training seed has are left out")
    if not shared:
        return
    rows = [[table[seed, one.name] for one in shared] for seed in seeds]
    opening = [_first_of(seed, row[0], firsts) for seed, row in zip(seeds, rows, strict=True)]
    if decoder != FIRST and None not in opening:
        rows = [[first, *row] for first, row in zip(opening, rows, strict=True) if first is not None]
        shared = [setting_of(rows[0][0].meta), *shared]
    chosen = [[_tasks_of(run, group.tasks) for run in row] for row in rows]
    group.methods.append(MethodRuns(name, shared, list(seeds), chosen, group.family, model != BASE))
    group.folders[name] = [[run.folder for run in row] for row in rows]


def _first_of(
    seed: int | None, run: LoadedRun, firsts: Sequence[tuple[LoadedRun, int | None]]
) -> LoadedRun | None:
    """The run one token at a time of the same weights; of several the one beside the method's own runs."""
    mine = [one for one, own in firsts if own == seed and one.meta.adapter == run.meta.adapter]
    return next((one for one in mine if one.folder.parent == run.folder.parent), mine[0] if mine else None)


def _tasks_of(run: LoadedRun, tasks: Sequence[str]) -> Outcomes:
    chosen = [
        entry["name"] if template == "tad" else f"{entry['name']} ({template})"
        for entry in run.meta.tasks
        if entry["name"] in tasks
        for template in entry["templates"]
    ]
    return run.outcomes.take(np.isin(run.outcomes.task, chosen))


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


def _other_settings(meta: RunMeta) -> str:
    return ", ".join(f"{key} {value}" for key, value in _own_settings(meta).items()) or "published settings"


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
