"""The packed forward: all tokens that the rows compute, behind each other, through the layers.

Linear maps see a flat list of tokens, so that rows which compute everything and rows which compute one block share a
forward without padding. Only attention sees rows: queries are padded to [slots, width] for it, which costs little beside
the GEMMs. Keys and values are written to the slot's KV positions, and every query sees all of its slot's. The last layer
runs where outputs are wanted. It is the same network as `tad.models.transformer`, held to it by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.add_norm import rms_norm
from tad.decoding.engine.autotune import LIBRARY, LinearOps, few_row_ops
from tad.decoding.engine.buckets import StepShape
from tad.decoding.engine.gemm import MAX_ROWS, has_kernels, takes_heads
from tad.decoding.engine.kv_pool import KVView
from tad.decoding.engine.layout import PackedQueries, QueryLayout, Spans
from tad.decoding.engine.rope import apply_rope_and_write
from tad.decoding.engine.weights import LayerWeights, read_weights, rows_of
from tad.decoding.step import scatter_rows
from tad.models import MaskedDiffusionModel
from tad.models.layers import rotary_table, rotate
from tad.models.shape import Shape

MAX_QUERIES = 256  # of a row that sees everything, that our own attention serves


class Network:
    """The weights of a model and its forward over packed tokens. `compiled` runs what lies between two attentions as
    fused kernels, one compilation for all layers and all sizes. `kernels`: our own serve few tokens (GEMMs where they are
    faster, RoPE and the write of keys and values, attention), by default on a GPU that runs them; `True` elsewhere takes the same
    way with the library's operations. `adapter`: see `read_weights`."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        compiled: bool,
        kernels: bool | None = None,
        adapter: bool | None = None,
    ) -> None:
        self.model, self.shape = model, model.shape
        self.layers = read_weights(model, adapter)
        half = model.dtype in (torch.bfloat16, torch.float16)
        runs = has_kernels(model.device) and half and takes_heads(model.shape.head_dim)
        self.attends_few = runs and kernels is not False
        self.ops = LayerOps(model, compiled, rope_kernel=self.attends_few)
        tuned = model.device.type == "cuda" if kernels is None else kernels
        linear = few_row_ops(self.layers, model.shape, model.dtype) if tuned else None
        self.few_row_ops = None if linear is None else LayerOps(model, compiled, linear)

    def ops_for(self, tokens: int) -> LayerOps:
        """What computes a forward of so many tokens."""
        return self.ops if self.few_row_ops is None or tokens > MAX_ROWS else self.few_row_ops

    def takes_spans(self, slots: int, window: int, masked: bool) -> bool:
        """Whether our own attention serves such a step: where some query may not see some position, which costs the library
        a bias and its fast kernels, and few queries of one row."""
        return self.attends_few and (masked or (slots == 1 and window <= MAX_QUERIES))

    def rope_table(self, kv_len: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every position up to `kv_len`: [kv_len, 1, head_dim]."""
        positions = torch.arange(kv_len, device=self.model.device)[None]
        cos, sin = rotary_table(positions, self.shape, self.model.dtype)
        return cos[0, 0][:, None], sin[0, 0][:, None]

    def outputs(
        self,
        canvas: Tensor,  # [slots, kv_len]
        kv: KVView,
        at: PackedQueries,
        rope: tuple[Tensor, Tensor],
        sizes: StepShape,
        keep: bool,
    ) -> Tensor:
        """Outputs [candidates, width] that predict the candidates, after the final norm.

        With `keep` every output is kept, and a candidate may read one that an earlier forward left.
        """
        ops, last = self.ops_for(len(at.token_row)), len(self.layers) - 1
        slots, kv_len = canvas.shape
        x = self.model.embedding()(canvas[at.token_row, at.token_place])
        cos, sin = (table[at.rope_position] for table in rope)
        all_queries, candidates = (
            _for_heads(layout, self.shape, x.dtype) for layout in (at.all_queries, at.candidate_queries)
        )
        attended: Tensor | None = None
        for number, layer in enumerate(self.layers):
            keys, values = kv.layer(number)
            trims = number == last and not keep
            written = (cos, sin, at.kv_index, keys, values, at.source_token if trims else None)
            if attended is None:
                x, query = ops.first_layer(x, layer, *written)
            else:
                x, query = ops.layer_boundary(x, attended, self.layers[number - 1], layer, *written)
            if ops.rope_kernel and not trims:
                bias = layer.qkv.bias if ops.partials else None
                query = apply_rope_and_write(
                    query, bias, layer.head_norms, cos, sin, at.kv_index, keys, values, self.shape
                )
            layout, width = (candidates, sizes.widest) if trims else (all_queries, sizes.window)
            if layout.spans is not None:
                attended = _attend_spans(
                    query, keys, values, layout.spans, width, kv_len + 1, ops.input_dtype
                )
            else:
                attended = _attend(query, keys, values, layout, width, slots, kv_len, self.shape)
        norm = cast(Tensor, self.model.get_submodule(self.model.names.norm).weight)
        out = cast(Tensor, ops.last_layer(x, attended, self.layers[last], norm))
        if not keep:
            return out
        assert kv.outputs is not None
        kv.outputs[at.kv_index] = out
        return kv.outputs[at.asked.row * (kv_len + 1) + at.source]


def _attend_spans(
    query: Tensor, keys: Tensor, values: Tensor, spans: Spans, width: int, room: int, dtype: torch.dtype
) -> Tensor:
    from tad.decoding.engine.kernels import attend_spans

    return attend_spans(query, keys, values, spans, width, room, dtype)


def _for_heads(layout: QueryLayout, shape: Shape, dtype: torch.dtype) -> QueryLayout:
    """The bias in the scores' dtype, and for queries that share a key head as often as they do."""
    bias = layout.bias
    if bias is None:
        return layout
    bias = bias.to(dtype)
    if bias.shape[2] > 1:
        bias = bias.repeat(1, 1, shape.heads // shape.kv_heads, 1)
    return layout._replace(bias=bias)


def _attend(
    query: Tensor,  # [n, heads, head_dim]
    keys: Tensor,  # [slots * (kv_len + 1), kv_heads, head_dim]
    values: Tensor,
    layout: QueryLayout,
    width: int,
    slots: int,
    kv_len: int,
    shape: Shape,
) -> Tensor:
    """[n, heads * head_dim]. Queries that share a key head are lined up behind each other, so no key is repeated; where
    the kernel for that takes them as they are, they are not moved."""
    kv_heads, dim = shape.kv_heads, shape.head_dim
    groups, index, bias = shape.heads // kv_heads, layout.padded_index, layout.bias
    alone = slots == 1 and len(index) == width
    rows = query[None] if alone else scatter_rows(query, index, slots, width)
    key, value = (
        part.view(slots, kv_len + 1, kv_heads, dim)[:, :kv_len].transpose(1, 2) for part in (keys, values)
    )
    if groups == 1 or (bias is None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)):
        asked = rows.view(slots, width, -1, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(asked, key, value, attn_mask=bias, enable_gqa=groups > 1)
        out = out.transpose(1, 2).reshape(slots * width, -1)
    else:
        asked = rows.view(slots, width, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
        asked = asked.reshape(slots, kv_heads, groups * width, dim)
        out = F.scaled_dot_product_attention(asked, key, value, attn_mask=bias)
        out = out.view(slots, kv_heads, groups, width, dim).permute(0, 3, 1, 2, 4).reshape(slots * width, -1)
    return out if alone else out[index.clamp(max=slots * width - 1)]


class LayerOps:
    """What lies between two attentions, as functions of tensors alone: the same code for every layer."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        compiled: bool,
        linear: LinearOps = LIBRARY,
        rope_kernel: bool = False,
    ) -> None:
        rope_kernel = rope_kernel or linear.partials
        shape = model.shape
        heads, kv_heads, dim, eps = shape.heads, shape.kv_heads, shape.head_dim, shape.eps
        own, theirs = heads * dim, kv_heads * dim

        def turn(x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
            """Projected queries or keys [n, width] as heads, normed and rotated."""
            x = x.view(len(x), -1, dim)
            return rotate(x if norm is None else rms_norm(x, norm, eps), cos, sin)

        def write(
            x: Tensor,  # [tokens, width]
            normed: Tensor,
            layer: LayerWeights,
            cos: Tensor,
            sin: Tensor,
            kv_index: Tensor,
            keys: Tensor,
            values: Tensor,
            wanted: Tensor | None,
        ) -> tuple[Tensor, Tensor]:
            """Write keys and values; give the residual and the queries, of all tokens or of the wanted ones. With
            `rope_kernel` give the partials of the QKV projection instead, and leave the rest to `apply_rope_and_write`."""
            query_norm, key_norm = layer.head_norms or (None, None)
            if wanted is None:
                joint = linear.qkv(normed, layer.qkv)
                if rope_kernel:
                    return x, joint if linear.partials else joint[None]
                query, key, value = joint.split((own, theirs, theirs), dim=-1)
                rotated = turn(query, query_norm, cos, sin)
            else:
                joint = linear.key_value(normed, rows_of(layer.qkv, own, own + 2 * theirs))
                key, value = joint.split(theirs, dim=-1)
                query = linear.query(normed[wanted], rows_of(layer.qkv, 0, own))
                rotated = turn(query, query_norm, cos[wanted], sin[wanted])
                x = x[wanted]
            keys[kv_index] = turn(key, key_norm, cos, sin)
            values[kv_index] = value.view(-1, kv_heads, dim)
            return x, rotated

        def first_layer(x: Tensor, layer: LayerWeights, *written: Any) -> tuple[Tensor, Tensor]:
            return write(x, rms_norm(x, layer.attn_norm, eps), layer, *written)

        def leave(
            x: Tensor, attended: Tensor, layer: LayerWeights, weight: Tensor, last: bool
        ) -> tuple[Tensor, Tensor]:
            """The residual behind a layer, and its norm by `weight`."""
            x, normed = linear.attn_out(x, attended, layer.attn_out, layer.mlp_norm, eps, False)
            gate, up = linear.gate_up(normed, layer.gate_up).chunk(2, dim=-1)
            return linear.down(x, F.silu(gate) * up, layer.down, weight, eps, last)

        def layer_boundary(
            x: Tensor, attended: Tensor, before: LayerWeights, layer: LayerWeights, *written: Any
        ) -> tuple[Tensor, Tensor]:
            x, normed = leave(x, attended, before, layer.attn_norm, False)
            return write(x, normed, layer, *written)

        def last_layer(x: Tensor, attended: Tensor, layer: LayerWeights, weight: Tensor) -> Tensor:
            return leave(x, attended, layer, weight, True)[1]

        self.partials, self.rope_kernel = linear.partials, rope_kernel
        self.input_dtype = linear.inputs or model.dtype  # of what attention gives
        self.first_layer = compile_dynamic(first_layer) if compiled else first_layer
        self.layer_boundary = compile_dynamic(layer_boundary) if compiled else layer_boundary
        self.last_layer = compile_dynamic(last_layer) if compiled else last_layer


def compile_dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for any number of tokens: the first dimension of every tensor that is not a weight may change."""
    compiled = compile_whole(function)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call


def compile_whole(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """`torch.compile` that refuses to fall back in parts."""
    config = torch._dynamo.config
    # One for each kind of model, decoder and rule in a process; beyond the limit there is an error, not a way out.
    config.recompile_limit = max(config.recompile_limit, 1024)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=dynamic)
    return compiled
