"""Attention of few queries to all columns of one row, as a Triton kernel: many small programs instead of one per head.

The keys of a head may be shared out to several programs; what each finds is put together by the one that is done last, in
the order of the keys. Not covered: several rows side by side, and columns that some query may not see. Needs Triton.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_PROGRAMS = 4096  # of one share


class Cut(NamedTuple):
    """A program's queries, the keys of one turn of its loop, warps, loads in flight, programs that share a head's keys."""

    queries: int
    keys: int
    warps: int
    stages: int
    shares: int = 1


# For up to 32 queries, up to 64, and more; the others are for a bench to compare.
FEW = Cut(16, 64, 4, 3)
MORE = Cut(16, 64, 4, 3)
MANY = Cut(64, 64, 4, 3)
OTHERS = (
    Cut(16, 64, 4, 3),
    Cut(16, 128, 8, 2),
    Cut(32, 64, 4, 3),
    Cut(32, 128, 8, 2),
    Cut(32, 64, 4, 3, 2),
    Cut(32, 64, 8, 3, 2),
    Cut(32, 64, 8, 2, 3),
    Cut(32, 64, 4, 2, 6),
    Cut(32, 128, 8, 2, 3),
    Cut(64, 64, 4, 3, 2),
    Cut(64, 64, 4, 2, 3),
    Cut(64, 128, 8, 2, 3),
    Cut(128, 64, 8, 3),
)


@triton.jit(do_not_specialize=["count", "columns"])
def _attention(
    query: tl.tensor,  # [count, heads, dim]
    keys: tl.tensor,  # [at least columns, kv_heads, dim]
    values: tl.tensor,
    out: tl.tensor,  # [count, heads, dim]
    found: tl.tensor,  # [shares, heads, count up to whole programs, dim] fp32, where shared
    found_sums: tl.tensor,  # [shares, heads, the same, 2]: the largest score, and the sum of weights
    done: tl.tensor,  # [programs of a share] zeros: how many of those that share a head's keys are through
    count: tl.tensor,
    columns: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    out_stride: tl.tensor,
    sharpness: tl.tensor,  # scale of the scores, for powers of two
    groups: tl.constexpr,
    dim: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
    shares: tl.constexpr,
) -> None:
    head, which = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * block_q + tl.arange(0, block_q)
    each = tl.cdiv(tl.cdiv(columns, block_k), shares) * block_k
    first = which * each
    inner, column = tl.arange(0, dim), tl.arange(0, block_k)
    within = row[:, None] < count
    asked = tl.load(query + row[:, None] * query_stride + head * dim + inner[None, :], mask=within, other=0.0)
    key_at = keys + (head // groups) * dim + column[:, None] * key_stride + inner[None, :]
    value_at = values + (head // groups) * dim + column[:, None] * key_stride + inner[None, :]
    largest = tl.full((block_q,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((block_q,), dtype=tl.float32)
    total = tl.zeros((block_q, dim), dtype=tl.float32)
    for low in tl.range(first, tl.minimum(first + each, columns), block_k, num_stages=stages):
        real = low + column < columns
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
    if shares > 1:
        padded = tl.num_programs(0) * block_q
        size = tl.num_programs(1) * padded
        own = head * padded + row
        at = (own[:, None] * dim + inner[None, :]).to(tl.int64)
        tl.store(found + which * size * dim + at, total)
        tl.store(found_sums + (which * size + own) * 2, largest)
        tl.store(found_sums + (which * size + own) * 2 + 1, weight)
        tl.debug_barrier()  # all of it is written before the count says so
        mine = done + tl.program_id(0) * tl.num_programs(1) + head
        if tl.atomic_add(mine, 1, sem="acq_rel") < shares - 1:
            return
        tl.store(mine, 0)
        largest = tl.full((block_q,), float("-inf"), dtype=tl.float32)
        for other in tl.static_range(shares):
            sums = found_sums + (other * size + own) * 2
            largest = tl.maximum(largest, tl.load(sums, cache_modifier=".cg"))
        weight = tl.zeros((block_q,), dtype=tl.float32)
        total = tl.zeros((block_q, dim), dtype=tl.float32)
        for other in tl.static_range(shares):
            sums = found_sums + (other * size + own) * 2
            part = tl.exp2(tl.load(sums, cache_modifier=".cg") - largest)
            weight += tl.load(sums + 1, cache_modifier=".cg") * part
            total += tl.load(found + other * size * dim + at, cache_modifier=".cg") * part[:, None]
    total = total / weight[:, None]
    if out.dtype.element_ty == tl.float16:
        total = tl.clamp(total, -65504.0, 65504.0)
    tl.store(
        out + row[:, None] * out_stride + head * dim + inner[None, :],
        total.to(out.dtype.element_ty),
        mask=within,
    )


def new_counts(device: torch.device) -> Tensor:
    """What launches count in. They leave zeros behind; two that run at the same time need two of these."""
    return torch.zeros(_MOST_PROGRAMS, dtype=torch.int32, device=device)


def cut_for(count: int) -> Cut:
    return FEW if count <= 32 else MORE if count <= 64 else MANY


def attend_few(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: int,
    dtype: torch.dtype,
    counts: Tensor,
    cut: Cut | None = None,
) -> Tensor:
    """query [n, heads, dim] to the first `columns` of keys and values [.., kv_heads, dim]: [n, heads * dim]. fp16 results
    of bf16 values are means of them, and so as small as they are; what lies beyond fp16 is cut off."""
    count, heads, dim = query.shape
    cut = cut or cut_for(count)
    out = torch.empty(count, heads * dim, dtype=dtype, device=query.device)
    blocks = triton.cdiv(count, cut.queries)
    found = found_sums = out
    if cut.shares > 1:
        assert blocks * heads <= len(counts), "more programs than counts"
        shared = (cut.shares, heads, blocks * cut.queries)
        found, found_sums = (torch.empty(*shared, size, device=query.device) for size in (dim, 2))
    _attention[(blocks, heads, cut.shares)](
        query,
        keys,
        values,
        out,
        found,
        found_sums,
        counts,
        count,
        columns,
        query.stride(0),
        keys.stride(0),
        out.stride(0),
        math.log2(math.e) / math.sqrt(dim),
        groups=heads // keys.shape[1],
        dim=dim,
        block_q=cut.queries,
        block_k=cut.keys,
        stages=cut.stages,
        shares=cut.shares,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out
