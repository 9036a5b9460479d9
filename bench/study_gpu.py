"""A study on a machine with a GPU and without a sandbox, within a time budget, in files small enough to carry.

    python bench/study_gpu.py run study-nano-llada DEST --minutes 8 [--resume DEST] [--only main] [section.field=value ...]
    python bench/study_gpu.py grade study-nano-llada DEST --out runs/study-nano-llada     # where programs can run
    python bench/study_gpu.py run study-nano-llada DEST --tiny                            # a minute on a CPU

`run` works in --work, by one process or several (--processes: small models leave a GPU idle most of the time); when the time is over it packs what there is into DEST as study.tar.gz.NN, at
most --parts files of 15 MB. `--resume DEST` first unpacks what an earlier run packed, perhaps on another machine, and goes on. `grade`
unpacks into --out, adds the verdicts that could not be given without a sandbox, writes the tables and prints them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from tad.cli.run import Watch, describe_entries, quieten
from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation.study import Study, StudyRecipe
from tad.evaluation.study.archive import NAME, PARTS, pack, unpack
from tad.evaluation.study.tables import as_markdown
from tad.training.record import describe_machine

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
    few = {"size": TINY_SIZE}

    def smaller(section: dict) -> dict:
        tasks = [{**task, "limit": None, "options": few} for task in section["tasks"]]
        return {**section, "tasks": tasks}

    values = recipe.model_dump()
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
        unpack(options.resume, work, rows=False)
        print(f"unpacked {options.resume} after {time.monotonic() - began:.0f} s", flush=True)
    torch.set_float32_matmul_precision("high")
    study = Study(recipe, work, Watch())
    minutes = max(0.0, options.minutes - (time.monotonic() - began) / 60)
    others = [start_another(options, work, minutes, number) for number in range(1, options.processes)]
    complete = study.run(options.only, minutes, grade=False, tables=False)
    codes = [other.wait() for other in others]
    if any(codes):
        print(f"a process failed: see {work.name}-N.log beside {work}", flush=True)
    if options.no_pack:
        return
    done = time.monotonic()
    left = pack(study, options.dest, not options.no_texts, options.parts)
    sizes = [path.stat().st_size for path in sorted(options.dest.glob(f"{NAME}.*"))]
    print(describe_entries(study.entries(options.only)))
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
    words += [
        "--work",
        str(work),
        "--minutes",
        str(minutes),
        "--no-pack",
        *(["--tiny"] if options.tiny else []),
    ]
    words += ["--only", *options.only] if options.only else []
    work.parent.mkdir(parents=True, exist_ok=True)
    with open(work.parent / f"{work.name}-{number}.log", "wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)


def grade(recipe: StudyRecipe, options: argparse.Namespace) -> None:
    out = options.out or Path("runs") / recipe.name
    unpack(options.dest, out)
    study = Study(recipe, out, Watch())
    study.run(minutes=0)  # no time for anything but verdicts and tables
    for table in study.tables():
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
