"""From the parts of a query-key-value product to turned queries, and keys and values in their places: one kernel,
where compiled code takes two. On a GPU everything between is fp32, so that results differ from the layers' by rounding."""

from __future__ import annotations

from torch import Tensor

from tad.models.transformer import Shape, rotate


def turn_and_write(
    parts: Tensor,  # [split, n, own + 2 * theirs]
    bias: Tensor | None,
    cos: Tensor,  # [n, 1, dim]
    sin: Tensor,
    place: Tensor,  # [n] in keys and values
    keys: Tensor,  # [positions, kv_heads, dim]
    values: Tensor,
    shape: Shape,
) -> Tensor:
    """The queries [n, heads, dim]; keys and values are written."""
    count, heads, kv_heads, dim = parts.shape[1], shape.heads, shape.kv_heads, shape.head_dim
    if parts.is_cuda:
        from tad.decoding.engine.turning_kernel import launch

        query = keys.new_empty(count, heads, dim)
        launch(parts, bias, cos, sin, place, query, keys, values)
        return query
    joint = parts.sum(0)
    joint = (joint if bias is None else joint + bias).to(keys.dtype).view(count, -1, dim)
    asked, key, value = joint.split((heads, kv_heads, kv_heads), dim=1)
    keys[place] = rotate(key, cos, sin)
    values[place] = value
    return rotate(asked, cos, sin)
