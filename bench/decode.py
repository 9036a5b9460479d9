"""Decoding at the released shapes: milliseconds per forward, forwards and tokens per second, against what the machine allows.

    python bench/decode.py --out runs/decode                          # LLaDA-8B shape, random bf16 weights, on CUDA
    python bench/decode.py --shape dream-7b --only exact,step,cached --out runs/decode-dream
    python bench/decode.py --shape sdar-8b --out runs/decode-sdar     # block diffusion; also fast-dllm-v2-7b
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
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from machine import (
    ASSUMED_TPF,
    describe,
    describe_machine,
    free_memory,
    measure_copy_rate,
    measure_kernels,
    measure_product_rate,
    print_kernels,
    random_lm,
    random_prompts,
    save_json,
    synchronise,
    time_behind,
    write_markdown,
)
from tad.decoding import GraphEngine, Request, Step, decode, get_decoder
from tad.decoding.cache_policy import ActiveCache
from tad.decoding.decoders import Decoder
from tad.decoding.engine.graph import GraphForward
from tad.decoding.state import DecodeSpec, DecodeState, RowFacts
from tad.decoding.step import plan
from tad.models import LM
from tad.models.quantize import Kind, quantize
from tad.models.shapes import SHAPES, forward_cost, shape_config

PROMPT, LENGTH = 128, 256
TPF = 8.5
Row = dict[str, Any]


class Bench:
    """The model, its engine, and how things are timed."""

    def __init__(self, device: torch.device, options: argparse.Namespace, layers: int | None = None) -> None:
        self.device, self.options, self.cuda = device, options, device.type == "cuda"
        self.prompt, self.length = (32, 64) if options.tiny else (PROMPT, LENGTH)
        self.label = f"{options.shape}{' (tiny)' if options.tiny else ''}"
        self.lm = random_lm(options.shape, device, options.tiny, layers)
        self.dtype = self.lm.dtype
        self._quantized: dict[Kind, tuple[LM, GraphEngine]] = {}
        self.copy_rate = measure_copy_rate(device)
        self.matmul_rate = measure_product_rate(device, self.dtype)
        self.engine = self.make_engine(self.lm)

    def make_engine(
        self, lm: LM, compiled: bool = True, fused: bool = True, kernels: bool | None = None
    ) -> GraphEngine:
        """The engine as it is used on CUDA, or without something of it."""
        engine = GraphEngine(lm.model, compiled and self.cuda, kernels=kernels)
        engine.fused = engine.fused and fused
        return engine

    def quantized(self, kind: Kind) -> tuple[LM, GraphEngine]:
        """A model with smaller weights, and its engine."""
        if kind not in self._quantized:
            lm = random_lm(self.options.shape, self.device, self.options.tiny)
            quantize(lm.model, kind)
            self._quantized[kind] = lm, self.make_engine(lm)
        return self._quantized[kind]

    def small_share(self, kind: Kind) -> float:
        """Bytes that a forward reads of the smaller weights, over those it reads of the others."""
        embedding = self.lm.model.embedding().weight.nbytes
        sizes = []
        for lm in (self.quantized(kind)[0], self.lm):
            parts = (*lm.model.parameters(), *lm.model.buffers())
            sizes.append(sum(part.nbytes for part in parts) - embedding)
        return sizes[0] / sizes[1]

    def prompts(self, count: int, length: int | None = None, seed: int = 0) -> list[list[int]]:
        return random_prompts(self.lm, count, length or self.prompt, seed)

    def decoder(self, name: str, **settings: Any) -> Decoder:
        return get_decoder(name, self.lm.family.name, stop="off", **settings)

    def floors(self, tokens: int, candidates: int = 0, scale: float = 1.0) -> tuple[float, float]:
        """Milliseconds to read the weights (`scale` of their bytes), and to do the arithmetic of `tokens`."""
        cost = forward_cost(self.lm.model.shape, self.prompt + self.length, self.dtype)
        body = cost.flops_per_token - cost.head_flops_per_token
        flops = tokens * body + candidates * cost.head_flops_per_token
        return 1e3 * scale * cost.weight_bytes / self.copy_rate, 1e3 * flops / self.matmul_rate

    def time_decode(
        self, count: int, decoder: Decoder, tpf: float, engine: Any = None, lm: LM | None = None
    ) -> Row:
        """A whole decode of `count` rows with everything on the host: the median of some runs after a first one."""
        ASSUMED_TPF.rate.fill_(tpf)
        engine, seconds = self.engine if engine is None else engine, []
        call = partial(decode, lm or self.lm, self.prompts(count), decoder, self.length, engine=engine)
        began = time.perf_counter()
        call()
        first = time.perf_counter() - began
        call()  # sizes that came once are captured now
        for _ in range(self.options.repeats):
            synchronise(self.device)
            began = time.perf_counter()
            rows = call()
            synchronise(self.device)
            seconds.append(time.perf_counter() - began)
        tokens: dict[int, int] = {}

        def count_tokens(step: Step) -> None:
            tokens[step.forward] = tokens.get(step.forward, 0) + step.queries

        call(on_step=count_tokens)
        middle, forwards = statistics.median(seconds), max(found.forwards for found in rows)
        floor = sum(max(self.floors(some)) for some in tokens.values()) * 1e-3
        return {
            "ms_per_forward": 1e3 * middle / forwards,
            "forwards_per_s": forwards / middle,
            "tokens_per_s": count * self.length / middle,
            "assumed_tpf": tpf,
            "tpf_reached": self.length / forwards,
            "computed_per_forward": sum(tokens.values()) / forwards,
            "of_floor": floor / middle,
            "first_call_s": first,
            "spread": (max(seconds) - min(seconds)) / middle,
        }

    @torch.inference_mode()
    def stage(self, engine: GraphEngine, count: int, new: int) -> Staged:
        """Rows of which all but the last `new` positions are decoded and frozen, about to be stepped.

        The decoder reveals one token per forward here, so that the step can be repeated without coming to its end. Where
        blocks are the model's own, `new` positions are one block behind all the others.
        """
        block, length = min(32, new), self.length
        quiet = self.decoder("tad-cached", threshold=0.0, keep_best=False, refresh=10_000, block=block)
        if self.lm.model.shape.blocks is not None:
            block, length = new, length + new
            quiet = self.decoder("sdar", rule="confidence", threshold=2.0, block=block)
        prepared = quiet.prepared(length, self.lm.family.logit_shift)
        forward = engine.acquire(DecodeSpec.of(self.lm, prepared, self.prompt, length), count)
        forward.close()  # nobody else asks meanwhile
        for tensor in (*forward.pool.keys, *forward.pool.values):
            tensor.normal_()
        spec, done = forward.spec, length - new
        requests = [Request(0, prompt, length, spec.decoder) for prompt in self.prompts(count)]
        fresh = DecodeState.of_rows(spec, requests, self.device)
        decoded = self.prompts(count, done, seed=1)
        fresh.generated[:, :done] = torch.tensor(decoded, device=self.device)
        table = fresh.table
        table.created.fill_(length // block)
        table.forwards.fill_(100)
        table.cached.fill_(done // block)
        table.finished_at[:, : done // block] = 1
        plan(fresh, spec)
        facts = [RowFacts(*row) for row in fresh.facts.tolist()]
        if any((fact.queries, fact.candidates) != (new, new) for fact in facts):
            raise AssertionError(f"staged rows compute and ask {facts[0]}, not {new}")
        rows = dict(enumerate(zip(requests, facts, strict=True)))
        return Staged(forward, fresh, rows)

    @torch.inference_mode()
    def time_step(self, count: int, new: int, engine: GraphEngine | None = None, scale: float = 1.0) -> Row:
        """One captured step of `count` rows with `new` positions each against a full cache."""
        staged = self.stage(engine or self.engine, count, new)
        staged.reset()
        began = time.perf_counter()
        staged.run()
        synchronise(self.device)
        first = time.perf_counter() - began
        staged.run()  # captures
        device_ms, host_ms = [], []
        for _ in range(3):
            staged.reset()
            device_ms.append(time_behind(staged.run, self.device))
            staged.reset()
            synchronise(self.device)
            began = time.perf_counter()
            for _ in range(10):  # as the scheduler goes: sizes, a launch, a read
                staged.run()
                staged.forward.state.facts.tolist()
            host_ms.append(1e2 * (time.perf_counter() - began))
        memory, compute = self.floors(count * new, count * new, scale)
        middle = statistics.median(device_ms)
        return {
            "ms": middle,
            "ms_with_host": statistics.median(host_ms),
            "of_floor": max(memory, compute) / middle,
            "floor_ms": max(memory, compute),
            "first_s": first,
            "spread": (max(device_ms) - min(device_ms)) / middle,
        }

    def new_positions(self) -> tuple[int, ...]:
        return (8, 16) if self.options.tiny else (32, 64)

    def row_counts(self) -> tuple[int, ...]:
        return (1, 3) if self.options.tiny else (1, 8, 32)


class Staged:
    """Rows that can be stepped again and again."""

    def __init__(
        self, forward: GraphForward, fresh: DecodeState, rows: dict[int, tuple[Request, RowFacts]]
    ) -> None:
        self.forward, self.fresh, self.rows = forward, fresh, rows

    def reset(self) -> None:
        self.forward.state.put(torch.arange(len(self.rows), device=self.forward.device), self.fresh)

    def run(self) -> None:
        self.forward.run(self.rows)


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
    head = f"{results['shape']}, at assumed TPF {TPF}, {describe(results)}; {ceilings}"
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
