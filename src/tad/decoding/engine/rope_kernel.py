"""The Triton kernel of `tad.decoding.engine.rope`: a program takes some heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8  # of a program


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


def launch(
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
