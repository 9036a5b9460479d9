"""Which product is taken for which projection: the library's, or one of parts, with the tiling that trials found fastest.

Trials run on the model's own weights, several layers in turn, so that no cache helps. They are kept for the process:
a second engine for the same shapes tries nothing.
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

from tad.decoding.engine import products
from tad.decoding.engine.products import (
    Tiling,
    as_fed,
    candidates,
    new_parts,
    product_parts,
    project_to_parts,
    row_block,
    split_project,
)
from tad.decoding.engine.residual import Join, join_by_library, join_in_parts
from tad.decoding.engine.weights import LayerWeights, Project, Projection, project, rows_of
from tad.errors import TadError
from tad.models.transformer import Shape

WAYS = ("auto", "torch", "triton")  # of an engine's products
ROWS = (32, 64)  # tried; other numbers take what is found for these, or the usual
KINDS = ("qkv", "attn_out", "gate_up", "down")
_LAYERS = 8  # read in turn: more than a cache holds
_SUM_RATE = 3e12  # bytes/s at which the caller reads the parts, roughly: trials do not add them up
_LOG = logging.getLogger(__name__)


class Maps(NamedTuple):
    """How each projection of a layer is computed. The last layer asks for queries, keys and values separately;
    `in_parts` says that the joint projection leaves its parts to be added."""

    qkv: Project
    query: Project
    key_value: Project
    attn_out: Join
    gate_up: Project
    down: Join
    in_parts: bool = False


LIBRARY = Maps(project, project, project, join_by_library, project, join_by_library)


class Trial(NamedTuple):
    """Milliseconds of one product of `rows` with a tiling, or why there are none."""

    rows: int
    tiling: Tiling
    ms: float | None
    error: str = ""


def few_row_maps(layers: Sequence[LayerWeights], shape: Shape, dtype: torch.dtype, ways: str) -> Maps | None:
    """The maps for few rows, after trials where the device has the kernel; None where all is left to the library."""
    if ways not in WAYS:
        raise TadError(f"products is one of {', '.join(WAYS)}, not {ways!r}")
    if ways == "torch" or (ways == "auto" and layers[0].qkv.weight.device.type != "cuda"):
        return None
    own, theirs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts = {kind: [getattr(layer, kind) for layer in layers] for kind in KINDS}
    parts["query"] = [rows_of(layers[-1].qkv, 0, own)]
    parts["key_value"] = [rows_of(layers[-1].qkv, own, own + 2 * theirs)]
    for kind, some in parts.items():
        reason = products.why_not_split(some[0], dtype)
        if reason is None and not products.takes_heads(shape.head_dim):
            reason = f"heads of {shape.head_dim}"
        if reason is not None and ways == "triton":
            raise TadError(f"products 'triton': {kind}: {reason}; use 'auto' or 'torch'")
        if reason is not None:
            return None
    found: dict[str, Any] = {}
    for kind, some in parts.items():
        split = tuned_split(some, dtype) if kind in KINDS else products.usual_split(some[0].weight)
        found[kind] = _way(kind, some[0], split, dtype)
    return Maps(**found, in_parts=True)


def _way(kind: str, by: Projection, split: int, dtype: torch.dtype) -> Project | Join:
    if kind in ("attn_out", "down"):
        return join_in_parts(split) if by.bias is None else join_by_library
    return project_to_parts(split, dtype) if kind == "qkv" else split_project(split, dtype)


# What trials found: (outputs, inputs, dtype of rows) -> split.
_SPLITS: dict[tuple[int, int, torch.dtype], int] = {}


def tuned_split(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Into how many parts products of this shape are best cut, by trials where there were none yet."""
    weight = projections[0].weight
    if weight.device.type != "cuda":
        return products.usual_split(weight)
    n, k = weight.shape
    if (n, k, dtype) not in _SPLITS:
        tune(projections, dtype)
    return _SPLITS[n, k, dtype]


def tune(projections: Sequence[Projection], dtype: torch.dtype) -> list[Trial]:
    """Try everything for the products of one shape and keep what is best."""
    began, weight = time.perf_counter(), projections[0].weight
    n, k = weight.shape
    trials = [trial for rows in ROWS for trial in try_tilings(projections, rows, dtype)]
    split = _SPLITS[n, k, dtype] = keep_best(weight, trials)
    best = ", ".join(f"{rows} rows {tuple(products.tiling_for(weight, rows, split))}" for rows in ROWS)
    seconds, failed = time.perf_counter() - began, sum(trial.ms is None for trial in trials)
    _LOG.info(
        "products with %d x %d: %s (%d trials, %d failed, %.1f s)", n, k, best, len(trials), failed, seconds
    )
    return trials


def keep_best(weight: Tensor, trials: Sequence[Trial]) -> int:
    """The split that is best over all numbers of rows, whose best tilings are kept; the usual one where all failed."""
    rows = sorted({trial.rows for trial in trials})
    best: dict[int, list[Trial]] = {}
    for split in products.SPLITS:
        fastest = [
            min(
                (trial for trial in trials if trial.rows == count and trial.tiling.split == split),
                key=lambda trial: cost(trial, weight),
                default=None,
            )
            for count in rows
        ]
        if all(trial is not None and trial.ms is not None for trial in fastest):
            best[split] = [trial for trial in fastest if trial is not None]
    if not rows or not best:
        return products.usual_split(weight)
    split = min(best, key=lambda one: sum(cost(trial, weight) for trial in best[one]))
    n, k = weight.shape
    for trial in best[split]:
        products.chosen[n, k, row_block(trial.rows), split] = trial.tiling
    return split


def cost(trial: Trial, weight: Tensor) -> float:
    """A trial's milliseconds with what reading its parts will add."""
    if trial.ms is None:
        return math.inf
    split = trial.tiling.split
    size = 2 if split == 1 else 4 * split
    return trial.ms + 1e3 * trial.rows * len(weight) * size / _SUM_RATE


def try_tilings(projections: Sequence[Projection], rows: int, dtype: torch.dtype) -> list[Trial]:
    """Every candidate on some layers' weights, recorded and replayed. One that fails costs no other one."""
    some = projections[:_LAYERS]
    weight = some[0].weight
    x = as_fed(torch.randn(rows, weight.shape[1], device=weight.device).to(dtype))
    tried, trials = candidates(weight), []
    compile_ahead(x, some[0], tried, dtype)
    for tiling in tried:

        def run(tiling: Tiling = tiling) -> None:
            for by in some:
                assert by.scale is not None
                product_parts(x, by.weight, by.scale, dtype, tiling)

        try:
            trials.append(Trial(rows, tiling, time_replays(run) / len(some)))
        except Exception as error:
            words = str(error).splitlines()[0] if str(error) else ""
            trials.append(Trial(rows, tiling, None, f"{type(error).__name__}: {words}"[:200]))
    return trials


def compile_ahead(x: Tensor, by: Projection, tried: Sequence[Tiling], dtype: torch.dtype) -> None:
    """Compile the kernels of some tilings side by side, those with one part and those with several. Where Triton cannot
    do that (before 3.6), they are compiled one by one as they are tried."""
    import triton

    from tad.decoding.engine.product_kernel import launch

    assert by.scale is not None
    with ThreadPoolExecutor(8) as pool:
        try:
            background = triton.AsyncCompileMode(pool, ignore_errors=True)
        except (AttributeError, TypeError):
            return
        with background:
            for tiling in tried:
                out = new_parts(x, by.weight, tiling.split, dtype)
                try:
                    launch(x, by.weight, by.scale, out, tiling, only_compile=True)
                except Exception as error:  # its trial will say the same, and count as failed
                    _LOG.info("%s does not compile: %s", tuple(tiling), error)


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
