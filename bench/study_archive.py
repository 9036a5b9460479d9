"""The archive of a study that goes from machine to machine (`study_gpu.py`): files of at most 15 MB, packed and unpacked.

Packed are stores, answers, records, every tenth line of the logs, and the adapters of --keep and of cells that are not decoded
yet. The rows of a model's runs go as columns of one Parquet file, in which runs share the texts they have in common. On a
machine that only goes on, rows stay columns but for those that choose between trials.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tad.errors import TadError
from tad.evaluation.results import META, ROWS, SUMMARY, Results, is_whole
from tad.files import hash_file, read_lines, write_whole
from tad.pipeline.costs import COST
from tad.runs.record import LOG, RECORD, find_result
from tad.trajectories.store import META as STORE
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window_report import WINDOW
from tad_lab.study import StudyRecipe
from tad_lab.study.plan import DONE, STUDY, TUNING, UNGRADED, StudyPlan

NAME, COLUMNS = "study.tar.gz", "rows.parquet"
PART, PARTS = 15 * 10**6, 6
_THIN = 10  # every so many lines of a log
_LEFT_OUT = {"prompt": "", "ids": [], "steps": []}  # of every row


def pack(
    study: StudyPlan, dest: Path, texts: bool = True, parts: int = PARTS, keep: Collection[str] = ()
) -> list[str]:
    """Write NAME.00, NAME.01, ... of at most 15 MB into `dest`; returns the adapters that had to be left out.

    Without `texts`, answers that are graded lose theirs: they can then not be graded anew.
    """
    whole = io.BytesIO()
    left, room = [], parts * PART
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path in _plain_files(study):
            name = str(path.relative_to(study.out))
            _add(tar, name, thin(path) if path.name == LOG else path.read_bytes())
        for folder in sorted((study.out / "answers").glob("*")):
            _add(tar, str((folder / COLUMNS).relative_to(study.out)), as_columns(folder, texts))
        needed = len(gzip.compress(whole.getvalue(), 1))
        if needed > room:
            raise TadError(
                f"{study.out}: packed it is {needed / 1e6:.0f} MB, more than {parts} files of 15 MB; pack without texts"
            )
        room -= needed + 10**6  # weights hardly get smaller, and headers need a little
        for folder in _adapters(study, keep):
            size = sum(path.stat().st_size for path in folder.iterdir())
            if size > room:
                left.append(str(folder.relative_to(study.out)))
                continue
            room -= size
            tar.add(folder, str(folder.relative_to(study.out)))
    _write_parts(dest, gzip.compress(whole.getvalue(), 1))
    return left


def _write_parts(dest: Path, data: bytes) -> None:
    dest.mkdir(parents=True, exist_ok=True)
    for old in dest.glob(f"{NAME}.*"):
        old.unlink()
    for number, low in enumerate(range(0, len(data), PART)):
        (dest / f"{NAME}.{number:02d}").write_bytes(data[low : low + PART])


def put_back(dest: Path, out: Path, back: Path) -> None:
    """The archive at `dest` again, at `back`, with the stores as they are at `out`."""
    whole = io.BytesIO()
    with _open_parts(dest) as packed, tarfile.open(fileobj=whole, mode="w") as tar:
        for entry in packed:
            own = out / entry.name
            if entry.name.startswith("stores/") and own.is_file():
                _add(tar, entry.name, own.read_bytes())
            else:
                tar.addfile(entry, packed.extractfile(entry) if entry.isfile() else None)
    _write_parts(back, gzip.compress(whole.getvalue(), 1))


def _open_parts(dest: Path) -> tarfile.TarFile:
    found = sorted(dest.glob(f"{NAME}.*"))
    if not found:
        raise TadError(f"{dest}: no {NAME}.* there")
    return tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in found)))


def _plain_files(study: StudyPlan) -> Iterable[Path]:
    """What travels as it is; logs are thinned by the caller. Of the stores that students have rolled out only what they cost
    and the window go along: a round that is not finished collects again, unless its trajectories are graded later."""
    out = study.out
    yield from (path for path in (out / STUDY,) if path.is_file())
    sources = [cell.source for _, _, _, cell in study.cells() if cell is not None and cell.source]
    later = [
        name
        for name, values in study.recipe.stores.items()
        if any(task.graded == "later" for task in study.recipe.collect_recipe(values).tasks)
    ]
    rounds = {study.store_folder(one) for one in sources if one.teacher and one.store not in later}
    for folder in sorted((out / "stores").glob("*")):
        if folder in rounds:
            yield from sorted(path for path in folder.iterdir() if path.name in (COST, WINDOW))
            continue
        yield from sorted(path for path in folder.iterdir() if path.suffix in (".json", ".parquet", ".hash"))
    for name in (RECORD, LOG):
        yield from sorted((out / "students").glob(f"*/{name}"))
    for name in (META, SUMMARY, RECORD):
        yield from sorted((out / "answers").glob(f"*/*/{name}"))


def _adapters(study: StudyPlan, keep: Collection[str]) -> list[Path]:
    """Adapters that are kept, then those whose cells have runs to make or whose next round is not trained."""
    kept: list[Path] = []
    unfinished: list[Path] = []
    for _, name, _, cell in study.cells():
        folder = None if cell is None else study.student_folder(cell)
        result = None if folder is None else find_result(folder)
        if cell is None:
            continue
        if result is None:
            before = (
                None
                if cell.source is None or cell.source.teacher is None
                else study.student_folder(cell.source.teacher)
            )
            start = None if before is None else find_result(before)
            unfinished += [] if start is None else [start]
            continue
        if study.state(cell) not in (DONE, UNGRADED):
            unfinished.append(result)
        elif cell.trial is None and any(fnmatch(name, pattern) for pattern in keep):
            kept.append(result)
    return list(dict.fromkeys([*kept, *unfinished]))


def thin(log: Path) -> bytes:
    """First, last and every tenth line, and those of held-out data."""
    lines = list(read_lines(log))
    chosen = [
        line
        for i, line in enumerate(lines)
        if i % _THIN == 0 or i == len(lines) - 1 or "held_out_loss" in line
    ]
    return "".join(json.dumps(line) + "\n" for line in chosen).encode()


SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("run", "task", "template", "id", "level", "question", "text")]
    + [("correct", pa.bool_()), ("reason", pa.string()), ("extracted", pa.string())]
    + [(name, pa.int32()) for name in ("tokens", "tokens_all", "forwards")]
    + [(name, pa.float32()) for name in ("seconds", "share")]
)


def as_columns(folder: Path, texts: bool) -> bytes:
    """All rows of a model's runs as Parquet: those that are still columns, and those in files of their own."""
    tables = []
    for run in sorted(meta.parent for meta in folder.glob(f"*/{META}")):
        rows = [
            {name: getattr(row, name, run.name) for name in SCHEMA.names} for row in Results.open(run).rows()
        ]
        tables += [pa.Table.from_pylist(rows, schema=SCHEMA)] if rows else []
    if not tables and texts and (folder / COLUMNS).is_file():
        return (folder / COLUMNS).read_bytes()
    table = _join(folder / COLUMNS, tables)
    if not texts:
        judged = pc.is_valid(table["correct"])
        for name, nothing in (("text", ""), ("reason", None), ("extracted", None)):
            blank = pa.scalar(nothing, pa.string())
            column = pc.if_else(judged, blank, table[name])
            table = table.set_column(table.schema.get_field_index(name), name, column)
    return _encode(table)


def _encode(table: pa.Table) -> bytes:
    """One row group and a dictionary without limit: a text that many runs give is there once."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=7,
        row_group_size=len(table) + 1,
        dictionary_pagesize_limit=2**30,
        data_page_size=2**26,
    )
    return bytes(sink.getvalue().to_pybytes())


def _join(path: Path, tables: list[pa.Table]) -> pa.Table:
    """These runs, and those of a file that are not among them."""
    found = [table.cast(SCHEMA) for table in tables]
    if path.is_file():
        newer = pa.array({name for table in found for name in table["run"].unique().to_pylist()}, pa.string())
        there = pq.read_table(path).cast(SCHEMA)
        found.append(there.filter(pc.invert(pc.is_in(there["run"], value_set=newer))))
    return pa.concat_tables(found) if found else SCHEMA.empty_table()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> None:
    """A plain file below the folder, and nothing else; `extractall` does not tell them apart before Python 3.11.4."""
    place = PurePosixPath(entry.name)
    if not (entry.isfile() or entry.isdir()) or place.is_absolute() or ".." in place.parts:
        raise TadError(
            f"{entry.name!r:.100}: an archive of a study holds plain files below its folder; pack it again"
        )
    target = folder / place
    (target if entry.isdir() else target.parent).mkdir(parents=True, exist_ok=True)
    if (content := tar.extractfile(entry)) is not None:
        target.write_bytes(content.read())


def unpack(dest: Path, out: Path, recipe: StudyRecipe | None = None) -> None:
    """Bring what was packed into `dest` to the study at `out`; what is whole there stays.

    With a `recipe`, the study only goes on: rows of finished runs stay columns, but for those that choose between trials.
    """
    fresh = out.with_name(f".{out.name}-unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    with _open_parts(dest) as tar:
        for entry in tar:
            _extract(tar, entry, fresh)
    needed = None if recipe is None else _tuning_answers(recipe, fresh)
    for folder in sorted(fresh.glob("answers/*")):
        rows = needed is None or folder.name.rpartition("-")[2] in needed
        _take_answers(folder, out / "answers" / folder.name, rows)
    for folder in sorted([*fresh.glob("stores/*"), *fresh.glob("students/*")]):
        _drop_ungraded(folder, out / folder.relative_to(fresh))
        _take_files(folder, out / folder.relative_to(fresh))
    for path in (path for path in fresh.iterdir() if path.is_file()):
        if not (out / path.name).exists():
            shutil.copy(path, out / path.name)
    shutil.rmtree(fresh)


def _tuning_answers(recipe: StudyRecipe, folder: Path) -> set[str]:
    """The hashes of the answers that trials are scored by."""
    if recipe.tuning is None:
        return set()
    plan = StudyPlan(recipe, folder)
    found = [cell for table, _, _, cell in plan.cells() if table == TUNING]
    return {plan.hashes.answers(cell) for cell in found if cell is not None}


def _take_answers(source: Path, target: Path, rows: bool) -> None:
    """The runs of a model. One that is there stays, unless the archive has more rows or more verdicts of it."""
    runs = sorted(meta.parent for meta in source.glob(f"*/{META}"))
    if not rows and not target.exists() and all(is_whole(run) for run in runs):
        shutil.copytree(source, target)
        return
    table = pq.read_table(source / COLUMNS)
    kept = []
    for run in runs:
        goal, own = target / run.name, table.filter(pc.equal(table["run"], run.name))
        judged = pc.sum(pc.is_valid(own["correct"])).as_py() or 0
        if (goal / META).exists():
            unpacked = Results.open(goal).rows()
            verdicts = [row.correct for row in unpacked] or _column_verdicts(goal)
            here = (len(verdicts), sum(verdict is not None for verdict in verdicts))
            enough = here[0] >= len(own) and here[1] >= judged
            # What is the same and still columns is unpacked where rows are wanted.
            if enough and (unpacked or not rows or here != (len(own), judged)):
                continue
            shutil.rmtree(goal)
        shutil.copytree(run, goal)
        if is_whole(run) and not rows:
            kept.append(own)
            continue
        records = [{**row, **_LEFT_OUT} for row in own.drop_columns("run").to_pylist()]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        # Rows of an incomplete run go where a run under way keeps them.
        write_whole(goal / (ROWS if is_whole(run) else "part-00000.jsonl"), lines)
    if kept:
        (target / COLUMNS).write_bytes(_encode(_join(target / COLUMNS, kept)))


def _column_verdicts(run: Path) -> list[bool | None]:
    """Of a run whose rows have not been unpacked."""
    path = run.parent / COLUMNS
    if not path.is_file():
        return []
    return list(pq.read_table(path, filters=[("run", "==", run.name)])["correct"].to_pylist())


def _drop_ungraded(source: Path, target: Path) -> None:
    """Remove the shards of a store that wait for verdicts where `source` has them with verdicts."""
    if not ((source / STORE).is_file() and (target / STORE).is_file()):
        return
    there, here = TrajectoryStore.open(source), TrajectoryStore.open(target)
    for shard in set(here.pending()) - set(there.pending()) - set(there.missing()):
        here.path(shard).unlink()
        here.hash_path(shard).unlink()


def _take_files(source: Path, target: Path) -> None:
    """Files of a store or a training that are not there yet."""
    for path in sorted(source.rglob("*")):
        goal = target / path.relative_to(source)
        if path.is_file() and not goal.exists():
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, goal)
    for shard in target.glob("shard-*.parquet"):  # archives of earlier versions have no hashes
        if not shard.with_suffix(".hash").exists():
            shard.with_suffix(".hash").write_text(f"{hash_file(shard)}\n")
