"""The forward of a step: all tokens that the rows feed, packed behind each other, through the layers.

Linear maps see a flat list of tokens, so that rows which feed everything and rows which feed one block share a forward
without padding. Only attention sees rows: queries are spread over lanes [slots, width] for it, which costs little beside
the maps. Keys and values of fed columns are written to the slot's columns, and every query sees all columns of its slot.
The last layer runs where outputs are wanted. It is the same network as `tad.models.transformer`, held to it by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.prepare import Asking, Prepared
from tad.decoding.engine.products import MOST_ROWS, fed_dtype, has_kernels, takes_heads
from tad.decoding.engine.residual import norm
from tad.decoding.engine.slots import Lent
from tad.decoding.engine.tuning import LIBRARY, WAYS, Maps, few_row_maps
from tad.decoding.engine.turning import turn_and_write
from tad.decoding.engine.weights import LayerWeights, read_weights, rows_of
from tad.errors import TadError
from tad.models import MaskedDiffusionModel
from tad.models.transformer import Shape, rotary_table, rotate

MOST_QUERIES = 256  # that our own attention serves


class Network:
    """The weights of a model and its forward over packed tokens. `compiled` runs what lies between two attentions as
    fused kernels, one compilation for all layers and all sizes; `mode` is `torch.compile`'s. `products` and `attention`
    say who multiplies a few rows with fp8 weights, and who turns queries and keys, writes keys and values, and attends
    for a few rows: the library (`torch`), our own kernels (`triton`), or those where they run (`auto`)."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        compiled: bool,
        mode: str | None = None,
        products: str = "auto",
        attention: str = "auto",
    ) -> None:
        self.model, self.shape = model, model.shape
        self.layers = read_weights(model)
        if attention not in WAYS:
            raise TadError(f"attention is one of {', '.join(WAYS)}, not {attention!r}")
        fits = has_kernels(model.device) and model.dtype in (torch.bfloat16, torch.float16)
        fits = fits and takes_heads(model.shape.head_dim)
        if attention == "triton" and not fits:
            raise TadError(
                "attention 'triton' needs half precision on a GPU of Hopper's generation or later, and heads of 16, 32, 64 or 128"
            )
        self.attends_few = fits and attention != "torch"
        self.parts = Parts(model, compiled, mode, turns=self.attends_few)
        maps = few_row_maps(self.layers, model.shape, model.dtype, products)
        self.few_rows = None if maps is None else Parts(model, compiled, mode, maps)

    def parts_for(self, tokens: int) -> Parts:
        """What computes a forward of so many tokens."""
        return self.parts if self.few_rows is None or tokens > MOST_ROWS else self.few_rows

    def rotary(self, columns: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every position up to `columns`: [columns, 1, head_dim]."""
        positions = torch.arange(columns, device=self.model.device)[None]
        cos, sin = rotary_table(positions, self.shape, self.model.dtype)
        return cos[0, 0][:, None], sin[0, 0][:, None]

    def outputs(
        self,
        canvas: Tensor,  # [slots, columns]
        lent: Lent,
        at: Prepared,
        rotary: tuple[Tensor, Tensor],
        window: int,
        widest: int,
        keep: bool,
    ) -> Tensor:
        """Outputs [candidates, width] that predict the candidates, after the final norm.

        With `keep` every output is kept, and a candidate may read one that an earlier forward left.
        """
        parts, last = self.parts_for(len(at.row)), len(self.layers) - 1
        slots, columns = canvas.shape
        x = self.model.embedding()(canvas[at.row, at.column])
        cos, sin = (table[at.position] for table in rotary)
        every, some = (_for_heads(ask, self.shape, x.dtype) for ask in (at.every, at.some))
        attended: Tensor | None = None
        for number, layer in enumerate(self.layers):
            keys, values = lent.layer(number)
            trims = number == last and not keep
            written = (cos, sin, at.place, keys, values, at.wanted_token if trims else None)
            if attended is None:
                x, query = parts.enter(x, layer, *written)
            else:
                x, query = parts.cross(x, attended, self.layers[number - 1], layer, *written)
            if parts.turns and not trims:
                bias = layer.qkv.bias if parts.in_parts else None
                query = turn_and_write(query, bias, cos, sin, at.place, keys, values, self.shape)
            asking, width = (some, widest) if trims else (every, window)
            alone = slots == 1 and asking.bias is None and at.key_start is None
            if self.attends_few and alone and len(query) <= MOST_QUERIES:
                attended = _attend_few(query, keys, values, columns, parts.fed_dtype)
            elif at.key_start is None:
                attended = _attend(query, keys, values, asking, width, slots, columns, self.shape)
            else:
                attended = attend_packed(
                    query, keys, values, asking.bounds, at.key_start, at.key_count, width, columns
                )
        norm = cast(Tensor, self.model.get_submodule(self.model.names.norm).weight)
        out = cast(Tensor, parts.finish(x, attended, self.layers[last], norm))
        if not keep:
            return out
        assert lent.outputs is not None
        lent.outputs[at.place] = out
        return lent.outputs[at.wanted_row * (columns + 1) + at.wanted_column]


def spread(values: Tensor, lane: Tensor, slots: int, width: int) -> Tensor:
    """values [n, ...] to their lanes: [slots, width, ...], 0 where nothing goes."""
    flat = torch.zeros(slots * width + 1, *values.shape[1:], dtype=values.dtype, device=values.device)
    flat.index_copy_(0, lane, values)
    return flat[:-1].view(slots, width, *values.shape[1:])


def attend_packed(
    query: Tensor,  # [n, heads, head_dim], rows behind each other
    keys: Tensor,  # [positions, kv_heads, head_dim]
    values: Tensor,
    bounds: Tensor | None,  # [slots + 1] where each row's queries begin and end
    key_start: Tensor,  # [slots + 1] where each row's keys begin
    key_count: Tensor | None,  # [slots]
    width: int,
    columns: int,
) -> Tensor:
    """[n, width of the model]. What lies behind the last row's queries is not written."""
    op = torch.ops.aten._flash_attention_forward
    out = op(query, keys, values, bounds, key_start, width, columns, 0.0, False, False, seqused_k=key_count)[
        0
    ]
    return cast(Tensor, out).reshape(len(query), -1)


def _attend_few(query: Tensor, keys: Tensor, values: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    from tad.decoding.engine.attention_kernel import attend_few

    return attend_few(query, keys, values, columns, dtype)


def _for_heads(asking: Asking, shape: Shape, dtype: torch.dtype) -> Asking:
    """The bias in the scores' dtype, and for queries that share a key head as often as they do."""
    bias = asking.bias
    if bias is None:
        return asking
    bias = bias.to(dtype)
    if bias.shape[2] > 1:
        bias = bias.repeat(1, 1, shape.heads // shape.kv_heads, 1)
    return asking._replace(bias=bias)


def _attend(
    query: Tensor,  # [n, heads, head_dim]
    keys: Tensor,  # [slots * (columns + 1), kv_heads, head_dim]
    values: Tensor,
    asking: Asking,
    width: int,
    slots: int,
    columns: int,
    shape: Shape,
) -> Tensor:
    """[n, width of the model]. Queries that share a key head are lined up behind each other, so no key is repeated; where
    the kernel for that takes them as they are, they are not moved."""
    kv_heads, dim = shape.kv_heads, shape.head_dim
    groups, lane, bias = shape.heads // kv_heads, asking.lane, asking.bias
    alone = slots == 1 and len(lane) == width
    rows = query[None] if alone else spread(query, lane, slots, width)
    key, value = (
        part.view(slots, columns + 1, kv_heads, dim)[:, :columns].transpose(1, 2) for part in (keys, values)
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
    return out if alone else out[lane.clamp(max=slots * width - 1)]


class Parts:
    """What lies between two attentions, as functions of tensors alone: the same code for every layer."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        compiled: bool,
        mode: str | None = None,
        maps: Maps = LIBRARY,
        turns: bool = False,
    ) -> None:
        turns = turns or maps.in_parts
        shape = model.shape
        heads, kv_heads, dim, eps = shape.heads, shape.kv_heads, shape.head_dim, shape.eps
        own, theirs = heads * dim, kv_heads * dim

        def write(
            x: Tensor,  # [tokens, width]
            normed: Tensor,
            layer: LayerWeights,
            cos: Tensor,
            sin: Tensor,
            place: Tensor,
            keys: Tensor,
            values: Tensor,
            wants: Tensor | None,
        ) -> tuple[Tensor, Tensor]:
            """Write keys and values; give the residual and the queries, of all tokens or of the wanted ones. With `turns`
            give the parts of the projection of all tokens instead, and leave the rest to `turn_and_write`."""
            if wants is None:
                joint = maps.qkv(normed, layer.qkv)
                if turns:
                    return x, joint if maps.in_parts else joint[None]
                query, key, value = joint.split((own, theirs, theirs), dim=-1)
                turned = rotate(query.view(-1, heads, dim), cos, sin)
            else:
                joint = maps.key_value(normed, rows_of(layer.qkv, own, own + 2 * theirs))
                key, value = joint.split(theirs, dim=-1)
                query = maps.query(normed[wants], rows_of(layer.qkv, 0, own))
                turned = rotate(query.view(-1, heads, dim), cos[wants], sin[wants])
                x = x[wants]
            keys[place] = rotate(key.view(-1, kv_heads, dim), cos, sin)
            values[place] = value.view(-1, kv_heads, dim)
            return x, turned

        def enter(x: Tensor, layer: LayerWeights, *written: Any) -> tuple[Tensor, Tensor]:
            return write(x, norm(x, layer.attn_norm, eps), layer, *written)

        def leave(
            x: Tensor, attended: Tensor, layer: LayerWeights, weight: Tensor, last: bool
        ) -> tuple[Tensor, Tensor]:
            """The residual behind a layer, and its norm by `weight`."""
            x, normed = maps.attn_out(x, attended, layer.attn_out, layer.mlp_norm, eps, False)
            gate, up = maps.gate_up(normed, layer.gate_up).chunk(2, dim=-1)
            return maps.down(x, F.silu(gate) * up, layer.down, weight, eps, last)

        def cross(
            x: Tensor, attended: Tensor, before: LayerWeights, layer: LayerWeights, *written: Any
        ) -> tuple[Tensor, Tensor]:
            x, normed = leave(x, attended, before, layer.attn_norm, False)
            return write(x, normed, layer, *written)

        def finish(x: Tensor, attended: Tensor, layer: LayerWeights, weight: Tensor) -> Tensor:
            return leave(x, attended, layer, weight, True)[1]

        self.in_parts, self.turns = maps.in_parts, turns
        self.fed_dtype = fed_dtype(model.dtype) if maps.in_parts else model.dtype  # of what attention gives
        self.enter = sized(enter, mode) if compiled else enter
        self.cross = sized(cross, mode) if compiled else cross
        self.finish = sized(finish, mode) if compiled else finish


def sized(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """Compiled once for any number of tokens: the first dimension of every tensor that is not a weight may change."""
    compiled = compile_whole(function, mode=mode)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call


def compile_whole(
    function: Callable[..., Any], dynamic: bool | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """`torch.compile` that refuses to fall back in parts."""
    config = torch._dynamo.config
    # One for each kind of model, decoder and rule in a process; beyond the limit there is an error, not a way out.
    config.recompile_limit = max(config.recompile_limit, 1024)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=dynamic, mode=mode)
    return compiled
