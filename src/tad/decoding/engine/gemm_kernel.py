"""The Triton kernel of `tad.decoding.engine.gemm`, and its launch. Needs Triton, which CUDA builds of torch bring.

A program takes some outputs and a part of K, reads that part of the weights once, in a pipeline of loads, and leaves its
partial. Weights are the left factor: only that one can come from registers, where fp8 becomes fp16.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tad.decoding.engine.gemm import KernelConfig


@triton.jit(do_not_specialize=["m", "split"])
def _gemm(
    x: tl.tensor,  # [m, k], or its descriptor
    weight: tl.tensor,  # [n, k], or its descriptor
    scale: tl.tensor,  # [n]
    out: tl.tensor,  # [split, m, n]
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    split: tl.tensor,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    tma: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    tile, part = program // split, program % split
    blocks = k // block_k
    low, high = blocks * part // split, blocks * (part + 1) // split
    first = tile * block_n
    row, column, inner = tl.arange(0, block_m), first + tl.arange(0, block_n), tl.arange(0, block_k)
    if not tma:
        # Beyond the last row the last row again: loads without masks, and nothing of it is stored.
        x_at = x + tl.minimum(row, m - 1)[:, None] * x_stride + inner[None, :]
        weight_at = weight + tl.minimum(column, n - 1)[:, None] * k + inner[None, :]
    total = tl.zeros((block_n, block_m), dtype=tl.float32)
    for block in tl.range(low, high, num_stages=stages):
        if tma:
            read = weight.load([first, block * block_k])
            given = x.load([0, block * block_k])
        else:
            read = tl.load(weight_at + block * block_k, eviction_policy="evict_first")
            given = tl.load(x_at + block * block_k, eviction_policy="evict_last")
        total = tl.dot(read.to(given.dtype), tl.trans(given), total)
    total = tl.trans(total) * tl.load(scale + tl.minimum(column, n - 1))[None, :]
    place = part * m * n + row[:, None] * n + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def launch(
    x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, config: KernelConfig, only_compile: bool = False
) -> None:
    """Fill out [split, m, n] with the partials of x [m, k] in fp16 times weight [n, k]. `only_compile` runs nothing;
    inside `triton.AsyncCompileMode` it compiles in the background."""
    split, m, n = out.shape
    k = weight.shape[1]
    block_m = max(16, triton.next_power_of_2(m))
    reads: list[Any] = [x, weight]
    if config.tma:
        reads = [
            TensorDescriptor.from_tensor(x, [block_m, config.block_k]),
            TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        ]
    grid = (triton.cdiv(n, config.block_n) * split,)
    arguments = (*reads, scale, out, m, n, k, x.stride(0), split)
    constants = {
        "block_m": block_m,
        "block_n": config.block_n,
        "block_k": config.block_k,
        "stages": config.stages,
        "tma": config.tma,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if only_compile:
        _gemm.warmup(*arguments, grid=grid, **constants)
    else:
        _gemm[grid](*arguments, **constants)
