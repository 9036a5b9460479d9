"""The Triton kernels of the engine: split-K GEMM, add + RMSNorm, RoPE with the KV write, and attention to a run of positions.

Needs Triton, which CUDA builds of torch bring: modules import this one inside the functions that run on a GPU. What each
computes is said, and computed in torch, by `gemm.py`, `add_norm.py` and `rope.py`; attention's specification is in the tests.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tad.decoding.engine.layout import Spans
from tad.decoding.engine.tiling import FP16_LIMIT, KernelConfig

_HEADS = 8  # of a program that applies RoPE

# Split-K GEMM. A program takes some outputs and a part of K, reads that part of the weights once, in a pipeline of loads, and
# leaves its partial. Weights are the left factor: only that one can come from registers, where fp8 or int8 becomes fp16.


@triton.jit(do_not_specialize=["m", "split"])
def _gemm(
    x: tl.tensor,  # [m, k], or its descriptor
    weight: tl.tensor,  # [n, k], or its descriptor
    scale: tl.tensor,  # [n] where scaled
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
    scaled: tl.constexpr,
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
    total = tl.trans(total)
    if scaled:
        total *= tl.load(scale + tl.minimum(column, n - 1))[None, :]
    place = part * m * n + row[:, None] * n + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def launch_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    out: Tensor,
    config: KernelConfig,
    only_compile: bool = False,
) -> None:
    """Fill out [split, m, n] with the partials of x [m, k] in fp16, or in the weight's dtype, times weight [n, k].
    `only_compile` runs nothing; inside `triton.AsyncCompileMode` it compiles in the background."""
    split, m, n = out.shape
    k = weight.shape[1]
    block_m = max(16, triton.next_power_of_2(m))
    reads: list[Any] = [x, weight]
    if config.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        reads = [
            TensorDescriptor.from_tensor(x, [block_m, config.block_k]),
            TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        ]
    grid = (triton.cdiv(n, config.block_n) * split,)
    arguments = (*reads, out if scale is None else scale, out, m, n, k, x.stride(0), split)
    constants = {
        "block_m": block_m,
        "block_n": config.block_n,
        "block_k": config.block_k,
        "stages": config.stages,
        "tma": config.tma,
        "scaled": scale is not None,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    if only_compile:
        _gemm.warmup(*arguments, grid=grid, **constants)
    else:
        _gemm[grid](*arguments, **constants)


# Add + RMSNorm: one program per row, which is read once.


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


def launch_add_norm(
    x: Tensor, partials: Tensor, weight: Tensor, eps: float, summed: Tensor, normed: Tensor
) -> None:
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


# RoPE: a program takes some heads of one token.


@triton.jit
def _read(
    partials: tl.tensor, bias: tl.tensor, at: tl.tensor, own: tl.tensor, mask: tl.tensor, step: tl.tensor,
    split: tl.constexpr, biased: tl.constexpr, like: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """The GEMM at some outputs: its partials reduced, rounded as a GEMM's result is."""
    total = tl.zeros(at.shape, dtype=tl.float32)
    for part in tl.static_range(split):
        total += tl.load(partials + part * step + at, mask=mask, other=0.0).to(tl.float32)
    if biased:
        total += tl.load(bias + own, mask=mask, other=0.0).to(tl.float32)
    return total.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _norm(
    x: tl.tensor, scale: tl.tensor, query_norm: tl.tensor, key_norm: tl.tensor, at: tl.tensor, head: tl.tensor,
    heads: tl.constexpr, kv_heads: tl.constexpr, like: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """RMSNorm of query and key heads, rounded where the layers round; value heads as they are."""
    weight = tl.where(
        head < heads, tl.load(query_norm + at).to(tl.float32), tl.load(key_norm + at).to(tl.float32)
    )
    even = (x * scale).to(like.dtype.element_ty).to(tl.float32)
    found = (even * weight).to(like.dtype.element_ty).to(tl.float32)
    return tl.where(head < heads + kv_heads, found, x)


@triton.jit(do_not_specialize=["count"])
def _rope(
    partials: tl.tensor,  # [split, count, (heads + 2 kv_heads) * dim]
    bias: tl.tensor,  # where biased
    query_norm: tl.tensor,  # [dim] where normed
    key_norm: tl.tensor,
    cos: tl.tensor,  # [count, dim]
    sin: tl.tensor,
    kv_index: tl.tensor,  # [count]
    query: tl.tensor,  # [count, heads, dim]
    keys: tl.tensor,  # [positions, kv_heads, dim]
    values: tl.tensor,
    count: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    split: tl.constexpr,
    biased: tl.constexpr,
    normed: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block + tl.arange(0, block))[:, None]
    column = tl.arange(0, dim)[None, :]
    other = (column + dim // 2) % dim  # the halves change places
    width = (heads + 2 * kv_heads) * dim
    step = count * width
    mask = (head < heads + 2 * kv_heads) & (column < dim)
    own, swapped = head * dim + column, head * dim + other
    value = _read(partials, bias, token * width + own, own, mask, step, split, biased, query)
    half = _read(partials, bias, token * width + swapped, swapped, mask, step, split, biased, query)
    if normed:
        scale = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
        value = _norm(value, scale, query_norm, key_norm, column, head, heads, kv_heads, query)
        half = _norm(half, scale, query_norm, key_norm, other, head, heads, kv_heads, query)
    rotated = value * tl.load(cos + token * dim + column).to(tl.float32)
    rotated += half * tl.load(sin + token * dim + column).to(tl.float32)
    result = tl.where(head < heads + kv_heads, rotated, value).to(query.dtype.element_ty)
    tl.store(query + token * heads * dim + own, result, mask=(head < heads) & (column < dim))
    row = tl.load(kv_index + token) * (kv_heads * dim)
    is_key = (head >= heads) & (head < heads + kv_heads) & (column < dim)
    tl.store(keys + row + own - heads * dim, result, mask=is_key)
    is_value = (head >= heads + kv_heads) & mask
    tl.store(values + row + own - (heads + kv_heads) * dim, result, mask=is_value)


def launch_rope(
    partials: Tensor,
    bias: Tensor | None,
    head_norms: list[Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_index: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Fill `query`, and `keys` and `values` at `kv_index`. All are contiguous."""
    split, count, _ = partials.shape
    heads, kv_heads, dim = query.shape[1], keys.shape[1], query.shape[2]
    _rope[(count, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        partials,
        partials if bias is None else bias,
        *((partials, partials) if head_norms is None else head_norms),
        cos,
        sin,
        kv_index,
        query,
        keys,
        values,
        count,
        eps,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        split=split,
        biased=bias is not None,
        normed=head_norms is not None,
        block=_HEADS,
        num_warps=4,
    )


# Attention: many small programs instead of one per head. A run is what every mask here comes to: padding is hidden at both
# ends, and a block sees what precedes its end.


class AttentionConfig(NamedTuple):
    """A program's queries, the keys of one iteration, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# For up to 64 queries of one row, of several rows, and for more.
FEW = AttentionConfig(16, 64, 4, 3)
ROWS = AttentionConfig(32, 64, 4, 3)
MANY = AttentionConfig(64, 64, 4, 3)


@triton.jit(do_not_specialize=["room"])
def _attention(
    query: tl.tensor,  # [n, heads, dim]
    keys: tl.tensor,  # [slots * room, kv_heads, dim]
    values: tl.tensor,
    out: tl.tensor,  # [n, heads, dim]
    first: tl.tensor,  # [slots]
    count: tl.tensor,  # [slots]
    start: tl.tensor,  # [slots]
    end: tl.tensor,  # [n]
    room: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    out_stride: tl.tensor,
    sharpness: tl.tensor,  # scale of the scores, for powers of two
    limit: tl.constexpr,
    groups: tl.constexpr,
    dim: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    head, slot = tl.program_id(1), tl.program_id(2)
    own = tl.program_id(0) * block_q + tl.arange(0, block_q)
    number = tl.load(count + slot)
    if tl.program_id(0) * block_q >= number:
        return
    row = tl.load(first + slot) + own
    inner, column = tl.arange(0, dim), tl.arange(0, block_k)
    within = own < number
    asked = tl.load(
        query + row[:, None] * query_stride + head * dim + inner[None, :], mask=within[:, None], other=0.0
    )
    until = tl.load(end + row, mask=within, other=0).to(tl.int32)
    low, high = tl.load(start + slot).to(tl.int32), tl.max(until, 0)
    until = tl.where(within, until, high)
    place = (slot.to(tl.int64) * room + column) * key_stride
    key_at = keys + (head // groups) * dim + place[:, None] + inner[None, :]
    value_at = values + (head // groups) * dim + place[:, None] + inner[None, :]
    largest = tl.full((block_q,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((block_q,), dtype=tl.float32)
    total = tl.zeros((block_q, dim), dtype=tl.float32)
    # Every query sees the first position of the run, so that `largest` is a number from the first iteration on.
    for at in tl.range(low, high, block_k, num_stages=stages):
        real = at + column < high
        key = tl.load(key_at + at * key_stride, mask=real[:, None], other=0.0)
        value = tl.load(value_at + at * key_stride, mask=real[:, None], other=0.0)
        score = tl.dot(asked, tl.trans(key)) * sharpness
        score = tl.where(at + column[None, :] < until[:, None], score, float("-inf"))
        above = tl.maximum(largest, tl.max(score, 1))
        share = tl.exp2(score - above[:, None])
        shrink = tl.exp2(largest - above)
        weight = weight * shrink + tl.sum(share, 1)
        total = tl.dot(share.to(value.dtype), value, total * shrink[:, None])
        largest = above
    total = total / weight[:, None]
    if out.dtype.element_ty == tl.float16:
        total = tl.clamp(total, -limit, limit)
    tl.store(
        out + row[:, None] * out_stride + head * dim + inner[None, :],
        total.to(out.dtype.element_ty),
        mask=within[:, None],
    )


def attention_config(width: int, slots: int) -> AttentionConfig:
    if width > 64:
        return MANY
    return FEW if slots == 1 else ROWS


def attend_spans(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    width: int,
    room: int,
    dtype: torch.dtype,
    config: AttentionConfig | None = None,
) -> Tensor:
    """query [n, heads, dim], at most `width` of a slot, to keys and values [slots * room, kv_heads, dim]: [n, heads * dim].
    Queries of no slot have no result. fp16 results of bf16 values are means of them, and so as small as they are; what lies
    beyond fp16 is clamped."""
    count, heads, dim = query.shape
    slots = len(spans.first)
    config = config or attention_config(width, slots)
    out = torch.empty(count, heads * dim, dtype=dtype, device=query.device)
    _attention[(triton.cdiv(width, config.queries), heads, slots)](
        query,
        keys,
        values,
        out,
        *spans,
        room,
        query.stride(0),
        keys.stride(0),
        out.stride(0),
        math.log2(math.e) / math.sqrt(dim),
        limit=FP16_LIMIT,
        groups=heads // keys.shape[1],
        dim=dim,
        block_q=config.queries,
        block_k=config.keys,
        stages=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out
