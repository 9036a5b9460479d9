"""The Triton kernel of `tad.decoding.engine.products`, and its launch. Needs Triton, which CUDA builds of torch bring.

A program takes some outputs and a part of the inputs, reads that part of the weights once, in a pipeline of loads, and
leaves its sum. fp8 weights are widened on the way to the matrix units; the activations are never rounded to fp8.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tad.decoding.engine.products import Tiling

_LINE = 128  # bytes that one prefetch brings


@triton.jit
def _read_ahead(start: tl.tensor, lines: tl.tensor, program: tl.tensor, programs: tl.tensor) -> None:
    """Ask for a share of the `lines` at `start`, to be in the second-level cache when the next product reads them."""
    share = tl.cdiv(lines, programs)
    for low in range(0, share, 128):
        line = tl.minimum(program * share + low + tl.arange(0, 128), lines - 1).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [start.to(tl.int64) + line * 128],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _widen(codes: tl.tensor) -> tl.tensor:
    """e4m3 to bf16, exactly, in fewer instructions than a conversion takes: exponent and fraction are put where bf16
    has its own, and a product with 2^120 makes up for the other offset of the exponent."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 both, sign, factor;
        mov.b32 factor, 0x7b807b80;
        cvt.u32.u16 both, $1;
        prmt.b32 both, both, 0, 0x1404;
        and.b32 sign, both, 0x80008000;
        shr.u32 both, both, 4;
        and.b32 both, both, 0x07f007f0;
        or.b32 both, both, sign;
        mul.rn.bf16x2 $0, both, factor;
        }""",
        "=r,h",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit(do_not_specialize=["m", "split", "lines"])
def _product(
    x: tl.tensor,  # [m, k], or its descriptor
    weight: tl.tensor,  # [n, k], or its descriptor
    scale: tl.tensor,  # [n], where scaled
    ahead: tl.tensor,  # where reads_ahead
    out: tl.tensor,  # [split, m, n]
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    split: tl.tensor,
    lines: tl.tensor,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    turned: tl.constexpr,
    described: tl.constexpr,
    scaled: tl.constexpr,
    widened: tl.constexpr,
    reads_ahead: tl.constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    tile, part = program // split, program % split
    blocks = k // block_k
    low, high = blocks * part // split, blocks * (part + 1) // split
    first = tile * block_n
    row, column, inner = tl.arange(0, block_m), first + tl.arange(0, block_n), tl.arange(0, block_k)
    if not described:
        # Beyond the last row the last row again: loads without masks, and nothing of it is stored.
        x_at = x + tl.minimum(row, m - 1)[:, None] * x_stride + inner[None, :]
        weight_at = weight + tl.minimum(column, n - 1)[:, None] * k + inner[None, :]
    if turned:
        total = tl.zeros((block_n, block_m), dtype=tl.float32)
    else:
        total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for block in tl.range(low, high, num_stages=stages):
        if described:
            read = weight.load([first, block * block_k])
            fed = x.load([0, block * block_k])
        else:
            read = tl.load(weight_at + block * block_k, eviction_policy="evict_first")
            fed = tl.load(x_at + block * block_k, eviction_policy="evict_last")
        read = _widen(read) if widened else read.to(fed.dtype)
        total = tl.dot(read, tl.trans(fed), total) if turned else tl.dot(fed, tl.trans(read), total)
    if reads_ahead:
        _read_ahead(ahead, lines, program, programs)
    if turned:
        total = tl.trans(total)
    if scaled:
        total *= tl.load(scale + tl.minimum(column, n - 1))[None, :]
    place = part * m * n + row[:, None] * n + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    ahead: Tensor | None,
    bytes_ahead: int,
    out: Tensor,
    tiling: Tiling,
) -> None:
    """Fill out [split, m, n] with the parts' sums of x [m, k] times weight [n, k]."""
    _run(_product, x, weight, scale, ahead, bytes_ahead, out, tiling)


def warm(x: Tensor, weight: Tensor, scale: Tensor | None, out: Tensor, tiling: Tiling) -> None:
    """Compile for these arguments, without running; inside `triton.AsyncCompileMode` in the background."""
    _run(_product, x, weight, scale, None, 0, out, tiling, warm=True)


def _run(
    kernel: Any,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    ahead: Tensor | None,
    bytes_ahead: int,
    out: Tensor,
    tiling: Tiling,
    warm: bool = False,
) -> None:
    split, m, n = out.shape
    k = weight.shape[1]
    block_m = max(16, triton.next_power_of_2(m))
    lines = min(bytes_ahead, 0 if ahead is None else ahead.nbytes) // _LINE
    reads: list[Any] = [x, weight]
    if tiling.described:
        reads = [
            TensorDescriptor.from_tensor(x, [block_m, tiling.block_k]),
            TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
        ]
    grid = (triton.cdiv(n, tiling.block_n) * split,)
    arguments = (*reads, out if scale is None else scale, ahead if lines else out, out, m, n, k, x.stride(0), split, lines)  # fmt: skip
    constants = {
        "block_m": block_m,
        "block_n": tiling.block_n,
        "block_k": tiling.block_k,
        "stages": tiling.stages,
        "turned": tiling.turned,
        "described": tiling.described,
        "scaled": scale is not None,
        "widened": scale is not None and x.dtype == torch.bfloat16,
        "reads_ahead": lines > 0,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    if warm:
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)
