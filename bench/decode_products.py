"""Rows of bench/decode.py on the kernels of our own: products of few rows with fp8 weights, and steps with and without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_bench import Bench, Row, row
from tad.decoding import Engine
from tad.decoding.engine import tuning
from tad.decoding.engine.tuning import KINDS, Trial, cost
from tad.decoding.engine.weights import Projection
from tad.models.quantize import to_fp8


@row("kernels")
def measure_kernels(bench: Bench) -> Row:
    """The cached step as it is, and without each thing of our own; bf16 and fp8 weights."""
    found: Row = {"ms_by_way": {}}
    small = bench.quantized_lm()[0]
    ways = (
        ("bf16", bench.lm, ()),
        ("bf16, decisions not compiled", bench.lm, ("unfused",)),
        ("bf16, the library's attention", bench.lm, ("library-attention",)),
        ("fp8", small, ()),
        ("fp8, decisions not compiled", small, ("unfused",)),
        ("fp8, the library's attention", small, ("library-attention",)),
        ("fp8, the library's products", small, ("library-products",)),
    )
    for label, lm, flags in ways:
        began = time.perf_counter()
        engine = bench.make_engine(lm, *flags)
        for new in bench.new_positions():
            found["ms_by_way"][f"{label}, {new} new"] = attempt(partial(step_ms, bench, engine, new))
        found[f"{label}_opening_s"] = time.perf_counter() - began
    return found


def step_ms(bench: Bench, engine: Engine, new: int) -> float:
    ms: float = bench.time_step(1, new, engine)["ms"]
    return ms


def attempt(measure: Callable[[], float]) -> float | str:
    """A number, or the words of what went wrong: one way costs no other."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@row("products")
@torch.inference_mode()
def measure_products(bench: Bench) -> Row:
    """Each projection with fp8 weights by itself, some layers' weights in turn: the library, and every tiling of the kernel."""
    began, shapes = time.perf_counter(), {}
    layers = bench.quantized_lm()[1]
    for kind in KINDS:
        some = [getattr(layer, kind) for layer in layers]
        trials = tuning.tune(some, bench.dtype) if bench.cuda else []
        for rows in bench.new_positions():
            shapes[f"{kind} x{rows}"] = describe_shape(bench, rows, some, trials)
    totals: Row = {}
    for rows in bench.new_positions():
        for way in ("library", "kernel", "kernel with sums", "floor"):
            found = [shapes[f"{kind} x{rows}"].get(way) for kind in KINDS]
            if all(isinstance(ms, float) for ms in found):
                totals[f"{way} x{rows}, {len(layers)} layers"] = len(layers) * sum(found)
    best = {name: one["tiling"] for name, one in shapes.items()}
    return {"ms_by_way": totals, "best": best, "shapes": shapes, "tuning_s": time.perf_counter() - began}


def describe_shape(bench: Bench, rows: int, some: Sequence[Projection], trials: Sequence[Trial]) -> Row:
    weight = some[0].weight
    here = [trial for trial in trials if trial.rows == rows]
    found: Row = {
        "shape": list(weight.shape),
        "floor": 1e3 * weight.nbytes / bench.copy_rate,
        "library": attempt(partial(time_library, bench, some, rows)),
        "trials": {" ".join(str(int(value)) for value in trial.tiling): trial.ms or trial.error for trial in here},
        "tiling": "none",
    }  # fmt: skip
    best = min(here, key=lambda trial: cost(trial, weight), default=None)
    if best is not None and best.ms is not None:
        found["tiling"] = " ".join(str(int(value)) for value in best.tiling)
        found["kernel"], found["kernel with sums"] = best.ms, cost(best, weight)
        found["of floor"] = found["floor"] / best.ms
    return found


def time_library(bench: Bench, some: Sequence[Projection], rows: int) -> float:
    """Milliseconds of the library's product with rows that are fp8 already; elsewhere than on a GPU of the widened one."""
    some = some[: tuning._LAYERS]
    x = bench.noise(rows, some[0].weight.shape[1])
    codes, row_scale = to_fp8(x)

    def run() -> None:
        for by in some:
            assert by.scale is not None
            torch._scaled_mm(
                codes, by.weight.t(), scale_a=row_scale, scale_b=by.scale[None], out_dtype=torch.bfloat16
            )

    if bench.cuda:
        return tuning.time_replays(run) / len(some)
    return bench.timed(lambda: F.linear(x, some[0].weight.to(x.dtype)), 1)


@row("libraries")
@torch.inference_mode()
def measure_libraries(bench: Bench) -> Row:
    """All layers' matrix products of a cached step by library and number of tokens, and as weights times tokens."""
    found: Row = {}
    layers = [[getattr(layer, kind).weight for kind in KINDS] for layer in bench.engine.network.layers]

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
