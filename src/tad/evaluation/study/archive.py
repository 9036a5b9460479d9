"""A study in a few files that travel: what another machine needs to go on, to grade, and to make the tables.

Packed are stores, answers, logs of training (thinned) and records; of students only the adapters that the recipe keeps and those
of cells that are not decoded yet. Rows go as columns: texts stay only where they have no verdict yet. Unpacking adds to a study
what it does not have.
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
import pyarrow.parquet as pq

from tad.errors import TadError
from tad.evaluation.files import read_lines, write_whole
from tad.evaluation.results import META, ROWS, SUMMARY, Results
from tad.evaluation.study.answers import is_whole
from tad.evaluation.study.numbers import CACHE
from tad.evaluation.study.plan import STUDY, TIMINGS, Plan
from tad.evaluation.study.workbench import find_result
from tad.training.distill import LOG
from tad.training.record import RECORD

NAME = "study.tar.gz"
COLUMNS = "rows.parquet"
PART = 15 * 10**6
PARTS = 6
_THIN = 10  # every so many lines of a log


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
        for meta in sorted((study.out / "answers").glob(f"*/*/{META}")):
            name = str((meta.parent / COLUMNS).relative_to(study.out))
            _add(tar, name, as_columns(Results.open(meta.parent), texts))
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


def as_columns(results: Results, texts: bool) -> bytes:
    """The rows of a run as Parquet."""
    records = []
    for row in results.rows():
        record = row.as_record() | {"prompt": "", "ids": [], "steps": []}
        if not texts and row.correct is not None:
            record |= {"text": "", "reason": None, "extracted": None}
        records.append(record)
    schema = pa.schema(
        [(name, pa.string()) for name in ("task", "template", "id", "level", "question", "prompt", "text")]
        + [("correct", pa.bool_()), ("reason", pa.string()), ("extracted", pa.string())]
        + [(name, pa.int32()) for name in ("tokens", "tokens_all", "forwards")]
        + [(name, pa.float32()) for name in ("seconds", "share")]
        + [(name, pa.list_(pa.int32())) for name in ("ids", "steps")]
    )
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_pylist(records, schema=schema), sink, compression="zstd", compression_level=12
    )
    return sink.getvalue().to_pybytes()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def unpack(dest: Path, out: Path) -> None:
    """Bring what was packed into `dest` to the study at `out`; what is whole there stays."""
    found = sorted(dest.glob(f"{NAME}.*"))
    if not found:
        raise TadError(f"{dest}: no {NAME}.* there")
    fresh = out.with_name(f".{out.name}-unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in found))) as tar:
        tar.extractall(fresh, filter="data")
    for columns in sorted(fresh.rglob(COLUMNS)):
        rows = pq.read_table(columns).to_pylist()
        columns.unlink()
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Rows of an incomplete run go where a run under way keeps them.
        write_whole(columns.with_name(ROWS if is_whole(columns.parent) else "part-00000.jsonl"), lines)
    for folder in sorted(fresh.glob("*/*")):
        if folder.parent.name == "answers":
            for run in sorted(path for path in folder.iterdir() if path.is_dir()):
                _take_run(run, out / run.relative_to(fresh))
        else:
            _take_files(folder, out / folder.relative_to(fresh))
    for path in (path for path in fresh.iterdir() if path.is_file()):
        if not (out / path.name).exists():
            shutil.copy(path, out / path.name)
    shutil.rmtree(fresh)


def _take_run(source: Path, target: Path) -> None:
    """A run that is there stays, unless the archive has more rows or more verdicts of it."""
    if (target / META).exists():
        here, there = Results.open(target).rows(), Results.open(source).rows()
        judged = [sum(row.correct is not None for row in rows) for rows in (here, there)]
        if len(here) >= len(there) and judged[0] >= judged[1]:
            return
        shutil.rmtree(target)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(CACHE))


def _take_files(source: Path, target: Path) -> None:
    """Files of a store or a training that are not there yet."""
    for path in sorted(source.rglob("*")):
        goal = target / path.relative_to(source)
        if path.is_file() and not goal.exists():
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, goal)
