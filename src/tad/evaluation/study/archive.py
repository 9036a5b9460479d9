"""A study in a few files that travel: what another machine needs to go on, to grade, and to make the tables.

Packed are stores, answers, logs of training (thinned) and records; of students only the adapters that the recipe keeps and those
of cells that are not decoded yet. The rows of a model's runs go as columns of one file, in which runs share what they have in
common. Unpacking adds to a study what it does not have; rows may stay columns where a study only goes on.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tad.errors import TadError
from tad.evaluation.results import META, ROWS, SUMMARY, Results
from tad.evaluation.study.answers import is_whole
from tad.evaluation.study.numbers import COLUMNS
from tad.evaluation.study.plan import STUDY, TIMINGS, Plan
from tad.evaluation.study.workbench import find_result
from tad.files import read_lines, write_whole
from tad.training.distill import LOG
from tad.training.record import RECORD

NAME = "study.tar.gz"
PART = 15 * 10**6
PARTS = 6
_THIN = 10  # every so many lines of a log
_LEFT_OUT = {"prompt": "", "ids": [], "steps": []}  # of every row


def pack(study: Plan, dest: Path, texts: bool = True, parts: int = PARTS) -> list[str]:
    """Write NAME.00, NAME.01, ... of at most 15 MB into `dest`; returns the adapters that had to be left out.

    Without `texts`, answers that are graded lose theirs: they can then not be graded anew.
    """
    whole = io.BytesIO()
    left, room = [], parts * PART
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path in _plain_files(study.out):
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
        for folder in _adapters(study):
            size = sum(path.stat().st_size for path in folder.iterdir())
            if size > room:
                left.append(str(folder.relative_to(study.out)))
                continue
            room -= size
            tar.add(folder, str(folder.relative_to(study.out)))
    data = gzip.compress(whole.getvalue(), 1)
    dest.mkdir(parents=True, exist_ok=True)
    for old in dest.glob(f"{NAME}.*"):
        old.unlink()
    for number, low in enumerate(range(0, len(data), PART)):
        (dest / f"{NAME}.{number:02d}").write_bytes(data[low : low + PART])
    return left


def _plain_files(out: Path) -> Iterable[Path]:
    """What travels as it is; logs are thinned by the caller."""
    yield from (path for path in (out / STUDY, out / TIMINGS) if path.is_file())
    for folder in sorted((out / "stores").glob("*")):
        yield from sorted(path for path in folder.iterdir() if path.suffix in (".json", ".parquet"))
    for name in (RECORD, LOG):
        yield from sorted((out / "students").glob(f"*/{name}"))
    for name in (META, SUMMARY, RECORD):
        yield from sorted((out / "answers").glob(f"*/*/{name}"))


def _adapters(study: Plan) -> Iterable[Path]:
    """Adapters that are kept, then those whose cells have runs to make."""
    kept, open_, seen = [], [], set()
    for _, name, _, get in study.plan():
        cell = get()
        folder = None if cell is None else study.student_folder(cell)
        result = None if folder is None else find_result(folder)
        if cell is None or result is None or result in seen:
            continue
        runs = [study.answers_folder(cell) / setting.name for setting in study.hashes.settings(cell)]
        if not all(is_whole(run) for run in runs):
            open_.append(result)
        elif cell.trial is None and any(fnmatch(name, pattern) for pattern in study.recipe.keep):
            kept.append(result)
        else:
            continue
        seen.add(result)
    return [*kept, *open_]


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
    return sink.getvalue().to_pybytes()


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


def unpack(dest: Path, out: Path, rows: bool = True) -> None:
    """Bring what was packed into `dest` to the study at `out`; what is whole there stays.

    Without `rows`, finished runs stay columns: enough to go on, to make tables and to pack again, and much quicker.
    """
    found = sorted(dest.glob(f"{NAME}.*"))
    if not found:
        raise TadError(f"{dest}: no {NAME}.* there")
    fresh = out.with_name(f".{out.name}-unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in found))) as tar:
        tar.extractall(fresh, filter="data")
    for folder in sorted(fresh.glob("answers/*")):
        _take_answers(folder, out / "answers" / folder.name, rows)
    for folder in sorted([*fresh.glob("stores/*"), *fresh.glob("students/*")]):
        _take_files(folder, out / folder.relative_to(fresh))
    for path in (path for path in fresh.iterdir() if path.is_file()):
        if not (out / path.name).exists():
            shutil.copy(path, out / path.name)
    shutil.rmtree(fresh)


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


def _take_files(source: Path, target: Path) -> None:
    """Files of a store or a training that are not there yet."""
    for path in sorted(source.rglob("*")):
        goal = target / path.relative_to(source)
        if path.is_file() and not goal.exists():
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, goal)
