"""A study on a machine with a GPU and without a sandbox, within a time budget, in files small enough to carry.

    python bench/study_gpu.py run study-nano-llada DEST [section.field=value ...] --minutes 8 [--resume DEST] [--only main]
    python bench/study_gpu.py grade study-nano-llada DEST [the same] --out runs/study-nano-llada [--back BACK]  # where programs can run
    python bench/study_gpu.py run study-nano-llada DEST --tiny                            # a minute on a CPU

`run` works in --work, by one process or several (--processes: small models leave a GPU idle most of the time); when the time
is over it packs what there is into DEST as study.tar.gz.NN, at most --parts files of 15 MB. `--resume DEST` first unpacks what
an earlier run packed, perhaps on another machine, and goes on. `grade` unpacks into --out, adds the verdicts that could not be
given without a sandbox, writes the tables and prints them. Trajectories of programs that are `graded: later` get theirs too:
with `--back BACK` the archive is written there with the graded stores in it, and `run --resume BACK` goes on to train on them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from study_archive import NAME, PARTS, pack, put_back, unpack
from tad.cli.options import quieten
from tad.cli.run import ConsoleListener
from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation.tables import as_markdown
from tad.runs.record import describe_machine
from tad_lab.cli import list_states
from tad_lab.study import Study, StudyRecipe
from tad_lab.study.cells import Cell

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
        if options.back is not None:
            put_back(options.dest, out, options.back)
        tables = study.write_tables()
    for table in tables:
        print(f"\n{as_markdown(table)}")
    print(f"written: {out / 'tables'}")


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
    two.add_argument("--back", type=Path, help="where the archive goes with the graded stores, to be resumed")
    options = parser.parse_args(words)
    wrong = next((text for text in options.overrides if "=" not in text), None)
    if wrong is not None:
        raise TadError(f"override '{wrong}' should look like section.field=value")
    quieten()
    return options


if __name__ == "__main__":
    main()
