"""Rows of bench/decode.py on products of few rows: the library's and our own, shape by shape, and steps that use them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_bench import Bench, Row, row
from decode_inside import profile
from machine import synchronise
from tad.decoding import Engine
from tad.decoding.engine import products, tuning
from tad.decoding.engine.tuning import KINDS, Trial, cost
from tad.decoding.engine.weights import Projection
from tad.models import LM

# Bytes of the next weights that a product may ask for before it ends.
AHEAD = (0, 8 * 2**20, 16 * 2**20, 32 * 2**20)


@row("products")
@torch.inference_mode()
def measure_products(bench: Bench) -> Row:
    """Each projection by itself, some layers' weights in turn: the library, every tiling of the kernel, bf16 and fp8."""
    began, shapes = time.perf_counter(), {}
    plain = bench.engine.network.layers
    small = bench.quantized_lm()[1]
    for kind in KINDS:
        wide, narrow = ([getattr(layer, kind) for layer in layers] for layers in (plain, small))
        trials = [measure_tilings(some, bench) for some in (wide, narrow)]
        for rows in bench.new_positions():
            shapes[f"{kind} x{rows}"] = describe_shape(bench, rows, wide, narrow, *trials)
    totals: Row = {}
    for rows in bench.new_positions():
        for way in (
            "library",
            "kernel",
            "kernel with sums",
            "fp8 library",
            "fp8 kernel",
            "fp8 kernel with sums",
        ):
            found = [shapes[f"{kind} x{rows}"].get(way) for kind in KINDS]
            if all(isinstance(ms, float) for ms in found):
                totals[f"{way} x{rows}, {len(plain)} layers"] = len(plain) * sum(found)
        for way in ("floor", "fp8 floor"):
            totals[f"{way}, {len(plain)} layers"] = len(plain) * sum(
                shapes[f"{kind} x{rows}"][way] for kind in KINDS
            )
    best = {name: f"{one['tiling']} / fp8 {one['fp8 tiling']}" for name, one in shapes.items()}
    seconds = time.perf_counter() - began
    return {"ms_by_way": totals, "best": best, "shapes": shapes, "tuning_s": seconds}


def measure_tilings(some: Sequence[Projection], bench: Bench) -> list[Trial]:
    """All trials for one projection; what is best is what engines of this process use from here on."""
    if not bench.cuda or products.why_not_split(some[0], bench.dtype) is not None:
        return []
    try:
        return tuning.tune(some, bench.dtype)
    except Exception:
        traceback.print_exc()
        return []


def describe_shape(
    bench: Bench,
    rows: int,
    wide: Sequence[Projection],
    narrow: Sequence[Projection],
    trials: Sequence[Trial],
    small_trials: Sequence[Trial],
) -> Row:
    weight = wide[0].weight
    found: Row = {
        "shape": list(weight.shape),
        "floor": 1e3 * weight.nbytes / bench.copy_rate,
        "fp8 floor": 1e3 * narrow[0].weight.nbytes / bench.copy_rate,
    }
    if bench.cuda:
        for label, some in (("library", wide), ("fp8 library", narrow)):
            found[label] = attempt(partial(tuning.time_library, some, rows, bench.dtype))
    else:
        found["library"] = time_on_cpu(bench, rows, wide)
    for label, some, by in (("", trials, wide), ("fp8 ", small_trials, narrow)):
        here = [trial for trial in some if trial.rows == rows]
        found[f"{label}trials"] = {
            " ".join(str(int(value)) for value in trial.tiling): trial.ms or trial.error for trial in here
        }
        best = min(here, key=lambda trial: cost(trial, by[0].weight), default=None)
        found[f"{label}tiling"] = "none"
        if best is not None and best.ms is not None:
            found[f"{label}tiling"] = " ".join(str(int(value)) for value in best.tiling)
            found[f"{label}kernel"], found[f"{label}kernel with sums"] = best.ms, cost(best, by[0].weight)
            found[f"{label}of floor"] = found[f"{label}floor"] / best.ms
    return found


def attempt(measure: Callable[[], float]) -> float | str:
    """A number, or the words of what went wrong: one way costs no other."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def time_on_cpu(bench: Bench, rows: int, some: Sequence[Projection]) -> float:
    x = bench.noise(rows, some[0].weight.shape[1])
    return bench.timed(lambda: F.linear(x, some[0].weight), 1)


@row("triton")
def measure_triton(bench: Bench) -> Row:
    """The cached step with our own products."""
    return measure_steps(bench, bench.lm, 1.0)


@row("fp8-triton")
def measure_fp8_triton(bench: Bench) -> Row:
    """The cached step with our own products of fp8 weights."""
    return measure_steps(bench, bench.quantized_lm()[0], bench.fp8_share())


@row("triton-fused")
def measure_triton_fused(bench: Bench) -> Row:
    """Both with everything of ours: products, attention, and decisions compiled; reading ahead as the rows before found."""
    found: Row = {"ms_by_way": {}}
    for label, lm in (("bf16", bench.lm), ("fp8", bench.quantized_lm()[0])):
        began = time.perf_counter()
        engine = bench.make_engine(lm, "triton", "attention", "fused")
        for new in bench.new_positions():
            found["ms_by_way"][f"{label}, {new} new"] = attempt(partial(step_ms, bench, engine, new))
        found[f"{label}_opening_s"] = time.perf_counter() - began
    return found


def step_ms(bench: Bench, engine: Engine, new: int) -> float:
    ms: float = bench.time_step(1, new, engine)["ms"]
    return ms


def measure_steps(bench: Bench, lm: LM, scale: float) -> Row:
    """Steps by how far products read ahead; the best distance is kept for the rows that follow. Then with our attention."""
    began = time.perf_counter()
    options = [flag for flag in bench.options.engine_options.split(",") if flag]
    engine = bench.make_engine(lm, "triton", *options)
    synchronise(bench.device)
    splits = {f"{n} x {k} {dtype}": split for (n, k, dtype, _), split in tuning._SPLITS.items()}
    found: Row = {"tuning_s": time.perf_counter() - began, "splits": splits, "ms_by_way": {}}
    steps: dict[int, dict[str, Row]] = {}
    for ahead in AHEAD if bench.cuda else AHEAD[:1]:
        products.read_ahead = ahead
        engine.recorder.forget(lambda _: True)
        label = f"{ahead >> 20} MiB ahead"
        try:
            steps[ahead] = {str(new): bench.time_step(1, new, engine, scale) for new in bench.new_positions()}
            found["ms_by_way"] |= {f"{new} new, {label}": one["ms"] for new, one in steps[ahead].items()}
        except Exception as error:
            found["ms_by_way"][label] = f"{type(error).__name__}: {error}".splitlines()[0][:300]

    best = min(steps, key=lambda ahead: sum(one["ms"] for one in steps[ahead].values()), default=0)
    products.read_ahead = best
    engine.recorder.forget(lambda _: True)
    if not steps:
        return {**found, "error": "no step ran"}
    worst = max(steps[best].values(), key=lambda one: one["ms"])
    found |= {**worst, "by_new_positions": steps[best], "read_ahead": best}
    other = bench.make_engine(lm, "triton", "attention", *options)
    for new in bench.new_positions():
        found["ms_by_way"][f"{new} new, own attention"] = attempt(partial(step_ms, bench, other, new))
    found["kernels"] = profile_step(bench, engine)
    return found


def profile_step(bench: Bench, engine: Engine) -> list[Any]:
    with torch.inference_mode():
        stepper, key, _, shape = bench.stage(engine, 1, bench.new_positions()[-1])
        step = partial(engine.recorder.run, key, partial(stepper.step, shape, False))
        step()
        return profile(bench, step)


@row("libraries")
@torch.inference_mode()
def measure_libraries(bench: Bench) -> Row:
    """All layers' matrix products of a cached step by library and number of tokens, and as weights times tokens."""
    found: Row = {}
    names = ("qkv", "attn_out", "gate_up", "down")
    layers = [[getattr(layer, name).weight for name in names] for layer in bench.engine.network.layers]

    def usual(inputs: dict[int, Tensor]) -> None:
        for weights in layers:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    def turned(inputs: dict[int, Tensor]) -> None:
        for weights in layers:
            for weight in weights:
                torch.mm(weight, inputs[weight.shape[1]].t())

    before = torch.backends.cuda.preferred_blas_library() if bench.cuda else None
    for library in ("cublas", "cublaslt") if bench.cuda else ("cpu",):
        if bench.cuda:
            torch.backends.cuda.preferred_blas_library(library)
        for tokens in (*bench.new_positions(), 4 * bench.new_positions()[0]):
            inputs = {weight.shape[1]: bench.noise(tokens, weight.shape[1]) for weight in layers[0]}
            for label, way in (("", usual), (" turned", turned)):
                found[f"{library}{label} x{tokens}"] = bench.replayed(partial(way, inputs))
    if bench.cuda:
        torch.backends.cuda.preferred_blas_library(before)
    return {"ms_by_way": found}
