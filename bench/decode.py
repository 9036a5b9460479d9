"""Decoding at the released shapes: milliseconds per forward, forwards and tokens per second, against what the machine allows.

    python bench/decode.py --out runs/decode                          # LLaDA-8B shape, random bf16 weights, on CUDA
    python bench/decode.py --shape dream-7b --only exact,step,cached --out runs/decode-dream
    python bench/decode.py --tiny --out /tmp/decode                   # the same code on a toy shape, on any machine

Weights are random, so their predictions are flat and would reveal one token per forward. A hook (`decode_bench.Pace`)
makes predictions sure at a chosen rate; the work is the same. Every token rate is therefore "at assumed TPF x" and
says nothing of quality. Each row of the table is measured by itself: `--only` picks some, a row that fails has its
error in its place, and decode.json and decode.md are written anew after every row. Floors: weights read once at the
measured copy rate, or the arithmetic of the tokens fed at the measured matrix rate, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import decode_products  # noqa: F401  # its rows
from decode_bench import FLAGS, PACE, ROWS, TPF, Bench, Row, row
from decode_inside import time_first_call
from machine import describe_machine, free_memory
from tad.decoding.feed import ActiveCache
from tad.models.shapes import SHAPES

# What matters most comes first: a run may be cut short.
ORDER = (
    "exact",
    "step",
    "cached",
    "parts",
    "batch-8",
    "batch-32",
    "fp8",
    "tokens",
    "others",
    "memory",
    "lengths",
    "kernels",
    "packed",
    "products",
    "libraries",
    "attention",
    "uncompiled",
    "tokens-trained",
    "autotune",
    "first-call",
)


@row("exact")
def measure_exact(bench: Bench) -> Row:
    """The paper's decoding, nothing cached: the engine beside the plain loop."""
    ours = bench.time_decode(1, bench.decoder("tad"), TPF)
    plain = bench.time_decode(1, bench.decoder("tad"), TPF, engine="plain")
    return {
        **ours,
        "plain_ms": plain["ms_per_forward"],
        "times_plain": plain["ms_per_forward"] / ours["ms_per_forward"],
    }


@row("step")
def measure_step(bench: Bench) -> Row:
    """A cached step of one row."""
    found = {str(new): bench.time_step(1, new) for new in bench.new_positions()}
    worst = max(found.values(), key=lambda one: one["ms"])
    return {**worst, "by_new_positions": found}


@row("cached")
def measure_cached(bench: Bench) -> Row:
    """Whole decodes with the cache, as the decoder is and with what would feed less, at two rates; the loop beside it."""
    decoder = bench.decoder("tad-cached")
    found = {
        "tad-cached": bench.time_decode(1, decoder, TPF),
        "tad-cached at 4": bench.time_decode(1, decoder, 4.0),
        "refresh 16": bench.time_decode(1, bench.decoder("tad-cached", refresh=16), TPF),
        "delay 0, refresh 16": bench.time_decode(1, replace(decoder, cache=ActiveCache(0, 16)), TPF),
        "plain": bench.time_decode(1, decoder, TPF, engine="plain"),
    }
    return {**found["tad-cached"], "plain_ms": found["plain"]["ms_per_forward"], "ways": found}


@row("batch-8")
def measure_batch_8(bench: Bench) -> Row:
    return measure_batch(bench, 8)


@row("batch-32")
def measure_batch_32(bench: Bench) -> Row:
    return measure_batch(bench, 32)


def measure_batch(bench: Bench, count: int) -> Row:
    """Rows side by side: steps of equal rows, and whole decodes, over one row's."""
    count = 3 if bench.options.tiny else count
    new = bench.new_positions()[0]
    alone, step = bench.time_step(1, new), bench.time_step(count, new)
    decoder = bench.decoder("tad-cached")
    ways = {"tad-cached": decoder, "delay 0, refresh 16": replace(decoder, cache=ActiveCache(0, 16))}
    whole = {name: bench.time_decode(count, way, TPF) for name, way in ways.items()}
    ones = {name: bench.time_decode(1, way, TPF) for name, way in ways.items()}
    return {
        **whole["tad-cached"],
        "step": step,
        "step_tokens_over_one_row": count * alone["ms"] / step["ms"],
        "tokens_over_one_row": {
            name: whole[name]["tokens_per_s"] / ones[name]["tokens_per_s"] for name in ways
        },
        "ways": whole,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llada-8b", choices=list(SHAPES))
    parser.add_argument(
        "--tiny", action="store_true", help="a toy shape in fp32, on the CPU if there is no GPU"
    )
    parser.add_argument("--only", default="", help=f"of {','.join(ORDER)}")
    parser.add_argument("--skip", default="", help="rows to leave out")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row is begun after this")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a whole decode")
    parser.add_argument(
        "--engine-options", default="", help=f"of {', '.join(FLAGS)}: for the engine of all rows"
    )
    parser.add_argument("--out", type=Path, help="the folder for decode.json and decode.md")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("tad.decoding.engine").setLevel(logging.INFO)  # what was tried for products
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not options.tiny and device.type != "cuda":
        print("no CUDA device here; --tiny runs on the CPU", file=sys.stderr)
        return 2
    wanted = [name for name in options.only.split(",") if name] or list(ORDER)
    skipped = [name for name in options.skip.split(",") if name]
    unknown = {*wanted, *skipped} - set(ORDER)
    if unknown:
        print(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ORDER)}", file=sys.stderr)
        return 2
    if options.first_call:
        print(json.dumps(time_first_call(options, device)))
        return 0
    with PACE.at(device):
        return run(options, device, [name for name in ORDER if name in wanted and name not in skipped])


def run(options: argparse.Namespace, device: torch.device, names: list[str]) -> int:
    began = time.perf_counter()
    bench = Bench(device, options)
    results: Row = {
        "machine": describe_machine(device),
        "shape": bench.label,
        "options": {key: str(value) for key, value in vars(options).items()},
        "ceilings": {"copy_tb_s": bench.copy_rate / 1e12, "matmul_tflop_s": bench.matmul_rate / 1e12},
        "opening_s": time.perf_counter() - began,
        "rows": {},
    }
    for name in names:
        start = time.perf_counter()
        if start - began > 60 * options.minutes:
            found: Row = {"error": "not begun: out of time"}
        else:
            try:
                found = ROWS[name](bench)
            except Exception as error:
                traceback.print_exc()
                words = str(error).splitlines()[0] if str(error) else ""
                found = {"error": f"{type(error).__name__}: {words}"[:300]}
        results["rows"][name] = {**found, "seconds": time.perf_counter() - start}
        print(f"{name}: {results['rows'][name]['seconds']:.1f} s {found.get('error', '')}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "decode.json").write_text(json.dumps(results, indent=2) + "\n")
            (options.out / "decode.md").write_text(as_markdown(results) + "\n")
        free_memory(device)
    print(as_markdown(results))
    return 0


GOALS_FOR = "llada-8b"
# What each row shows: measure, where its number is, the goal, and whether more is better.
GOALS: list[tuple[str, str, str, float | None, bool]] = [
    ("exact decode, 1 row, ms per forward", "exact", "ms_per_forward", 11.0, False),
    ("the plain loop, the same", "exact", "plain_ms", None, False),
    ("exact decode, part of the floor", "exact", "of_floor", None, True),
    ("cached step, 1 row, {small} new positions, ms", "step", "by_new_positions/{small}/ms", 5.0, False),
    ("cached step, 1 row, {large} new positions, ms", "step", "by_new_positions/{large}/ms", 5.0, False),
    (
        "cached step with the host, {large} new positions, ms",
        "step",
        "by_new_positions/{large}/ms_with_host",
        None,
        False,
    ),
    ("cached step, part of the floor", "step", "of_floor", None, True),
    ("whole tad-cached decode, forwards/s", "cached", "forwards_per_s", 180.0, True),
    ("tokens fed per forward in it", "cached", "fed_per_forward", None, False),
    ("tokens/s in it at assumed TPF {tpf}", "cached", "tokens_per_s", None, True),
    ("forwards/s at assumed TPF 4", "cached", "ways/tad-cached at 4/forwards_per_s", None, True),
    ("forwards/s, refresh 16", "cached", "ways/refresh 16/forwards_per_s", None, True),
    ("forwards/s, delay 0, refresh 16", "cached", "ways/delay 0, refresh 16/forwards_per_s", 180.0, True),
    ("the plain loop's whole tad-cached decode, ms per forward", "cached", "plain_ms", None, False),
    ("8 rows, tokens/s over 1 row, cached step", "batch-8", "step_tokens_over_one_row", 4.0, True),
    ("8 rows, tokens/s over 1 row, tad-cached", "batch-8", "tokens_over_one_row/tad-cached", 4.0, True),
    (
        "8 rows, the same, delay 0, refresh 16",
        "batch-8",
        "tokens_over_one_row/delay 0, refresh 16",
        4.0,
        True,
    ),
    ("8 rows, tokens/s at assumed TPF {tpf}", "batch-8", "tokens_per_s", None, True),
    ("32 rows, tokens/s at assumed TPF {tpf}", "batch-32", "tokens_per_s", None, True),
    ("32 rows, part of the floor, tad-cached", "batch-32", "of_floor", 0.5, True),
    ("32 rows, part of the floor, cached step", "batch-32", "step/of_floor", 0.5, True),
    ("FP8 cached step, 1 row, {small} new positions, ms", "fp8", "by_new_positions/{small}/ms", 3.5, False),
    ("FP8 cached step, 1 row, {large} new positions, ms", "fp8", "by_new_positions/{large}/ms", 3.5, False),
    ("cached step, packed attention, ms", "packed", "ms", None, False),
    ("cached step, products chosen by trial, ms", "autotune", "ms", None, False),
    ("cached step, recorded but not compiled, ms", "uncompiled", "ms", None, False),
    ("memory beside weights and buffers, 1 row, GB", "memory", "overhead_gb", 1.5, False),
    ("growth over 180 generations, GB", "memory", "growth_gb", 0.01, False),
    ("graphs for 50 prompt lengths", "lengths", "graphs", None, False),
    (
        "first decode in a process, 2 layers, empty compile cache, s",
        "first-call",
        "empty_cache/first_s",
        None,
        False,
    ),
    ("the same with a full compile cache, s", "first-call", "full_cache/first_s", None, False),
]


def as_markdown(results: Row) -> str:
    """The goals and what came out; then parts, tokens and ways as they were found."""
    rows, tiny = results["rows"], "tiny" in results["shape"]
    words = {"small": 8 if tiny else 32, "large": 16 if tiny else 64, "tpf": TPF}
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    ceilings = results.get("ceilings", {})
    lines = [
        f"{results['shape']}, {machine}",
        ", ".join(f"{key} {value:.3g}" for key, value in ceilings.items()),
        "",
        "| measure | result | goal | met |",
        "|---|---|---|---|",
    ]
    for measure, name, path, goal, more in GOALS:
        found = rows.get(name)
        if found is None:
            continue
        value: Any = found
        for part in path.format(**words).split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            value = found.get("error", "")
        cells = [measure.format(**words), f"{value:.4g}" if isinstance(value, (int, float)) else str(value)]
        if goal is None or results["shape"] != GOALS_FOR:
            cells += ["", ""]
        else:
            met = isinstance(value, (int, float)) and (value >= goal if more else value <= goal)
            cells += [f"{'>=' if more else '<='} {goal:g}", "yes" if met else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    for name, found in rows.items():
        for title in ("ms_by_part", "ms_by_way", "best", "differing"):
            if title in found:
                parts = ", ".join(f"{key} {_cell(value)}" for key, value in found[title].items())
                lines += ["", f"{name}, {title.replace('_', ' ')}: {parts}"]
        if name == "others" and "ways" in found:
            parts = "; ".join(
                f"{key} {value['ms_per_forward']:.3g} ms per forward (loop {value['plain_ms']:.3g})"
                for key, value in found["ways"].items()
            )
            lines += ["", parts]
        if "error" in found:
            lines += ["", f"{name}: {found['error']}"]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else str(value)


if __name__ == "__main__":
    sys.exit(main())
