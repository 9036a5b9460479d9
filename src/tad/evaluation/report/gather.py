"""What directories hold: trajectory stores, training runs and evaluation runs, found and read for the page.

A *part* is a section of results: the evaluation runs of one base on the same problems, or what a plugin reads of directories
of its own (`REPORTED` in `tad.plugins`). Its function is called with such a directory, with what was gathered so far, which it
adds to, and with whether there are several of them. Anything that cannot be read becomes a note, so that one broken directory
does not cost the report. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.evaluation.analysis import TOLERANCE, ResultTable
from tad.evaluation.labels import tell_apart, training_series, unseeded
from tad.evaluation.measurement import RESAMPLES
from tad.evaluation.methods import LoadedRun, RunGroup, group_runs, load_run, tabulate, walk
from tad.evaluation.results import META as RUN_META
from tad.evaluation.results import Results
from tad.evaluation.tables import Grid, shorten
from tad.files import read_lines
from tad.plugins import additions, resolve
from tad.runs.record import LOG, RECORD, last_call, read_record
from tad.trajectories.store import META as STORE_META
from tad.trajectories.store import StoreMeta, TrajectoryStore
from tad.trajectories.summary import StoreSummary, summarise
from tad.trajectories.window_report import WINDOW, WindowReport, read_report

Say = Callable[[str], None]


@dataclass(frozen=True)
class StoreData:
    """A trajectory store, and the window measured on it."""

    folder: Path
    meta: StoreMeta
    summary: StoreSummary
    window: WindowReport | None
    name: str  # the directory's, with as many parents as tell stores apart
    place: str = ""  # what a study calls it, in place of the directory


@dataclass(frozen=True)
class TrainingData:
    """A training run. `recipe` is empty where it has left no record."""

    folder: Path
    recipe: dict[str, Any]
    log: list[dict[str, Any]]
    call: dict[str, Any]  # the record's last one: machine, commit, steps, minutes, fingerprints, ...
    title: str | None = None  # what a study calls it
    place: str = ""  # likewise, with the study's name
    trial: bool = False  # of a study's tuning, and nothing else

    @property
    def name(self) -> str:
        """As its student is called in tables."""
        return self.title or unseeded(self.folder.name)[0]

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
        own = training_series(self.recipe, self.call) if self.recipe else str(self.folder)
        return self.title or own


@dataclass(frozen=True)
class Trials:
    """What was tried before methods were chosen, as a part shows it folded."""

    about: str
    hint: str
    grid: Grid
    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A section of results. The first table is the one that is not folded."""

    name: str
    about: str
    tables: list[ResultTable]
    runs: list[Results]
    tuning: Trials | None = None
    group: RunGroup | None = None  # of evaluation runs: where each point is from

    @property
    def main(self) -> ResultTable:
        return self.tables[0]


@dataclass
class Gathered:
    """Everything found, in the order it was given; `notes` say what was left out and why."""

    folders: list[Path]
    stores: list[StoreData] = field(default_factory=list)
    trainings: list[TrainingData] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gather(
    folders: Sequence[str | Path],
    tolerance: float = TOLERANCE,
    y_max: float | Mapping[str, float] | None = None,
    resamples: int = RESAMPLES,
    say: Say = lambda _: None,
) -> Gathered:
    """Read whatever stands in or under the directories, those of plugins first."""
    found = Gathered([Path(folder) for folder in folders])
    absent = next((folder for folder in found.folders if not folder.is_dir()), None)
    if absent is not None:
        raise TadError(f"{absent}: no such directory; give directories that tad's commands have left")
    places: dict[Path, Path] = {}
    for given in found.folders:
        inside = {folder.resolve(): folder for folder in find_folders(given)}
        if not inside:
            found.notes.append(f"{given}: holds nothing that tad's commands have left")
        places |= {path: folder for path, folder in inside.items() if path not in places}
    special = {folder: reader for folder in places.values() if (reader := _find_reader(folder)) is not None}
    plain = [folder for folder in places.values() if folder not in special]
    if not places:
        raise TadError(
            f"{found.folders[0]}: holds nothing that tad's commands have left; is it the right directory?"
        )
    for folder, reader in special.items():
        say(f"{folder.name}: its tables")
        try:
            resolve(reader)(folder, found, several=len(special) > 1)
        except TadError as error:
            found.notes.append(f"{folder}: is shown run by run, since its record cannot be made out: {error}")
            plain += find_folders(folder, whole=False)
    _take_plain(plain, found, tolerance, y_max, resamples, say)
    for store in found.stores:
        for kind, window in store.window.windows.items() if store.window else ():
            if not window.reached:
                found.notes.append(f"{store.name}: its {kind} window is {window} within the measured steps")
    return found


def _find_reader(folder: Path) -> str | None:
    """The plugin's function that reads a directory of this kind."""
    return next((reader for name, reader in additions("REPORTED").items() if (folder / name).is_file()), None)


def find_folders(folder: Path, whole: bool = True) -> list[Path]:
    """Directories of stores, training runs and evaluation runs under a folder, itself included, in order.

    With `whole`, a directory that a plugin reads stands for all in it.
    """
    ends = (STORE_META, RUN_META, *(additions("REPORTED") if whole else ()))
    return [path for path, files in walk(folder, *ends) if any(name in files for name in (*ends, LOG))]


def _take_plain(
    folders: Sequence[Path],
    found: Gathered,
    tolerance: float,
    y_max: float | Mapping[str, float] | None,
    resamples: int,
    say: Say,
) -> None:
    runs: list[LoadedRun] = []
    stores: list[StoreData] = []
    for folder in folders:
        try:
            if (folder / STORE_META).is_file():
                stores.append(read_store(folder, found.notes))
            elif (folder / RUN_META).is_file():
                run = load_run(folder, found.notes)
                runs += [] if run is None else [run]
            else:
                found.trainings.append(read_training(folder, found.notes))
        except TadError as error:
            found.notes.append(str(error))
    names = tell_apart([store.folder for store in stores])
    found.stores += [replace(store, name=name) for store, name in zip(stores, names, strict=True)]
    groups = group_runs(runs, found.notes, [training.folder for training in found.trainings])
    for group in groups:
        say(f"{group.base}: {len(group.runs)} runs")
        try:
            table = tabulate(group, tolerance, y_max, resamples)
        except TadError as error:
            found.notes.append(f"{group.base}: {error}")
            continue
        twins = [one for one in groups if one.base == group.base]
        found.parts.append(_as_part(group, table, several=len(twins) > 1))


def _as_part(group: RunGroup, table: ResultTable, several: bool) -> Part:
    metas = [run.meta for run in group.runs]
    splits = [str(entry["split"]) for meta in metas for entry in meta.tasks if entry["name"] in group.tasks]
    facts = {
        "family": [group.family],
        "split": splits,
        "": [meta.dtype for meta in metas],
        "gen_length": [str(meta.gen_length) for meta in metas],
    }
    about = ", ".join(f"{name} {'/'.join(dict.fromkeys(values))}".strip() for name, values in facts.items())
    split = "/".join(dict.fromkeys(splits))
    n = sum(table.tasks.values())
    name = (
        f"{group.base}, {', '.join(map(shorten, table.tasks))} ({split}, n = {n:,})"
        if several
        else group.base
    )
    sources = [Results(run.folder, run.meta) for run in group.runs]
    return Part(name, about, [table], sources, group=group)


# Directories


def read_store(folder: Path, notes: list[str]) -> StoreData:
    """A store with its summary; the window where it has been measured."""
    store = TrajectoryStore.open(folder)
    summary = summarise(store)
    window, measured = None, (folder / WINDOW).is_file()
    try:
        window = read_report(folder) if measured else None
    except TadError as error:  # the trajectories are whole all the same
        notes.append(str(error))
    if summary.shards < summary.shards_planned:
        notes.append(
            f"{folder}: {summary.shards} of {summary.shards_planned} shards are there; run the same 'tad collect' again"
        )
    elif summary.pending:
        notes.append(
            f"{folder}: {summary.pending} rollouts wait for a verdict; run 'tad regrade {folder} --model MODEL'"
        )
    elif not measured:
        notes.append(f"{folder}: no window has been measured; run 'tad window {folder} --model MODEL'")
    return StoreData(folder, store.meta, summary, window, folder.name)


def read_training(folder: Path, notes: list[str]) -> TrainingData:
    """A run of `tad distill` or `tad pretrain`: its log, and its record where it has one."""
    log = list(read_lines(folder / LOG)) if (folder / LOG).is_file() else []
    record = read_record(folder)
    last = last_call(record)
    if not record:
        notes.append(f"{folder}: has a log and no {RECORD}; the run is under way or was killed")
    elif not last.get("finished", True):
        done, planned = last.get("steps"), last.get("planned_steps")
        notes.append(f"{folder}: stopped after step {done} of {planned}; go on with --resume")
    return TrainingData(folder, record.get("recipe", {}), log, last)
