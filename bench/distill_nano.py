"""Distil a nano base in many ways, in one process on one machine: collect, measure windows, train variants x seeds.

    python bench/distill_nano.py BASE OUT --problems 2000 --steps 600 --seeds 0 1 2 --minutes 9
    python bench/distill_nano.py BASE OUT --plan plan.yaml --only 'tad-*'
    python bench/distill_nano.py BASE OUT --tiny                          # seconds on a CPU, to see that it works

Everything lands in OUT: stores/NAME (trajectories with window.json), runs/VARIANT-sSEED (adapter, log, record), table.json.
Run it again to go on: shards, windows and runs that are finished are kept. A plan is a YAML list of
`{name, recipe, store, overrides: [section.field=value, ...]}`; `recipe` is a bundled name or a file and may say {family}.
Word problems and maths by default: grading nano-code needs the sandbox.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import yaml

import tad
from tad.config import load_recipe
from tad.training.distill import ADAPTER, LOG, distill
from tad.training.recipe import DistillRecipe
from tad.training.record import RECORD, describe_machine
from tad.training.weights import detach
from tad.trajectories.fingerprint import fingerprint_model
from tad.trajectories.recipe import CollectRecipe, TaskSection
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window import WindowReport, choose_windows, measure_decay, write_report
from tad.trajectories.workers import collect_here

HELD = "held-out"
STORES: dict[str, dict[str, Any]] = {
    "teacher": {"order": "teacher"},
    "student": {"order": "student"},
    "unprivileged": {"order": "teacher", "privileged": False},
    "ground-truth": {"order": "random", "tokens": "reference", "privileged": False},
}


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    recipe: str
    store: str = "teacher"
    overrides: list[str] = field(default_factory=list)


TAD = "nano-{family}-quality"
VARIANTS = [
    Variant("tad-quality", TAD),
    Variant("tad-speed", "nano-{family}-speed"),
    Variant("tad-all-states", TAD, overrides=["states=all"]),
    Variant("tad-plain-teacher", TAD, overrides=["objective.teacher=plain"]),
    Variant("tad-student-order", TAD, "student"),
    Variant("tad-student-order-plain-teacher", TAD, "student", ["objective.teacher=plain"]),
    Variant("tad-unprivileged", TAD, "unprivileged", ["objective.teacher=plain"]),
    Variant("tad-adaptive", TAD, overrides=["objective.partition=adaptive"]),
    Variant("tad-smooth", TAD, overrides=["objective.partition=smooth"]),
    Variant("near-only", TAD, overrides=["objective.distant=none"]),
    Variant("ce-everywhere", TAD, overrides=["objective.distant=ce"]),
    Variant("kl-everywhere", TAD, overrides=["objective.near=kl"]),
    Variant("dparallel", "nano-{family}-dparallel"),
    Variant("d3llm", "nano-{family}-d3llm"),
    Variant("d2f", "nano-{family}-d2f"),
    Variant("sft", "nano-{family}-sft"),
    Variant("sft-ground-truth", "nano-{family}-sft", "ground-truth"),
]


def main(words: list[str] | None = None) -> None:
    options = read_options(words)
    began = time.monotonic()
    lm = tad.load(options.base, device=options.device, dtype=options.dtype)
    variants = [v for v in read_plan(options.plan) if any(fnmatch(v.name, p) for p in options.only)]
    for name in dict.fromkeys([*(v.store for v in variants), HELD]):
        collect(lm, name, options)
    rows = []
    for seed in options.seeds:
        for variant in variants:
            out = options.out / "runs" / f"{variant.name}-s{seed}"
            late = options.minutes is not None and time.monotonic() - began > 60 * options.minutes
            if not (out / ADAPTER).is_dir() and not (out / "model").is_dir() and not late:
                lm = train(lm, variant, seed, out, options)
            if (out / RECORD).is_file():
                rows.append(read_run(variant, seed, out))
    wanted = len(variants) * len(options.seeds)
    report = {"base": str(options.base), "runs": rows, "wanted": wanted, **describe_machine()}
    (options.out / "table.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(as_table(rows))
    print(f"{len(rows)} of {wanted} runs are there" + ("" if len(rows) == wanted else "; run again to go on"))


def read_options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=2000, help="training problems, over all tasks")
    parser.add_argument("--held", type=int, default=200, help="problems of the validation split")
    parser.add_argument("--tasks", nargs="+", default=["nano-word", "nano-math"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], help="names of variants, with wildcards")
    parser.add_argument(
        "--override", action="append", default=[], help="section.field=value for every variant"
    )
    parser.add_argument("--minutes", type=float, help="start no further run after so many minutes")
    parser.add_argument("--gen-length", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=512, help="of collection")
    parser.add_argument("--keep", choices=("correct", "all"), default="correct")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else None)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(words)
    if options.tiny:
        options.problems, options.held, options.steps, options.keep = 6, 4, 2, "all"
        options.override += ["batch={size: 4, micro: 2}", "adapter.rank=4"]
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def read_plan(path: Path | None) -> list[Variant]:
    return VARIANTS if path is None else [Variant(**entry) for entry in yaml.safe_load(path.read_text())]


def collect(lm: tad.LM, name: str, options: argparse.Namespace) -> None:
    """A store and its window, made or continued."""
    held = name == HELD
    each = -(-(options.held if held else options.problems) // len(options.tasks))
    split = "validation" if held else "train"
    recipe = CollectRecipe(
        model=str(options.base),
        tasks=[
            TaskSection(name=task, split=split, limit=each, options={"size": each}) for task in options.tasks
        ],
        gen_length=options.gen_length,
        batch_size=options.batch_size,
        shard_size=options.batch_size,
        keep=options.keep,
        **STORES["teacher" if held else name],
    )
    folder = options.out / "stores" / name
    began = time.monotonic()
    store = collect_here(recipe, folder, lm)
    if not (folder / "window.json").is_file():
        measure_window(lm, store)
    windows = json.loads((folder / "window.json").read_text())["windows"]
    stats = [entry for _, entry in store.shards()]
    print(
        f"{name}: {sum(e.correct for e in stats)} of {sum(e.attempted for e in stats)} correct, windows "
        f"{windows['quality']['window']} and {windows['speed']['window']}, {time.monotonic() - began:.0f} s",
        flush=True,
    )


def measure_window(lm: tad.LM, store: TrajectoryStore) -> None:
    rows = list(store.rows())[:512]
    decay, filled, sums = measure_decay(lm, rows, batch_size=128)
    report = WindowReport(
        str(store.meta.recipe["order"]), fingerprint_model(lm), decay, filled, choose_windows(decay, sums)
    )
    write_report(report, store.folder)


def train(lm: tad.LM, variant: Variant, seed: int, out: Path, options: argparse.Namespace) -> tad.LM:
    """One run on the base, which comes back without the adapter (reloaded where it was trained whole)."""
    stores = options.out / "stores"
    recipe = load_recipe(
        DistillRecipe,
        variant.recipe.format(family=lm.family.name),
        [
            f"name={out.name}", f"model={options.base}", f"trajectories=[{stores / variant.store}]",
            f"validation=[{stores / HELD}]", f"seed={seed}", f"learning.steps={options.steps}",
            f"save_every={10**9}", f"validate_every={10**9}", "report_to=[]",
            *([f"device={options.device}"] if options.device else []), *options.override, *variant.overrides,
        ],
    )  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)  # half a run is quicker done again
    outcome = distill(recipe, out, lm=lm, quiet=True)
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    print(f"{out.name}: {outcome.step} steps, {read_run(variant, seed, out)['seconds']:.0f} s", flush=True)
    if recipe.full:
        return tad.load(options.base, device=options.device, dtype=options.dtype)
    detach(lm)
    return lm


def read_run(variant: Variant, seed: int, out: Path) -> dict[str, Any]:
    """What the table says about a finished run."""
    lines = [json.loads(line) for line in (out / LOG).read_text(encoding="utf-8").splitlines()]
    held = [line for line in lines if "held_out_loss" in line]
    steps = [line for line in lines if "loss" in line]
    before, after = held[0], held[-1]
    names = [name for name in after if name.startswith("held_out_loss") or name.endswith("_confidence")]
    later = steps[len(steps) // 2 :]  # the first steps warm up
    return {
        "variant": variant.name,
        "seed": seed,
        "store": variant.store,
        "steps": steps[-1]["step"],
        "seconds": lines[-1]["seconds"],
        "states_per_s": sum(line["states_per_s"] for line in later) / len(later),
        "padding": sum(line["padding"] for line in steps) / len(steps),
        "held_out": {name.removeprefix("held_out_"): [before.get(name), after[name]] for name in names},
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| run | steps | s | states/s | held-out loss | terms before -> after | confidence before -> after |"
    ]
    lines.append("|---" * 7 + "|")
    for row in rows:
        held = row["held_out"]

        def moves(suffix: str, held: dict[str, Any] = held) -> str:
            return ", ".join(
                f"{name.replace('loss_', '').replace(suffix, '')} {first:.3f} -> {last:.3f}"
                for name, (first, last) in held.items()
                if name != "loss" and (name.endswith(suffix) if suffix else name.startswith("loss_"))
                and first is not None
            )  # fmt: skip

        lines.append(
            f"| {row['variant']} s{row['seed']} | {row['steps']} | {row['seconds']:.0f} | {row['states_per_s']:.0f} | "
            f"{held['loss'][0]:.3f} -> {held['loss'][1]:.3f} | {moves('')} | {moves('_confidence')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
