"""A study on a machine with a GPU and without a sandbox, within a time budget, in files small enough to carry.

    python bench/study_gpu.py run study-nano-llada DEST --minutes 8 [--resume DEST] [--only main] [section.field=value ...]
    python bench/study_gpu.py grade study-nano-llada DEST --out runs/study-nano-llada     # where programs can run
    python bench/study_gpu.py run study-nano-llada DEST --tiny                            # a minute on a CPU

`run` works in --work, by one process or several (--processes: small models leave a GPU idle most of the time); when the time
is over it packs what there is into DEST as study.tar.gz.NN, at most --parts files of 15 MB. `--resume DEST` first unpacks what
an earlier run packed, perhaps on another machine, and goes on. `grade` unpacks into --out, adds the verdicts that could not be
given without a sandbox, writes the tables and prints them.

Packed are stores, answers, records, every tenth line of the logs, and the adapters of --keep and of cells that are not decoded
yet. The rows of a model's runs go as columns of one Parquet file, in which runs share the texts they have in common. On a
machine that only goes on, rows stay columns but for those that choose between trials.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from tad.cli.options import quieten
from tad.cli.run import ConsoleListener, list_states
from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation.results import META, ROWS, SUMMARY, Results, is_whole
from tad.evaluation.study import Study, StudyRecipe
from tad.evaluation.study.cells import Cell
from tad.evaluation.study.costs import COST
from tad.evaluation.study.plan import DONE, STUDY, TUNING, UNGRADED, StudyPlan
from tad.evaluation.study.pool import find_result
from tad.evaluation.tables import as_markdown
from tad.files import hash_file, read_lines, write_whole
from tad.training.record import RECORD, describe_machine
from tad.training.trainer import LOG
from tad.trajectories.window import WINDOW

NAME, COLUMNS = "study.tar.gz", "rows.parquet"
PART, PARTS = 15 * 10**6, 6
_THIN = 10  # every so many lines of a log
_LEFT_OUT = {"prompt": "", "ids": [], "steps": []}  # of every row

# Sizes of --tiny: every stage once, nothing learned.
TINY = [
    "device=cpu",
    "dtype=fp32",
    "collect.batch_size=4",
    "collect.shard_size=4",
    "window={limit: 4, states: 2}",
    "distill.learning.steps=2",
    "distill.batch={size: 4, micro: 4}",
    "distill.precision=fp32",
    "distill.workers=0",
    "evaluate.batch_size=12",
    "evaluate.thresholds={entropy: [0.5], confidence: [0.9]}",
    "seeds=[0]",
]
TINY_SIZE = 2  # problems of each task
TINY_STEPS = 2  # of a training


class Deadline(ConsoleListener):
    """Stops the work when the time is over."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.end = time.monotonic() + seconds

    def stopping(self) -> bool:
        return super().stopping() or time.monotonic() > self.end


class TimedStudy(Study):
    """Begins no cell that would take as long as the longest one so far and end after the deadline."""

    longest = 0.0

    def may_begin(self, cell: Cell) -> bool:
        assert isinstance(self.listener, Deadline)
        return time.monotonic() + self.longest <= self.listener.end and super().may_begin(cell)

    def work_on(self, cell: Cell) -> None:
        began = time.monotonic()
        super().work_on(cell)
        self.longest = max(self.longest, time.monotonic() - began)


def main(words: list[str] | None = None) -> None:
    options = read_options(words)
    recipe = read_recipe(options)
    if options.verb == "run":
        run(recipe, options)
    else:
        grade(recipe, options)


def read_recipe(options: argparse.Namespace) -> StudyRecipe:
    overrides = [*(TINY if options.tiny else []), *options.overrides]
    recipe = load_recipe(StudyRecipe, options.recipe, overrides)
    if not options.tiny:
        return recipe
    values = recipe.model_dump()
    rounds = max((method["rounds"] or 1 for method in values["methods"].values()), default=1)
    few = {"size": TINY_SIZE * rounds}  # each round has its part

    def smaller(section: dict) -> dict:
        tasks = [{**task, "limit": None, "options": few} for task in section["tasks"]]
        return {**section, "tasks": tasks}

    for method in values["methods"].values():
        learning = method["distill"].get("learning", {})
        learning |= {"steps": TINY_STEPS} if "steps" in learning else {}
    values["collect"] = smaller(values["collect"]) | {"keep": "all"}
    values["evaluate"] = smaller(values["evaluate"])
    values["stores"] = {name: smaller(s) if "tasks" in s else s for name, s in values["stores"].items()}
    if values["tuning"]:
        values["tuning"] = smaller(values["tuning"])
    for table in values["tables"].values():
        table["seeds"] = None
    return StudyRecipe.model_validate(values)


def run(recipe: StudyRecipe, options: argparse.Namespace) -> None:
    began = time.monotonic()
    work = options.work or Path("runs") / recipe.name
    if options.resume is not None and list(options.resume.glob(f"{NAME}.*")):
        unpack(options.resume, work, recipe)
        print(f"unpacked {options.resume} after {time.monotonic() - began:.0f} s", flush=True)
    torch.set_float32_matmul_precision("high")
    seconds = max(0.0, 60 * options.minutes - (time.monotonic() - began))
    others = [start_another(options, work, seconds / 60, number) for number in range(1, options.processes)]
    with Deadline(seconds) as listener:
        study = TimedStudy(recipe, work, listener)
        complete = study.run(options.only, grade=False, tables=False)
    codes = [other.wait() for other in others]
    if any(codes):
        print(f"a process failed: see {work.name}-N.log beside {work}", flush=True)
    if options.no_pack:
        return
    done = time.monotonic()
    left = pack(study, options.dest, not options.no_texts, options.parts, options.keep)
    sizes = [path.stat().st_size for path in sorted(options.dest.glob(f"{NAME}.*"))]
    print(list_states(study.states(options.only)))
    print(f"device: {describe_machine()['device']}; {'complete' if complete else 'not complete'}")
    for name in left:
        print(f"left out: {name}")
    print(
        f"packed {sum(sizes) / 1e6:.1f} MB into {len(sizes)} files of {options.dest} in {time.monotonic() - done:.0f} s; "
        f"{time.monotonic() - began:.0f} s in all"
    )


def start_another(
    options: argparse.Namespace, work: Path, minutes: float, number: int
) -> subprocess.Popen[bytes]:
    """One more process for the same study; what it prints goes into a file."""
    words = [sys.executable, __file__, "run", options.recipe, str(options.dest), *options.overrides]
    words += ["--work", str(work), "--minutes", str(minutes), "--no-pack"]
    words += [*(["--tiny"] if options.tiny else []), *(["--only", *options.only] if options.only else [])]
    work.parent.mkdir(parents=True, exist_ok=True)
    with open(work.parent / f"{work.name}-{number}.log", "wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)


def grade(recipe: StudyRecipe, options: argparse.Namespace) -> None:
    out = options.out or Path("runs") / recipe.name
    unpack(options.dest, out)
    with ConsoleListener() as listener:
        study = Study(recipe, out, listener)
        study.grade()
        tables = study.write_tables()
    for table in tables:
        print(f"\n{as_markdown(table)}")
    print(f"written: {out / 'tables'}")


# Archives


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
    data = gzip.compress(whole.getvalue(), 1)
    dest.mkdir(parents=True, exist_ok=True)
    for old in dest.glob(f"{NAME}.*"):
        old.unlink()
    for number, low in enumerate(range(0, len(data), PART)):
        (dest / f"{NAME}.{number:02d}").write_bytes(data[low : low + PART])
    return left


def _plain_files(study: StudyPlan) -> Iterable[Path]:
    """What travels as it is; logs are thinned by the caller. Of the stores that students have rolled out only what they cost
    and the window go along: a round that is not finished collects again."""
    out = study.out
    yield from (path for path in (out / STUDY,) if path.is_file())
    sources = [cell.source for _, _, _, cell in study.cells() if cell is not None and cell.source]
    rounds = {study.store_folder(source) for source in sources if source.teacher is not None}
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


def unpack(dest: Path, out: Path, recipe: StudyRecipe | None = None) -> None:
    """Bring what was packed into `dest` to the study at `out`; what is whole there stays.

    With a `recipe`, the study only goes on: rows of finished runs stay columns, but for those that choose between trials.
    """
    found = sorted(dest.glob(f"{NAME}.*"))
    if not found:
        raise TadError(f"{dest}: no {NAME}.* there")
    fresh = out.with_name(f".{out.name}-unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in found))) as tar:
        tar.extractall(fresh, filter="data")
    needed = None if recipe is None else _tuning_answers(recipe, fresh)
    for folder in sorted(fresh.glob("answers/*")):
        rows = needed is None or folder.name.rpartition("-")[2] in needed
        _take_answers(folder, out / "answers" / folder.name, rows)
    for folder in sorted([*fresh.glob("stores/*"), *fresh.glob("students/*")]):
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


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("run", "grade"):
        verb = verbs.add_parser(name)
        verb.add_argument("recipe")
        verb.add_argument("dest", type=Path)
        verb.add_argument("overrides", nargs="*", default=[])
        verb.add_argument("--tiny", action="store_true")
    one, two = verbs.choices["run"], verbs.choices["grade"]
    one.add_argument("--minutes", type=float, default=8.0, help="packing comes on top")
    one.add_argument("--work", type=Path, help="default: runs/NAME")
    one.add_argument("--resume", type=Path, help="a DEST to continue from; nothing happens where it is empty")
    one.add_argument("--only", nargs="+", default=[], help="tables or methods, with wildcards")
    one.add_argument("--processes", type=int, default=1, help="that share the work")
    one.add_argument(
        "--parts",
        type=int,
        default=PARTS,
        help="files of 15 MB at most; what students need beyond is left out",
    )
    one.add_argument(
        "--keep", nargs="+", default=["tad-quality", "tad-speed"], help="methods whose adapters travel"
    )
    one.add_argument("--no-pack", action="store_true", help=argparse.SUPPRESS)
    one.add_argument("--no-texts", action="store_true", help="leave out the texts of graded answers")
    two.add_argument("--out", type=Path, help="default: runs/NAME")
    options = parser.parse_args(words)
    wrong = next((text for text in options.overrides if "=" not in text), None)
    if wrong is not None:
        raise TadError(f"override '{wrong}' should look like section.field=value")
    quieten()
    return options


if __name__ == "__main__":
    main()
