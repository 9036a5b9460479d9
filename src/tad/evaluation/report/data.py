"""What directories hold: trajectory stores, training runs and evaluation runs, found and read; studies, found.

Anything that cannot be read becomes a note, so that one broken directory does not cost the report. What the runs show
beside each other is `scores`; nothing is drawn here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tad.errors import TadError
from tad.evaluation.results import META as RUN_META
from tad.evaluation.results import Results, RunMeta
from tad.evaluation.row import Row
from tad.evaluation.study.plan import STUDY
from tad.files import read_lines
from tad.training.distill import ADAPTER, LOG, MODEL
from tad.training.record import RECORD
from tad.trajectories.store import META as STORE_META
from tad.trajectories.store import StoreMeta, TrajectoryStore
from tad.trajectories.summary import StoreSummary, summarise
from tad.trajectories.window import Decay, Window, WindowReport

WINDOW = "window.json"


@dataclass(frozen=True)
class Origin:
    """Where and when a directory was made, as far as it says."""

    device: str | None = None
    commit: str | None = None
    time: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Confidence:
    """The teacher's mean confidence at step 1, 2, ... with its standard error and how many reveals are behind it."""

    mean: list[float]
    se: list[float]
    count: list[int]


@dataclass(frozen=True)
class Store:
    """A trajectory store, and the window measured on it."""

    folder: Path
    meta: StoreMeta
    summary: StoreSummary
    confidence: Confidence
    window: WindowReport | None
    name: str  # the directory's, with as many parents as tell stores apart


@dataclass(frozen=True)
class Training:
    """A training run. `recipe` is empty where it has left no record."""

    folder: Path
    recipe: dict[str, Any]
    log: list[dict[str, Any]]
    origin: Origin
    facts: dict[str, Any]  # of the last call: steps, minutes, fingerprints, ...
    title: str | None = None  # what a study calls it
    trial: bool = False  # of a study's tuning, and nothing else

    @property
    def name(self) -> str:
        return self.title or str(self.recipe.get("name") or self.folder.name)

    @property
    def seed(self) -> int | None:
        return self.recipe.get("seed")

    @property
    def objective(self) -> str:
        """The objective's name; pretraining has none of its own."""
        section = self.recipe.get("objective")
        return str(section["name"]) if section else ("masked diffusion" if self.recipe else "unknown")

    @property
    def series(self) -> str:
        """What training runs share that differ in their seed alone; in a study, the method."""
        if self.title is not None:
            return self.title
        own = {key: value for key, value in self.recipe.items() if key not in ("seed", "name", "device")}
        return json.dumps(own, sort_keys=True) if own else str(self.folder)


@dataclass(frozen=True)
class Run:
    """A complete, graded evaluation run. Rows are without prompts, texts and tokens: a study has many of them."""

    folder: Path
    meta: RunMeta
    rows: list[Row]
    origin: Origin

    @property
    def identity(self) -> str:
        """Everything that decides the rows but the decoder."""
        values = {key: value for key, value in self.meta.deciding().items() if key != "decoder"}
        return json.dumps(values, sort_keys=True)


@dataclass
class Gathered:
    """Everything found, in the order it was given; `notes` say what was left out and why."""

    folders: list[Path]
    stores: list[Store] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    studies: list[Path] = field(default_factory=list)  # their directories; `studies` reads them
    notes: list[str] = field(default_factory=list)


def gather(folders: Sequence[str | Path]) -> Gathered:
    """Read whatever stands in or under the directories."""
    found = Gathered([Path(folder) for folder in folders])
    for folder in found.folders:
        if not folder.is_dir():
            raise TadError(f"{folder}: no such directory; give directories that tad's commands have left")
    seen: set[Path] = set()
    for given in found.folders:
        before = len(seen)
        for folder in walk(given):
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                _take(folder, found)
        if len(seen) == before:
            found.notes.append(f"{given}: holds nothing that tad's commands have left")
    names = tell_apart([store.folder for store in found.stores])
    found.stores = [replace(store, name=name) for store, name in zip(found.stores, names, strict=True)]
    return found


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


def walk(folder: Path, studies: bool = True) -> Iterator[Path]:
    """Directories of stores, training runs and evaluation runs under a folder, itself included, in order.

    With `studies`, the directory of a study stands for all in it.
    """
    for path, inner, files in os.walk(folder):
        inner.sort()
        here = Path(path)
        if STORE_META in files or RUN_META in files or (studies and STUDY in files):
            inner.clear()
            yield here
        elif LOG in files:
            inner[:] = [
                name for name in inner if name not in (ADAPTER, MODEL) and not name.startswith("checkpoint")
            ]
            yield here
        inner[:] = [name for name in inner if not name.startswith(".")]


def take_inside(folder: Path, found: Gathered) -> None:
    """Read a study's directory as if it were not one."""
    for inner in walk(folder, studies=False):
        _take(inner, found)


def _take(folder: Path, found: Gathered) -> None:
    try:
        if (folder / STUDY).is_file():
            found.studies.append(folder)
        elif (folder / STORE_META).is_file():
            found.stores.append(read_store(folder, found.notes))
        elif (folder / RUN_META).is_file():
            run = read_run(folder, found.notes)
            found.runs += [] if run is None else [run]
        else:
            found.trainings.append(read_training(folder, found.notes))
    except TadError as error:
        found.notes.append(str(error))


def read_store(folder: Path, notes: list[str]) -> Store:
    """A store with its summary; the window where it has been measured."""
    store = TrajectoryStore.open(folder)
    summary = summarise(store)
    window, measured = None, (folder / WINDOW).is_file()
    try:
        window = _read_window(folder / WINDOW) if measured else None
    except TadError as error:  # the trajectories are whole all the same
        notes.append(str(error))
    if summary.shards < summary.shards_planned:
        notes.append(
            f"{folder}: {summary.shards} of {summary.shards_planned} shards are there; run the same 'tad collect' again"
        )
    elif not measured:
        notes.append(f"{folder}: no window has been measured; run 'tad window {folder} --model MODEL'")
    return Store(folder, store.meta, summary, measure_confidence(store), window, folder.name)


def measure_confidence(store: TrajectoryStore) -> Confidence:
    """By step, over the kept trajectories."""
    length = store.meta.gen_length
    sums, squares, counts = (np.zeros(length) for _ in range(3))
    for row in store.rows():
        step, sure = np.array(row.reveal), np.array(row.teacher_confidence, dtype=float)
        use = ~np.isnan(sure)
        for total, value in ((sums, sure), (squares, sure**2), (counts, np.ones_like(sure))):
            np.add.at(total, step[use] - 1, value[use])
    reached = int((counts > 0).sum())
    sums, squares, counts = sums[:reached], squares[:reached], counts[:reached]
    mean = sums / counts
    with np.errstate(invalid="ignore", divide="ignore"):
        se = np.sqrt(np.maximum(0, squares / counts - mean**2) / (counts - 1))
    return Confidence(mean.tolist(), se.tolist(), counts.astype(int).tolist())


def _read_window(path: Path) -> WindowReport:
    values = read_object(path)
    try:
        decays = [Decay(**_with_nan(values[name])) for name in ("decay", "with_filler")]
        windows = {name: Window(**_with_nan(entry)) for name, entry in values["windows"].items()}
        return WindowReport(values["order"], values["model"], decays[0], decays[1], windows)
    except (KeyError, TypeError, AttributeError):
        raise TadError(f"{path}: is not what 'tad window' writes; run it again") from None


def _with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON's null back to nan."""

    def back(value: Any) -> Any:
        if isinstance(value, list):
            return [back(item) for item in value]
        return math.nan if value is None else value

    return {key: back(value) for key, value in values.items()}


def read_training(folder: Path, notes: list[str]) -> Training:
    """A run of `tad distill` or `tad pretrain`: its log, and its record where it has one."""
    log = list(read_lines(folder / LOG)) if (folder / LOG).is_file() else []
    record = read_object(folder / RECORD) if (folder / RECORD).is_file() else {}
    last = last_call(record)
    if not record:
        notes.append(f"{folder}: has a log and no {RECORD}; the run is under way or was killed")
    elif not last.get("finished", True):
        done, planned = last.get("steps"), last.get("planned_steps")
        notes.append(f"{folder}: stopped after step {done} of {planned}; go on with --resume")
    return Training(folder, record.get("recipe", {}), log, read_origin(last), last)


def read_run(folder: Path, notes: list[str]) -> Run | None:
    """A run whose every row is there and judged; None, and a note, for any other."""
    results = Results.open(folder)
    rows = results.rows()
    if len(rows) < results.meta.planned:
        notes.append(
            f"{folder}: {len(rows)} of {results.meta.planned} rows are there; run the same command again"
        )
        return None
    ungraded = sum(row.correct is None for row in rows)
    if ungraded:
        notes.append(f"{folder}: {ungraded} rows have no verdict; run 'tad regrade {folder}'")
        return None
    record = read_object(folder / RECORD) if (folder / RECORD).is_file() else {}
    slim = [replace(row, prompt="", text="", ids=[], steps=[]) for row in rows]
    return Run(folder, results.meta, slim, read_origin(last_call(record)))


def last_call(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says of the last call that worked on its directory."""
    calls = record.get("calls") or [{}]
    return dict(calls[-1])


def read_origin(call: dict[str, Any]) -> Origin:
    return Origin(
        call.get("device"), call.get("commit"), call.get("time"), call.get("versions", {}).get("tad")
    )


def read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise TadError(f"{path}: is not valid JSON") from None
    if not isinstance(value, dict):
        raise TadError(f"{path}: should hold a JSON object")
    return value
