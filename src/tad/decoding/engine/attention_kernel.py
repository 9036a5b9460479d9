"""Attention of few queries to all KV positions of one row, as a Triton kernel: many small programs instead of one per head.

Not covered: several rows side by side, and positions that some query may not see. Needs Triton.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tad.decoding.engine.gemm import FP16_LIMIT


class AttentionConfig(NamedTuple):
    """A program's queries, the keys of one iteration, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# For up to 64 queries, and for more; the others are for a bench to compare.
FEW = AttentionConfig(16, 64, 4, 3)
MANY = AttentionConfig(64, 64, 4, 3)
OTHERS = (
    AttentionConfig(16, 128, 8, 2),
    AttentionConfig(32, 64, 4, 3),
    AttentionConfig(32, 64, 8, 3),
    AttentionConfig(32, 128, 8, 2),
    AttentionConfig(128, 64, 8, 3),
)


@triton.jit(do_not_specialize=["count", "kv_len"])
def _attention(
    query: tl.tensor,  # [count, heads, dim]
    keys: tl.tensor,  # [at least kv_len, kv_heads, dim]
    values: tl.tensor,
    out: tl.tensor,  # [count, heads, dim]
    count: tl.tensor,
    kv_len: tl.tensor,
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
    head = tl.program_id(1)
    row = tl.program_id(0) * block_q + tl.arange(0, block_q)
    inner, column = tl.arange(0, dim), tl.arange(0, block_k)
    within = row[:, None] < count
    asked = tl.load(query + row[:, None] * query_stride + head * dim + inner[None, :], mask=within, other=0.0)
    key_at = keys + (head // groups) * dim + column[:, None] * key_stride + inner[None, :]
    value_at = values + (head // groups) * dim + column[:, None] * key_stride + inner[None, :]
    largest = tl.full((block_q,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((block_q,), dtype=tl.float32)
    total = tl.zeros((block_q, dim), dtype=tl.float32)
    for low in tl.range(0, kv_len, block_k, num_stages=stages):
        real = low + column < kv_len
        key = tl.load(key_at + low * key_stride, mask=real[:, None], other=0.0)
        value = tl.load(value_at + low * key_stride, mask=real[:, None], other=0.0)
        score = tl.dot(asked, tl.trans(key)) * sharpness
        score = tl.where(real[None, :], score, float("-inf"))
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
        mask=within,
    )


def config_for(count: int) -> AttentionConfig:
    return FEW if count <= 64 else MANY


def attend_few(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_len: int,
    dtype: torch.dtype,
    config: AttentionConfig | None = None,
) -> Tensor:
    """query [n, heads, dim] to the first `kv_len` of keys and values [.., kv_heads, dim]: [n, heads * dim]. fp16 results
    of bf16 values are means of them, and so as small as they are; what lies beyond fp16 is clamped."""
    count, heads, dim = query.shape
    config = config or config_for(count)
    out = torch.empty(count, heads * dim, dtype=dtype, device=query.device)
    _attention[(triton.cdiv(count, config.queries), heads)](
        query,
        keys,
        values,
        out,
        count,
        kv_len,
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
