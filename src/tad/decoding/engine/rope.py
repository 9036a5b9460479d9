"""Reduces split-K QKV partials, norms the heads of Q and K in models that do, applies RoPE and writes K and V to the cache, in
one kernel where compiled code takes two.

On a GPU everything between is fp32, so that results differ from the layers' by rounding."""

from __future__ import annotations

from torch import Tensor

from tad.decoding.engine.add_norm import rms_norm
from tad.models.layers import rotate
from tad.models.shape import Shape


def apply_rope_and_write(
    partials: Tensor,  # [split, n, own + 2 * theirs]
    bias: Tensor | None,
    head_norms: list[Tensor] | None,  # of queries and keys, [dim] each
    cos: Tensor,  # [n, 1, dim]
    sin: Tensor,
    kv_index: Tensor,  # [n] in keys and values
    keys: Tensor,  # [positions, kv_heads, dim]
    values: Tensor,
    shape: Shape,
) -> Tensor:
    """The queries [n, heads, dim]; keys and values are written."""
    count, heads, kv_heads, dim = partials.shape[1], shape.heads, shape.kv_heads, shape.head_dim
    if partials.is_cuda:
        from tad.decoding.engine.kernels import launch_rope

        out = keys.new_empty(count, heads, dim)
        launch_rope(partials, bias, head_norms, shape.eps, cos, sin, kv_index, out, keys, values)
        return out
    joint = partials.sum(0)
    joint = (joint if bias is None else joint + bias).to(keys.dtype).view(count, -1, dim)
    query, key, value = joint.split((heads, kv_heads, kv_heads), dim=1)
    if head_norms is not None:
        query, key = (rms_norm(x, norm, shape.eps) for x, norm in zip((query, key), head_norms, strict=True))
    keys[kv_index] = rotate(key, cos, sin)
    values[kv_index] = value
    return rotate(query, cos, sin)
