"""The Triton kernel of `tad.decoding.engine.add_norm`: one program per row, which is read once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tad.decoding.engine.gemm import FP16_LIMIT


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x: tl.tensor,  # [rows, width]
    partials: tl.tensor,  # [split, rows, width]
    weight: tl.tensor,  # [width]
    summed: tl.tensor,  # [rows, width]
    normed: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    limit: tl.constexpr,
    split: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    old = tl.load(x + row * width + column, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    total = tl.zeros((block,), dtype=tl.float32)
    for part in tl.static_range(split):
        total += tl.load(partials + (part * rows + row) * width + column, mask=inside, other=0.0).to(
            tl.float32
        )
    # Rounded where the layers round: the GEMM, the sum, the norm, and the norm times its weight.
    new = (old.to(tl.float32) + total.to(old.dtype).to(tl.float32)).to(old.dtype)
    tl.store(summed + row * width + column, new, mask=inside)
    wide = new.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / width
    even = (wide * tl.rsqrt(mean + eps)).to(old.dtype)
    result = (even.to(tl.float32) * scale.to(tl.float32)).to(old.dtype)
    if normed.dtype.element_ty == tl.float16:
        result = tl.clamp(result.to(tl.float32), -limit, limit)
    tl.store(normed + row * width + column, result.to(normed.dtype.element_ty), mask=inside)


def launch(x: Tensor, partials: Tensor, weight: Tensor, eps: float, summed: Tensor, normed: Tensor) -> None:
    """Fill `summed` with x and the partials, and `normed` with its norm, in x's dtype or clamped to fp16. All are contiguous."""
    rows, width = x.shape
    _add_norm[(rows,)](
        x,
        partials,
        weight,
        summed,
        normed,
        rows,
        width,
        eps,
        limit=FP16_LIMIT,
        split=len(partials),
        block=triton.next_power_of_2(width),
        num_warps=8,
    )
