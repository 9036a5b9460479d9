"""Attention of packed queries to a run of their slot's KV positions, as a Triton kernel: many small programs instead of one
per head. A run is what every mask here comes to: padding is hidden at both ends, and a block sees what precedes its end.

Needs Triton.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tad.decoding.engine.gemm import FP16_LIMIT
from tad.decoding.engine.layout import Spans


class AttentionConfig(NamedTuple):
    """A program's queries, the keys of one iteration, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# For up to 64 queries of one row, of several rows, and for more; the others are for a bench to compare.
FEW = AttentionConfig(16, 64, 4, 3)
ROWS = AttentionConfig(32, 64, 4, 3)
MANY = AttentionConfig(64, 64, 4, 3)
OTHERS = (
    AttentionConfig(16, 128, 8, 2),
    AttentionConfig(32, 64, 8, 3),
    AttentionConfig(32, 128, 8, 2),
    AttentionConfig(128, 64, 8, 3),
)


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


def config_for(width: int, slots: int) -> AttentionConfig:
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
    config = config or config_for(width, slots)
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
