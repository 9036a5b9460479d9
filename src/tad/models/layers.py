"""The parts of a layer: RMSNorm, RoPE, attention and the SwiGLU MLP, under whatever names a checkpoint has for them.

Attention and MLP are objects without state (`attention_op`, `mlp_op`); the parameters lie in the layer, at the paths that
`Names` gives. A family whose attention or MLP differs brings another object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tad.models.attention import attend
from tad.models.cache import KVCache
from tad.models.shape import RopeScaling, Shape


@dataclass(frozen=True)
class Names:
    """Where a family's released checkpoints keep each part: dotted paths, the layer's own relative to the layer."""

    embed: str
    layers: str
    norm: str
    head: str
    query: str
    key: str
    value: str
    attn_out: str
    gate: str
    up: str
    down: str
    attn_norm: str
    mlp_norm: str


class RMSNorm(nn.Module):
    """Normalise in fp32, return to the input's dtype, then scale: the rounding order of the released models."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Without the weight, the one fused kernel rounds exactly where the released models do.
        normed = F.rms_norm(x, (x.shape[-1],), None, self.eps)
        return cast(Tensor, self.weight * normed.to(x.dtype))


def rotary_table(positions: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [batch, 1, length, rotary dimensions] for integer positions [batch, length], the sin as `rotate` wants it.

    Computed from the positions on every forward: no buffer to keep in step with the device, and an angle
    depends on its position alone.
    """
    turned = shape.rotary_dim or shape.head_dim
    exponent = torch.arange(0, turned, 2, device=positions.device, dtype=torch.float32) / turned
    frequency = 1.0 / shape.theta**exponent
    if shape.rope_scaling is not None:
        frequency = stretch(frequency, shape.rope_scaling)
    angles = positions.float()[:, None, :, None] * frequency
    target = torch.float32 if shape.rotate_in_fp32 else dtype
    cos, sin = angles.cos().to(target), angles.sin().to(target)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def stretch(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's frequencies: divided by the factor where few turns fit into the original context, as they are where many do,
    and between the two bounds a mean of both."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension; the dtype of the table decides the precision.

    The first half of `sin` is negated: the halves then change places as they are, which saves a pass over them.
    A table narrower than the heads (partial RoPE) turns their first dimensions and leaves the others.
    """
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


def take(values: Tensor, positions: Tensor) -> Tensor:
    """values [batch, length, width] at positions [batch, m]."""
    return values.gather(1, positions[:, :, None].expand(-1, -1, values.shape[-1]))


def place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register a module under a dotted path, making empty containers on the way."""
    *parents, leaf = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    root.add_module(leaf, module)


def place_linears(layer: nn.Module, linears: Mapping[str, tuple[int, int, bool]]) -> None:
    """Make linear maps of these inputs, outputs and biases at these paths."""
    for path, (source, target, bias) in linears.items():
        place(layer, path, nn.Linear(source, target, bias=bias))


class Attention:
    """Multi-head attention with RoPE and grouped keys. The parameters lie in the layer, under its `names`.

    It holds no state, so one object serves all layers: released checkpoints keep projections in the layer itself (LLaDA)
    or in a container (Dream), and `names` covers both. A family with another attention overrides `project` or `heads`.
    """

    def build(self, layer: Layer) -> None:
        """Put the parameters into a layer."""
        place_linears(layer, self.linears(layer.names, layer.shape))

    def linears(self, names: Names, shape: Shape) -> dict[str, tuple[int, int, bool]]:
        """Path -> inputs, outputs, bias of every linear map: what adapters and fp8 weights apply to."""
        inner, kv_inner = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return {
            names.query: (shape.width, inner, shape.qkv_bias),
            names.key: (shape.width, kv_inner, shape.qkv_bias),
            names.value: (shape.width, kv_inner, shape.qkv_bias),
            names.attn_out: (inner, shape.width, shape.bias),
        }

    def heads(self, layer: Layer, path: str, x: Tensor) -> Tensor:
        """One projection split into heads, before RoPE: [batch, heads, length, head_dim]."""
        projected = layer.part(path)(x)
        return cast(Tensor, projected.view(*x.shape[:2], -1, layer.shape.head_dim).transpose(1, 2))

    def project(self, layer: Layer, x: Tensor, only: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (of the positions `only`, all by default), keys and values as `heads` gives them."""
        names, asking = layer.names, x if only is None else take(x, only)
        return (
            self.heads(layer, names.query, asking),
            self.heads(layer, names.key, x),
            self.heads(layer, names.value, x),
        )

    def __call__(
        self,
        layer: Layer,
        x: Tensor,  # [batch, length, width], normed
        cos: Tensor,
        sin: Tensor,
        mask: Any,
        cache: KVCache | None,
        cache_position: Tensor | slice | None,
        only: Tensor | None,
    ) -> Tensor:
        shape = layer.shape
        query, key, value = self.project(layer, x, only)
        if only is not None:
            query = rotate(query, take(cos[:, 0], only)[:, None], take(sin[:, 0], only)[:, None])
            key = rotate(key, cos, sin)
            if mask is not None and mask.shape[2] > 1:
                mask = take(mask[:, 0].expand(len(x), -1, -1), only)[:, None]
        elif x.is_cuda:  # one launch of each kernel for both; on a CPU the copy costs more than that
            both = rotate(torch.cat((query, key), dim=1), cos, sin)
            query, key = both.split((shape.heads, shape.kv_heads), dim=1)
        else:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None and cache_position is not None:
            key, value = cache.write(layer.index, cache_position, key, value)
        out = attend(query, key, value, mask).transpose(1, 2).flatten(2)
        return cast(Tensor, layer.part(layer.names.attn_out)(out))


class NormedAttention(Attention):
    """Query and key heads pass an RMSNorm before RoPE: one norm for all query heads and one for all key heads of a layer, each
    of width head_dim."""

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


class SwiGLU:
    """down(silu(gate(x)) * up(x)). The parameters lie in the layer, as those of `Attention` do."""

    def build(self, layer: Layer) -> None:
        """Put the parameters into a layer."""
        place_linears(layer, self.linears(layer.names, layer.shape))

    def linears(self, names: Names, shape: Shape) -> dict[str, tuple[int, int, bool]]:
        """See `Attention.linears`."""
        return {
            names.gate: (shape.width, shape.mlp, shape.bias),
            names.up: (shape.width, shape.mlp, shape.bias),
            names.down: (shape.mlp, shape.width, shape.bias),
        }

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        names = layer.names
        return cast(
            Tensor, layer.part(names.down)(F.silu(layer.part(names.gate)(x)) * layer.part(names.up)(x))
        )


class Layer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape, index: int, names: Names, attention: Attention, mlp: SwiGLU) -> None:
        super().__init__()
        self.shape, self.index, self.names = shape, index, names
        self.attention_op, self.mlp_op = attention, mlp
        self.masks: Tensor | None = None  # of the forward that runs: where a gated adapter acts
        self.asked_masks: Tensor | None = None  # likewise, of the positions whose outputs are wanted
        attention.build(self)
        mlp.build(self)
        for path in (self.names.attn_norm, self.names.mlp_norm):
            place(self, path, RMSNorm(shape.width, shape.eps))

    @property
    def projections(self) -> tuple[str, ...]:
        """The paths of this layer's linear maps, attention's first: what adapters and fp8 weights apply to."""
        ops = (self.attention_op, self.mlp_op)
        return tuple(path for op in ops for path in op.linears(self.names, self.shape))

    def part(self, path: str) -> nn.Module:
        """The module at a path; looked up on each call, because adapters replace modules in place."""
        module: nn.Module = self
        for name in path.split("."):
            module = getattr(module, name)
        return module

    def forward(
        self,
        x: Tensor,  # [batch, length, width]
        cos: Tensor,
        sin: Tensor,
        mask: Any,
        cache: KVCache | None = None,
        cache_position: Tensor | slice | None = None,
        only: Tensor | None = None,  # [batch, m]: positions whose outputs are wanted, all by default
        masks: Tensor | None = None,  # [batch, length] bool: where a gated adapter acts
    ) -> Tensor:
        """Outputs [batch, length or m, width]. Keys and values are made of every position in any case."""
        if masks is not self.masks:  # never, but with a gated adapter
            # An argument, and not set from outside: a layer that is run again in backward then has its own forward's.
            self.masks = masks
            self.asked_masks = masks if masks is None or only is None else masks.gather(1, only)
        normed = self.part(self.names.attn_norm)(x)
        if only is not None:
            x = take(x, only)
        x = x + self.attention_op(self, normed, cos, sin, mask, cache, cache_position, only)
        return x + self.mlp_op(self, self.part(self.names.mlp_norm)(x))
