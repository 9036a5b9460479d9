"""Sweeps of all decoders on the nano world: decoded on a machine with a GPU, graded on one with a sandbox.

    python bench/eval_nano.py decode DEST --model nano-llada --model nano-dream --adapter nano-llada=runs/tad --minutes 8
    python bench/eval_nano.py grade DEST              # verdicts, then points and a table for each base, printed last
    python bench/eval_nano.py decode DEST ... --resume DEST     # continue elsewhere from what came back

Decoding keeps its runs in --work, where the same command continues them. When the time is over it packs what there is into
DEST as eval.tar.gz in parts of at most 15 MB (rows without prompts and token ids, which grading does not need; --slim leaves
out the reveal steps as well). Grading unpacks into DEST/graded. `--tiny` tries everything in a minute on a CPU.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
import time
from pathlib import Path

import torch

from tad.errors import TadError
from tad.evaluation import EvalRecipe, list_tasks, regrade, run_sweep, tabulate
from tad.evaluation.curves import POINTS, find_runs
from tad.evaluation.questions import Questions
from tad.evaluation.results import META, ROWS, Results
from tad.evaluation.run import Progress, Report
from tad.evaluation.sweep import Setting
from tad.evaluation.tables import show_curves
from tad.files import write_json
from tad.models import load
from tad.training.record import RECORD

NANO = ("nano-word", "nano-math", "nano-code")
PART = 15 * 2**20
ARCHIVE = "eval.tar.gz"
# The family's own sampler comes first; d2f is left out: without its training, block-causal attention is another model.
DECODERS = ("fast-dllm", "fast-dllm-prefix", "fast-dllm-dual", "dparallel", "d3llm", "tad", "tad-cached")


def decode(options: argparse.Namespace) -> None:
    """Decode what is missing until the time is over, then pack."""
    began = time.monotonic()
    deadline = began + 60 * options.minutes
    if options.resume is not None:
        unpack(options.resume, options.work)
    tasks = list_tasks(["nano"], options.split, options={name: {"size": options.count} for name in NANO})
    questions = Questions(tasks)
    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    for model, adapter in pairs(options.model, options.adapter):
        lm = load(model, adapter, device="cpu" if on_cpu else "cuda", dtype=options.dtype)
        recipe = EvalRecipe(
            model=model,
            adapter=adapter,
            tasks=tasks,
            gen_length=options.gen_length,
            batch_size=options.batch,
            dtype=options.dtype,
        )
        decoders = options.decoders or [lm.family.name, *DECODERS]
        out = options.work / "+".join(Path(name).name for name in (model, adapter) if name)
        print(f"{out.name}: {', '.join(decoders)}", flush=True)
        runs = run_sweep(
            lm,
            recipe,
            out,
            decoders,
            options.thresholds,
            report=announce,
            stopping=lambda: time.monotonic() > deadline,
            grade=False,
            questions=questions,
        )
        done = sum(run.is_complete() for run in runs)
        print(f"{out.name}: {done} runs complete after {time.monotonic() - began:.0f} s", flush=True)
        del lm
    size = pack(options.work, options.dest, options.slim)
    print(f"packed {size / 2**20:.1f} MB into {options.dest}, {time.monotonic() - began:.0f} s in all")


def pairs(models: list[str], adapters: list[str]) -> list[tuple[str, str | None]]:
    """Each base alone, then with its adapters (given as MODEL=ADAPTER)."""
    found: list[tuple[str, str | None]] = [(model, None) for model in models]
    for text in adapters:
        model, equals, adapter = text.partition("=")
        if not equals:
            raise TadError(f"--adapter {text}: should be MODEL=ADAPTER")
        found.append((model, adapter))
    return found


def announce(setting: Setting) -> Report:
    """A line when a run is complete."""
    began = time.monotonic()

    def report(progress: Progress) -> None:
        if progress.rows == progress.total:
            seconds = time.monotonic() - began
            print(
                f"  {setting.name}: TPF {progress.count.tpf:.2f}, {progress.made} rows in {seconds:.1f} s",
                flush=True,
            )

    return report


def pack(work: Path, dest: Path, slim: bool) -> int:
    """Rows of every run, complete or not, with what identifies it; returns the bytes written."""
    dest.mkdir(parents=True, exist_ok=True)
    slimmed = work.with_name(f"{work.name}-packed")
    shutil.rmtree(slimmed, ignore_errors=True)
    slimmed.mkdir(parents=True)
    for source in sorted(work.glob(f"*/*/{META}")):
        target = slimmed / source.parent.relative_to(work)
        target.mkdir(parents=True)
        for name in (META, RECORD):
            if (source.parent / name).exists():
                shutil.copy(source.parent / name, target / name)
        with open(target / ROWS, "w", encoding="utf-8") as file:
            for path in (source.parent / ROWS, *sorted(source.parent.glob("part-*.jsonl"))):
                for line in path.open(encoding="utf-8") if path.exists() else ():
                    row = {**json.loads(line), "prompt": "", "ids": []}
                    file.write(json.dumps(row | ({"steps": []} if slim else {})) + "\n")
    archive = slimmed.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        tar.add(slimmed, ".")
    data = archive.read_bytes()
    for old in dest.glob(f"{ARCHIVE}.*"):
        old.unlink()
    for number, low in enumerate(range(0, len(data), PART)):
        (dest / f"{ARCHIVE}.{number:02d}").write_bytes(data[low : low + PART])
    return len(data)


def unpack(dest: Path, work: Path) -> None:
    """Bring the runs of an archive to `work`; a run that is there stays, unless the archive has more rows of it."""
    parts = sorted(dest.glob(f"{ARCHIVE}.*"))
    if not parts:
        raise TadError(f"{dest}: no {ARCHIVE}.* there")
    fresh = work.with_name(f"{work.name}-unpacked")
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        tar.extractall(fresh, filter="data")
    for source in sorted(path.parent for path in fresh.glob(f"*/*/{META}")):
        target = work / source.relative_to(fresh)
        same = (target / META).exists() and Results.open(target).meta == Results.open(source).meta
        if not same or len(Results.open(target).rows()) < len(Results.open(source).rows()):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)
    shutil.rmtree(fresh)


def grade(options: argparse.Namespace) -> None:
    """Verdicts for every row, then a table for each base with all that was decoded on it."""
    work = options.dest / "graded"
    unpack(options.dest, work)
    bases: dict[str, list[Path]] = {}
    for sweep in sorted(path for path in work.iterdir() if path.is_dir()):
        began = time.monotonic()
        runs = find_runs(sweep)
        changed = sum(count for _, count in regrade(runs, only_missing=True, workers=options.graders))
        print(f"{sweep.name}: {changed} verdicts in {time.monotonic() - began:.0f} s", flush=True)
        bases.setdefault(Results.open(runs[0]).meta.model, []).append(sweep)
    for sweeps in bases.values():
        table = tabulate(sweeps, options.y_max)
        name = sweeps[0].name.partition("+")[0]
        write_json(options.dest / f"{name}-{POINTS}", table.as_record())
        text = show_curves(table)
        (options.dest / f"{name}-table.txt").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("decode")
    one.add_argument("dest", type=Path)
    one.add_argument("--model", action="append", default=[], required=True, help="a base; repeat it")
    one.add_argument("--adapter", action="append", default=[], help="MODEL=ADAPTER; repeat it")
    one.add_argument("--minutes", type=float, default=8.0, help="for decoding; packing comes on top")
    one.add_argument("--count", type=int, default=1024, help="problems of each family")
    one.add_argument("--batch", type=int, default=512)
    one.add_argument("--gen-length", type=int, default=96)
    one.add_argument("--split", default="test")
    one.add_argument("--decoders", nargs="+", help="default: the family's own sampler and all others")
    one.add_argument("--thresholds", type=float, nargs="+", help="default: the grids of `tad eval --sweep`")
    one.add_argument("--dtype", default="fp32")
    one.add_argument("--device")
    one.add_argument("--work", type=Path, default=Path("runs/eval-nano"))
    one.add_argument("--resume", type=Path, help="a DEST to continue from")
    one.add_argument("--slim", action="store_true", help="leave out the reveal steps")
    one.add_argument(
        "--tiny", action="store_true", help="four problems of each family, two decoders, on the CPU"
    )
    two = verbs.add_parser("grade")
    two.add_argument("dest", type=Path)
    two.add_argument("--graders", type=int)
    two.add_argument("--y-max", type=float)
    options = parser.parse_args()
    if options.verb == "decode":
        if options.tiny:
            options.count, options.batch, options.device = 4, 8, "cpu"
            options.decoders = options.decoders or ["fast-dllm", "tad"]
        decode(options)
    else:
        grade(options)


if __name__ == "__main__":
    main()
