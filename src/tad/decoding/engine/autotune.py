"""Autotuning: which GEMM serves which projection, the library's or a split-K one, with the config that was fastest.

Configs are timed on the model's own weights, several layers in turn, so that no cache helps. Results are kept for the
process: a second engine for the same shapes times nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tad.decoding.engine import gemm
from tad.decoding.engine.add_norm import ProjectAddNorm, project_add_norm, split_k_add_norm
from tad.decoding.engine.gemm import (
    KernelConfig,
    as_input,
    candidates,
    gemm_partials,
    new_partials,
    project_to_partials,
    row_block,
    split_k_project,
)
from tad.decoding.engine.weights import LayerWeights, Project, Projection, project, rows_of
from tad.models.shape import Shape

ROWS = (32, 64)  # tried; other numbers take what is found for these, or the usual
KINDS = ("qkv", "attn_out", "gate_up", "down")
_LAYERS = 8  # read in turn: more than a cache holds
_SUM_RATE = 3e12  # bytes/s at which the caller reads the partials, roughly: timings do not add them up
_LOG = logging.getLogger(__name__)


class LinearOps(NamedTuple):
    """How each projection of a layer is computed. The last layer asks for queries, keys and values separately;
    `partials` says that the joint projection leaves its split-K partials to be reduced."""

    qkv: Project
    query: Project
    key_value: Project
    attn_out: ProjectAddNorm
    gate_up: Project
    down: ProjectAddNorm
    partials: bool = False
    inputs: torch.dtype | None = None  # of what attention gives, where not the model's


LIBRARY = LinearOps(project, project, project, project_add_norm, project, project_add_norm)


class Timing(NamedTuple):
    """Milliseconds of one GEMM of `rows` with a config, or why there are none."""

    rows: int
    config: KernelConfig | None  # None: the library
    ms: float | None
    error: str = ""


def few_row_ops(layers: Sequence[LayerWeights], shape: Shape, dtype: torch.dtype) -> LinearOps | None:
    """The operations for few rows, tuned where the device has the kernel; None where all is left to the library."""
    own, theirs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    by_kind = {kind: [getattr(layer, kind) for layer in layers] for kind in KINDS}
    by_kind["query"] = [rows_of(layers[-1].qkv, 0, own)]
    by_kind["key_value"] = [rows_of(layers[-1].qkv, own, own + 2 * theirs)]
    served = all(gemm.takes_split_k(some[0], dtype) for some in by_kind.values())
    if not served or not gemm.takes_heads(shape.head_dim):
        return None
    splits: dict[str, int | None] = {}
    for kind, some in by_kind.items():
        by = some[0]
        alone = None if by.scale is None else gemm.usual_split(by.weight)
        splits[kind] = tuned_split(some, dtype) if kind in KINDS else alone
    if not any(splits.values()):
        return None
    found: dict[str, Any] = {
        kind: _operation(kind, by_kind[kind][0], split, dtype) for kind, split in splits.items()
    }
    return LinearOps(**found, partials=True, inputs=gemm.input_dtype(dtype, layers[0].attn_out))


def _operation(kind: str, by: Projection, split: int | None, dtype: torch.dtype) -> Project | ProjectAddNorm:
    if kind in ("attn_out", "down"):
        return project_add_norm if split is None or by.bias is not None else split_k_add_norm(split)
    if kind == "qkv":
        return project_to_partial if split is None else project_to_partials(split, dtype)
    return project if split is None else split_k_project(split, dtype)


def project_to_partial(x: Tensor, by: Projection) -> Tensor:
    """The library's GEMM as a single partial, which leaves the bias to be added."""
    return project(x, by._replace(bias=None))[None]


# What was found: (dtype of weights, outputs, inputs, dtype of rows) -> split, or None where the library is faster.
_SPLITS: dict[tuple[torch.dtype, int, int, torch.dtype], int | None] = {}


def tuned_split(projections: Sequence[Projection], dtype: torch.dtype) -> int | None:
    """Into how many splits of K GEMMs of this shape are best cut, tuned where they were not yet. None: the library's are
    faster."""
    weight = projections[0].weight
    if weight.device.type != "cuda":
        return gemm.usual_split(weight)
    n, k = weight.shape
    key = (weight.dtype, n, k, dtype)
    if key not in _SPLITS:
        tune(projections, dtype)
    return _SPLITS[key]


def tune(projections: Sequence[Projection], dtype: torch.dtype) -> list[Timing]:
    """Time everything for the GEMMs of one shape and keep what is best."""
    began, weight = time.perf_counter(), projections[0].weight
    n, k = weight.shape
    timings = [timing for rows in ROWS for timing in time_configs(projections, rows, dtype)]
    split = _SPLITS[weight.dtype, n, k, dtype] = keep_best(weight, timings)
    best = "the library's"
    if split is not None:
        best = ", ".join(f"{rows} rows {tuple(gemm.config_for(weight, rows, split))}" for rows in ROWS)
    seconds, failed = time.perf_counter() - began, sum(timing.ms is None for timing in timings)
    _LOG.info(
        "split-K GEMM %d x %d: %s (%d configs timed, %d failed, %.1f s)",
        n,
        k,
        best,
        len(timings),
        failed,
        seconds,
    )
    return timings


def keep_best(weight: Tensor, timings: Sequence[Timing]) -> int | None:
    """The split that is best over all numbers of rows, whose best configs are kept, or None for the library; the usual one
    where all failed."""
    rows = sorted({timing.rows for timing in timings})
    best: dict[int | None, list[Timing]] = {}
    for split in (*gemm.SPLITS, None):
        fastest = [
            min(
                (
                    timing
                    for timing in timings
                    if timing.rows == count and (timing.config and timing.config.split) == split
                ),
                key=lambda timing: cost(timing, weight),
                default=None,
            )
            for count in rows
        ]
        if all(timing is not None and timing.ms is not None for timing in fastest):
            best[split] = [timing for timing in fastest if timing is not None]
    if not rows or not best:
        return gemm.usual_split(weight)
    split = min(best, key=lambda one: sum(cost(timing, weight) for timing in best[one]))
    n, k = weight.shape
    for timing in best[split]:
        if timing.config is not None:
            gemm.chosen[weight.dtype, n, k, row_block(timing.rows), timing.config.split] = timing.config
    return split


def cost(timing: Timing, weight: Tensor) -> float:
    """A timing's milliseconds with what reading its partials will add."""
    if timing.ms is None:
        return math.inf
    split = 1 if timing.config is None else timing.config.split
    size = 2 if split == 1 else 4 * split
    return timing.ms + 1e3 * timing.rows * len(weight) * size / _SUM_RATE


def time_configs(projections: Sequence[Projection], rows: int, dtype: torch.dtype) -> list[Timing]:
    """Every candidate on some layers' weights, captured and replayed, and the library's GEMM of weights that need no widening.
    One that fails costs no other one."""
    some = projections[:_LAYERS]
    weight = some[0].weight
    x = as_input(torch.randn(rows, weight.shape[1], device=weight.device).to(dtype), some[0])
    tried, timings = candidates(weight), []
    compile_ahead(x, some[0], tried, dtype)
    for config in (*tried, *([None] if some[0].scale is None else [])):

        def run(config: KernelConfig | None = config) -> None:
            for by in some:
                if config is None:
                    project(x, by._replace(bias=None))
                else:
                    gemm_partials(x, by.weight, by.scale, dtype, config)

        try:
            timings.append(Timing(rows, config, time_replays(run) / len(some)))
        except Exception as error:
            words = str(error).splitlines()[0] if str(error) else ""
            timings.append(Timing(rows, config, None, f"{type(error).__name__}: {words}"[:200]))
    return timings


def compile_ahead(x: Tensor, by: Projection, tried: Sequence[KernelConfig], dtype: torch.dtype) -> None:
    """Compile the kernels of some configs side by side, those with one split and those with several. Where Triton cannot
    do that (before 3.6), they are compiled one by one as they are timed."""
    import triton

    from tad.decoding.engine.kernels import launch_gemm

    with ThreadPoolExecutor(8) as pool:
        try:
            background = triton.AsyncCompileMode(pool, ignore_errors=True)
        except (AttributeError, TypeError):
            return
        with background:
            for config in tried:
                out = new_partials(x, by.weight, config.split, dtype)
                try:
                    launch_gemm(x, by.weight, by.scale, out, config, only_compile=True)
                except Exception as error:  # its timing will say the same, and count as failed
                    _LOG.info("%s does not compile: %s", tuple(config), error)


def time_replays(run: Callable[[], None], repeats: int = 5) -> float:
    """Milliseconds of what `run` launches on a GPU, without the host's part: the best of three."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    found = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / repeats)
    return min(found)
