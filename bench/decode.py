"""Decoding at the released shapes: milliseconds per forward, forwards and tokens per second, against what the machine allows.

    python bench/decode.py --out runs/decode                          # LLaDA-8B shape, random bf16 weights, on CUDA
    python bench/decode.py --shape dream-7b --only exact,step,cached --out runs/decode-dream
    python bench/decode.py --shape sdar-8b --out runs/decode-sdar     # block diffusion; also fast-dllm-v2-7b
    python bench/decode.py --only methods --assume one-by-one:0.74 fast-dllm:3.89 tad:8.8 d2f,rule=entropy,block=16,block_add=1.0:10.86
    python bench/decode.py --tiny --out /tmp/decode                   # the same code on a toy shape, on any machine

Weights are random, so predictions are made sure at a chosen rate (`machine.AssumedTpf`); the work is the same. Every token
rate is therefore "at assumed TPF x" and says nothing of quality. Each row of the table is measured by itself: `--only` picks
some, a row that fails has its error in its place, and decode.json and decode.md are written anew after every row. Floors:
weights read once at the measured copy rate, or the arithmetic of the tokens computed at the measured matrix rate, whichever
takes longer.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode_timing import Bench, Row, Way
from machine import (
    ASSUMED_TPF,
    describe,
    describe_machine,
    free_memory,
    measure_kernels,
    print_kernels,
    read_decoder,
    save_json,
    time_behind,
    write_markdown,
)
from tad.decoding import decode
from tad.decoding.cache_policy import ActiveCache
from tad.decoding.decoders import Decoder
from tad.decoding.engine import why_not
from tad.decoding.schedule import Pipelined, Sequential
from tad.errors import TadError
from tad.models import LM
from tad.models.quantize import Kind
from tad.models.shapes import SHAPES, shape_config

TPF = 8.5
METHODS = ("fast-dllm", "fast-dllm-dual", "dparallel", "d2f", "d3llm", "tad", "tad-cached")


def measure_exact(bench: Bench) -> Row:
    """The paper's decoding, nothing cached: CUDA graphs beside the plain forward."""
    ours = bench.time_decode(1, bench.decoder("tad"), TPF)
    plain = bench.time_decode(1, bench.decoder("tad"), TPF, engine="plain")
    times = plain["ms_per_forward"] / ours["ms_per_forward"]
    return {**ours, "plain_ms": plain["ms_per_forward"], "times_plain": times}


def measure_step(bench: Bench) -> Row:
    """A cached step of one row."""
    return {f"{new} new positions": bench.time_step(1, new) for new in bench.new_positions()}


def measure_cached(bench: Bench) -> Row:
    """Whole decodes with the cache, as the decoder is and with what would compute less, at two rates; the plain forward."""
    decoder = bench.decoder("tad-cached")
    return {
        "tad-cached": bench.time_decode(1, decoder, TPF),
        "tad-cached at 4": bench.time_decode(1, decoder, 4.0),
        "refresh 16": bench.time_decode(1, bench.decoder("tad-cached", refresh=16), TPF),
        "delay 0, refresh 16": bench.time_decode(1, replace(decoder, cache=ActiveCache(0, 16)), TPF),
        "plain": bench.time_decode(1, decoder, TPF, engine="plain"),
    }


@torch.inference_mode()
def measure_parts(bench: Bench) -> Row:
    """Where the time of a cached step goes: its kernels, most expensive first."""
    staged = bench.stage(bench.engine, 1, bench.new_positions()[-1])
    for _ in range(2):  # runs eagerly, then captures
        staged.reset()
        staged.run()
    staged.reset()
    ms = time_behind(staged.run, bench.device)
    kernels = measure_kernels(staged.run, bench.device)
    print_kernels("a cached step", kernels, ms / 1e3)
    return {"ms": ms, "kernels": kernels[:25]}


def measure_batch(bench: Bench, count: int) -> Row:
    """Rows side by side: steps of equal rows, and whole decodes, over one row's."""
    count = 3 if bench.options.tiny else count
    new = bench.new_positions()[0]
    alone, step = bench.time_step(1, new), bench.time_step(count, new)
    decoder = bench.decoder("tad-cached")
    ways = {
        "tad-cached": decoder,
        "block 16": bench.decoder("tad-cached", block=16),
        "delay 0, refresh 16": replace(decoder, cache=ActiveCache(0, 16)),
    }
    found = {"step": {**step, "tokens_over_one_row": count * alone["ms"] / step["ms"]}}
    for name, way in ways.items():
        one, whole = bench.time_decode(1, way, TPF), bench.time_decode(count, way, TPF)
        found[name] = {**whole, "tokens_over_one_row": whole["tokens_per_s"] / one["tokens_per_s"]}
    return found


def measure_block_causal(bench: Bench) -> Row:
    """Students with block-causal attention: one block after the other against the exact cache, as `ltr-blocks` decodes."""
    settings: dict[str, Any] = {"rule": "entropy", "block_add": 1.0}
    return {
        f"block {block}": measure_block_decode(bench, "d2f", block=block, **settings) for block in (16, 32)
    }


def measure_small_weights(bench: Bench, kind: Kind) -> Row:
    """A cached step with the projections in fp8 or int8."""
    lm, engine = bench.quantized(kind)
    share = bench.small_share(kind)
    steps = {f"{new} new positions": bench.time_step(1, new, engine, share) for new in bench.new_positions()}
    whole = bench.time_decode(1, bench.decoder("tad-cached"), TPF, engine, lm)
    return {**steps, "tad-cached": whole, "bytes_of_bf16": share}


def measure_own_kernels(bench: Bench) -> Row:
    """The cached step as it is, and without each thing of our own; bf16 and fp8 weights."""
    found: Row = {}
    small = bench.quantized("fp8")[0]
    ways: tuple[tuple[str, LM, dict[str, bool]], ...] = (
        ("bf16", bench.lm, {}),
        ("bf16, not compiled", bench.lm, {"compiled": False}),
        ("bf16, decisions not compiled", bench.lm, {"fused": False}),
        ("bf16, the library's kernels", bench.lm, {"kernels": False}),
        ("fp8", small, {}),
        ("fp8, the library's kernels", small, {"kernels": False}),
    )
    for label, lm, settings in ways:
        engine = bench.make_engine(lm, **settings)
        for new in bench.new_positions():
            found[f"{label}, {new} new"] = attempt(lambda n=new, e=engine: bench.time_step(1, n, e)["ms"])
    return found


def attempt(measure: Callable[[], float]) -> float | str:
    """A number, or the words of what went wrong: one way costs no other."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measure_others(bench: Bench) -> Row:
    """Further decoders with a cache, one row, CUDA graphs and plain."""
    found = {}
    for name in ("fast-dllm-dual", "fast-dllm-prefix", "d3llm-cached"):
        ours = bench.time_decode(1, bench.decoder(name), TPF)
        plain = bench.time_decode(1, bench.decoder(name), TPF, engine="plain")
        found[name] = {**ours, "plain_ms": plain["ms_per_forward"]}
    return found


def measure_methods(bench: Bench) -> Row:
    """Published methods beside each other, each at a TPF of its own (`--assume`), one row, taking turns at every decode.

    At TPF x, k * x positions are sure by the k-th forward, from left to right. A decode therefore has length / x forwards,
    rounded up; blocks fill, open and are frozen at the rhythm that x gives, and the cache's openings and refreshes follow
    from that as they always do. Turns are shuffled within a block where blocks are decoded one after the other, and within
    64 positions where several are at once. Every forward reveals at least one token: a TPF below 1, as measured on texts
    that end early, changes no forward. Tokens per second are the assumed TPF over the seconds of a forward. The engine is
    that of `auto`: CUDA graphs where they serve the decoder.
    """
    ways = []
    for words, tpf in bench.options.assume:
        decoder = read_decoder(words, bench.lm.family.name)
        served = why_not(bench.lm.model, decoder) is None
        way = Way(decoder, tpf, bench.engine if served else "plain", bench.lm)
        ways.append(
            replace(way, span=decoder.schedule.block or bench.length) if one_block_at_a_time(decoder) else way
        )
    rows: Row = {}
    for (words, tpf), way, row in zip(bench.options.assume, ways, bench.time_decodes(1, ways), strict=True):
        engine = "plain" if way.engine == "plain" else "graph"
        rows[f"{words} at {tpf:g}"] = {"engine": engine, **row, "tokens_per_s": tpf * row["forwards_per_s"]}
    first = next(iter(rows.values()))["tokens_per_s"]
    for row in rows.values():
        row["times_first"] = row["tokens_per_s"] / first
    return rows


def one_block_at_a_time(decoder: Decoder) -> bool:
    schedule = decoder.schedule
    return isinstance(schedule, Sequential) or (isinstance(schedule, Pipelined) and schedule.block_add >= 1)


def read_assumption(text: str) -> tuple[str, float]:
    """'tad-cached,block=16:8.5' as a decoder in words and a TPF."""
    words, _, tpf = text.rpartition(":")
    try:
        read_decoder(words, "llada")
        return words, float(tpf)
    except (TadError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: should be DECODER[,KEY=VALUE...]:TPF; {error}") from error


def measure_memory(bench: Bench) -> Row:
    """What an engine adds to the weights and its buffers at one row, and what two hundred generations add to that."""
    free_memory(bench.device)
    engine, decoder = bench.make_engine(bench.lm), bench.decoder("tad-cached")
    before = reserved(bench)
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for name in ("tad", "tad-cached"):
        decode(bench.lm, bench.prompts(1), bench.decoder(name), bench.length, engine=engine)
    peak = torch.cuda.max_memory_reserved() if bench.cuda else 0
    found = {"buffers_gb": engine.nbytes / 1e9, "overhead_gb": (peak - before - engine.nbytes) / 1e9}
    block = 8 if bench.options.tiny else 32
    short = replace(decoder, schedule=replace(decoder.schedule, block=block))
    for number in range(200):
        if number == 20:
            held = (reserved(bench), engine.nbytes, engine.graphs.made)
        length = bench.prompt - 32 * (number % 3) // 2
        decode(bench.lm, bench.prompts(1 + number % 2, length, seed=number), short, block, engine=engine)
    found["growth_gb"] = (reserved(bench) - held[0]) / 1e9
    found["buffer_growth_gb"] = (engine.nbytes - held[1]) / 1e9
    found["captured_after_twenty"] = engine.graphs.made - held[2]
    return found


def reserved(bench: Bench) -> int:
    if not bench.cuda:
        return 0
    free_memory(bench.device)
    return torch.cuda.memory_reserved()


def measure_lengths(bench: Bench) -> Row:
    """Graphs that fifty random prompt lengths need."""
    new = bench.new_positions()[0]
    engine, decoder = bench.make_engine(bench.lm), bench.decoder("tad-cached", block=new)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 3 * bench.prompt, (50,), generator=generator).tolist()
    began = time.perf_counter()
    for length in lengths:
        decode(bench.lm, bench.prompts(1, length), decoder, 2 * new, engine=engine)
    seconds = time.perf_counter() - began
    return {"graphs": engine.graphs.made, "lengths": len(set(lengths)), "all_s": seconds}


def measure_block_step(bench: Bench) -> Row:
    """One block against the stored ones, of one row and of several."""
    new = bench.new_positions()[0]
    return {f"rows {count}": bench.time_step(count, new) for count in bench.row_counts()}


def measure_block_decode(bench: Bench, name: str = "", **settings: Any) -> Row:
    """Whole decodes by a decoder, the family's own by default, of one row and of several, and by the plain forward."""
    decoder = bench.decoder(name or bench.lm.family.name, **settings)
    rows = {f"rows {count}": bench.time_decode(count, decoder, TPF) for count in bench.row_counts()}
    for row in rows.values():
        row["tokens_over_one_row"] = row["tokens_per_s"] / rows["rows 1"]["tokens_per_s"]
    return {**rows, "plain": bench.time_decode(1, decoder, TPF, engine="plain")}


# For models whose blocks are their own. SDAR's are of 4 as released, Fast-dLLM v2's of 32 in sub-blocks of 8.
BLOCK_ROWS: dict[str, Callable[[Bench], Row]] = {
    "block-step": measure_block_step,
    "block-32": partial(measure_block_decode, block=32),
    "as-released": measure_block_decode,
    "sub-block-cache": partial(measure_block_decode, block=32, sub_block=8, cache="sub-block"),
}
# What matters most comes first: a run may be cut short.
ROWS: dict[str, Callable[[Bench], Row]] = {
    "exact": measure_exact,
    "step": measure_step,
    "cached": measure_cached,
    "parts": measure_parts,
    "batch-8": partial(measure_batch, count=8),
    "block-causal": measure_block_causal,
    "batch-32": partial(measure_batch, count=32),
    "fp8": partial(measure_small_weights, kind="fp8"),
    "int8": partial(measure_small_weights, kind="int8"),
    "others": measure_others,
    "memory": measure_memory,
    "lengths": measure_lengths,
    "kernels": measure_own_kernels,
    "methods": measure_methods,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llada-8b", choices=list(SHAPES))
    parser.add_argument(
        "--tiny", action="store_true", help="a toy shape in fp32, on the CPU if there is no GPU"
    )
    parser.add_argument(
        "--only",
        default="",
        help=f"of {','.join(ROWS)}; of {','.join(BLOCK_ROWS)} for block-diffusion shapes",
    )
    parser.add_argument(
        "--assume",
        nargs="+",
        type=read_assumption,
        metavar="DECODER[,KEY=VALUE...]:TPF",
        default=[("one-by-one", 1.0), *((name, TPF) for name in METHODS)],
        help="the methods of row `methods`, the first to be compared with, and the TPF of each",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="no row is begun after this")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a whole decode")
    parser.add_argument("--out", type=Path, help="the folder for decode.json and decode.md")
    parser.add_argument(
        "--layers", type=int, help="fewer layers than the shape has: to try a row, or to compile ahead"
    )
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("tad.decoding.engine").setLevel(logging.INFO)  # what was timed for GEMMs
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not options.tiny and device.type != "cuda":
        print("no CUDA device here; --tiny runs on the CPU", file=sys.stderr)
        return 2
    rows = ROWS if shape_config(options.shape).shape.blocks is None else BLOCK_ROWS
    wanted = [name for name in options.only.split(",") if name] or list(rows)
    unknown = set(wanted) - set(rows)
    if unknown:
        print(f"no row {', '.join(sorted(unknown))}; there are {', '.join(rows)}", file=sys.stderr)
        return 2
    with ASSUMED_TPF.at(device, TPF):
        return run(options, device, {name: row for name, row in rows.items() if name in wanted})


def run(options: argparse.Namespace, device: torch.device, rows: dict[str, Callable[[Bench], Row]]) -> int:
    began = time.perf_counter()
    bench = Bench(device, options, options.layers)
    results: Row = {
        "machine": describe_machine(device),
        "shape": bench.label,
        "options": {key: str(value) for key, value in vars(options).items()},
        "ceilings": {"copy_tb_s": bench.copy_rate / 1e12, "matmul_tflop_s": bench.matmul_rate / 1e12},
        "opening_s": time.perf_counter() - began,
        "rows": {},
    }
    for name, measure in rows.items():
        start = time.perf_counter()
        if start - began > 60 * options.minutes:
            found: Row = {"error": "not begun: out of time"}
        else:
            try:
                found = measure(bench)
            except Exception as error:
                traceback.print_exc()
                words = str(error).splitlines()[0] if str(error) else ""
                found = {"error": f"{type(error).__name__}: {words}"[:300]}
        results["rows"][name] = {**found, "seconds": time.perf_counter() - start}
        print(f"{name}: {results['rows'][name]['seconds']:.1f} s {found.get('error', '')}", flush=True)
        if options.out:
            save_json(options.out / "decode.json", results)
            (options.out / "decode.md").write_text(as_markdown(results) + "\n")
        free_memory(device)
    print(as_markdown(results))
    return 0


def as_markdown(results: Row) -> str:
    """A line for every set of numbers, under the names they have in the JSON."""
    ceilings = ", ".join(f"{key} {value:.3g}" for key, value in results["ceilings"].items())
    head = f"{results['shape']}, at assumed TPF {TPF} where no other is said, {describe(results)}; {ceilings}"
    lines = [line for name, found in results["rows"].items() for line in list_numbers(name, found)]
    return write_markdown(head, ("row", "numbers"), lines)


def list_numbers(name: str, found: Row) -> Iterator[tuple[str, str]]:
    numbers = [f"{key} {_cell(value)}" for key, value in found.items() if not isinstance(value, (dict, list))]
    yield name, ", ".join(numbers)
    for key, value in found.items():
        if isinstance(value, dict):
            yield from list_numbers(f"{name}: {key}", value)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


if __name__ == "__main__":
    sys.exit(main())
