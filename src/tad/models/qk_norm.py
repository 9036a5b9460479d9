"""Attention whose query and key heads pass an RMSNorm before RoPE, with separate or fused projections."""

from __future__ import annotations

from torch import Tensor

from tad.models.layers import Attention, Layer, Names, RMSNorm, place, take
from tad.models.shape import Shape


class NormedAttention(Attention):
    """One norm for all query heads and one for all key heads of a layer, each of width head_dim."""

    def __init__(self, query_norm: str, key_norm: str) -> None:
        self.query_norm, self.key_norm = query_norm, key_norm  # paths in the layer

    def build(self, layer: Layer) -> None:
        super().build(layer)
        for path in (self.query_norm, self.key_norm):
            place(layer, path, RMSNorm(layer.shape.head_dim, layer.shape.eps))

    def project(self, layer: Layer, x: Tensor, only: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(layer, x, only)
        return layer.part(self.query_norm)(query), layer.part(self.key_norm)(key), value


class FusedProjections(Attention):
    """One matrix for queries, keys and values: the rows of all query heads, then of key heads, then of value heads."""

    def linears(self, names: Names, shape: Shape) -> dict[str, tuple[int, int, bool]]:
        inner = shape.heads * shape.head_dim
        return {
            names.query: (shape.width, inner + 2 * shape.kv_heads * shape.head_dim, shape.qkv_bias),
            names.attn_out: (inner, shape.width, shape.bias),
        }

    def project(self, layer: Layer, x: Tensor, only: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        shape = layer.shape
        fused = self.heads(layer, layer.names.query, x)
        query, key, value = fused.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if only is not None:
            query = (
                take(query.transpose(1, 2).flatten(2), only).unflatten(2, (shape.heads, -1)).transpose(1, 2)
            )
        return query, key, value


class NormedFusedAttention(NormedAttention, FusedProjections):
    """Both."""
