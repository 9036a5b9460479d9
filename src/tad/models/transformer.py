"""The one transformer behind all families: RMSNorm, RoPE, SwiGLU, optional GQA, bias and q/k norm; no token-causal mask.

`MaskedDiffusionModel` is a Hugging Face `PreTrainedModel` without a family: subclasses say where their released
checkpoints keep each part (`Names`) and how their config maps to a `Shape`. It predicts; it does not decode, and
it does not shift logits (families whose logits are shifted say so, and the decoder reads them accordingly).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from tad.errors import TadError
from tad.models.attention import AttentionMask, BlockLayout, attend, block_index
from tad.models.cache import KVCache


@dataclass(frozen=True)
class Shape:
    """The numbers that define the network, whatever the config calls them."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # heads * head_dim need not be the width
    mlp: int
    vocab: int  # rows of the embedding, which may exceed the tokenizer
    context: int
    eps: float
    theta: float
    qkv_bias: bool
    bias: bool
    tied: bool
    rotate_in_fp32: bool  # LLaDA applies RoPE in fp32, Dream in the model's dtype
    blocks: BlockLayout | None = None  # block-causal attention; None: full
    rotary_dim: int | None = None  # RoPE turns the first dimensions of a head only; None: all
    qk_norm: bool = False  # RMSNorm of every query and key head before RoPE

    @property
    def mlp_weights(self) -> tuple[int, int]:
        """Weights of the MLPs of all layers: those a token is multiplied with, and all there are."""
        weights = self.layers * 3 * self.width * self.mlp
        return weights, weights


def split_width(width: int, heads: int) -> int:
    """The head_dim of configs that do not give it."""
    if heads < 1 or width % heads:
        raise TadError(f"config.json: width {width} and {heads} heads do not fit together")
    return width // heads


def read_theta(config: Any) -> float:
    """The base of the rotary angles. Newer tools write it into `rope_parameters`; scaled positions are refused."""
    given = getattr(config, "rope_parameters", None) or {}
    if not isinstance(given, dict):
        raise TadError("config.json: rope_parameters should be an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind != "default":
        raise TadError(
            f"config.json: rotary positions of type {kind!r} are not supported (only 'default' is)"
        )
    return cast(float, given.get("rope_theta", config.rope_theta))


def read_blocks(config: Any, field: str, released: str) -> BlockLayout:
    """Block-causal attention on the absolute grid, its block size in a field of the config."""
    size = getattr(config, field)
    if type(size) is not int or not 1 <= size <= 2**24:
        raise TadError(f"config.json: {field} is {size!r}; set it to the block size of training ({released})")
    return BlockLayout(size, "absolute")


def check_switches(config: Any, supported: Mapping[str, Any]) -> None:
    """Refuse a config that sets a switch to a value no released checkpoint has, instead of misreading it."""
    for field, value in supported.items():
        if getattr(config, field, value) not in (value, None):
            raise TadError(
                f"config.json: {field}={getattr(config, field)!r} is not supported (only {value!r} is)"
            )


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


@dataclass
class DiffusionOutput(ModelOutput):
    """logits [batch, positions, vocab] (None when the head was not asked for), hidden [batch, positions, width].

    The positions are all of those fed, or the ones named by `logits_at`.
    """

    logits: Tensor | None = None
    hidden: Tensor | None = None


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
    angles = positions.float()[:, None, :, None] * (1.0 / shape.theta**exponent)
    target = torch.float32 if shape.rotate_in_fp32 else dtype
    cos, sin = angles.cos().to(target), angles.sin().to(target)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension; the dtype of the table decides the precision.

    The first half of `sin` is negated: the halves then change places as they are, which saves a pass over them.
    A table narrower than the heads (partial RoPE) turns their first dimensions and leaves the others.
    """
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)
    wide = x.to(cos.dtype)
    return (wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


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
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Subclasses set `names`, and `attention_op` or `mlp_op` where theirs differ; `__init__` may choose by the layer's index.
    """

    names: ClassVar[Names]
    attention_op: Attention = Attention()
    mlp_op: SwiGLU = SwiGLU()

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        self.attention_op.build(self)
        self.mlp_op.build(self)
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
    ) -> Tensor:
        """Outputs [batch, length or m, width]. Keys and values are made of every position in any case."""
        normed = self.part(self.names.attn_norm)(x)
        if only is not None:
            x = take(x, only)
        x = x + self.attention_op(self, normed, cos, sin, mask, cache, cache_position, only)
        return x + self.mlp_op(self, self.part(self.names.mlp_norm)(x))


class MaskedDiffusionModel(PreTrainedModel):
    """ids or embeddings in, logits out. See `forward`."""

    names: ClassVar[Names]
    layer_class: ClassVar[type[Layer]]

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shape: Shape = config.shape
        self.shape = shape
        place(self, self.names.embed, nn.Embedding(shape.vocab, shape.width))
        place(self, self.names.layers, nn.ModuleList(self.layer_class(shape, i) for i in range(shape.layers)))
        place(self, self.names.norm, RMSNorm(shape.width, shape.eps))
        if not shape.tied:
            place(self, self.names.head, nn.Linear(shape.width, shape.vocab, bias=shape.bias))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,  # [batch, length]
        attention_mask: Tensor | None = None,  # [batch, length of the keys], 0 at padding
        position_ids: Tensor | None = None,  # [batch, length]
        inputs_embeds: Tensor | None = None,  # [batch, length, width]
        mask: AttentionMask | None = None,
        cache: KVCache | None = None,
        cache_position: Tensor
        | slice
        | None = None,  # where the fed positions lie in the cache; [batch, length] or a slice
        logits_at: Tensor | None = None,  # [batch, m] or [m]: indices into the fed positions
        head: bool = True,
        **unused: Any,
    ) -> DiffusionOutput:
        """One forward.

        `mask` says who sees whom, by default what `attention_mask` below says without a prompt; the argument
        `attention_mask` is the short form for padding. With a `cache`, the keys are all of
        its positions, so a mask must hide the ones that hold nothing. `logits_at` names the positions whose outputs
        are wanted: the head, and of the last layer all but keys and values, run there only. `head=False` leaves the
        head out. Positions default to `cache_position` with a cache and to 0, 1, ... without.
        """
        x = self.embedding()(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = x.shape[:2]
        if position_ids is None:
            position_ids = self._default_positions(cache_position, length, x.device)
        position_ids = position_ids.expand(batch, length)
        if mask is None:
            keys = position_ids if cache is None else torch.arange(cache.length, device=x.device)[None]
            mask = self.attention_mask(keys, real=attention_mask)
        cos, sin = rotary_table(position_ids, self.shape, x.dtype)
        visible = self._visible(mask, batch, length, cache, cache_position, x.device)
        only = logits_at
        if only is not None and only.dim() == 1:
            only = only.expand(batch, -1)
        *layers, last = self.layers()
        for layer in layers:
            x = layer(x, cos, sin, visible, cache=cache, cache_position=cache_position)
        if only is None or visible is None or isinstance(visible, Tensor):
            x = last(x, cos, sin, visible, cache=cache, cache_position=cache_position, only=only)
        else:  # a FlexAttention mask is made for all queries
            x = take(last(x, cos, sin, visible, cache=cache, cache_position=cache_position), only)
        hidden = self.get_submodule(self.names.norm)(x)
        return DiffusionOutput(logits=self.head(hidden) if head else None, hidden=hidden)

    def attention_mask(
        self,
        positions: Tensor,  # [length] or [batch, length]: position ids of the keys, negative in left padding
        prompt_len: int | Tensor = 0,  # int or [batch, 1]
        real: Tensor | None = None,  # [batch, length], 0 or False at padding
        layout: BlockLayout | None = None,
    ) -> AttentionMask:
        """Who sees whom in this model: everybody, or what its config's block layout says.

        `layout` stands in for the model's own: a block-causal schedule on a model with full attention.
        """
        keys = None if real is None else real.bool()
        layout = layout or self.shape.blocks
        if layout is None:
            return AttentionMask(keys)
        blocks = block_index(positions, prompt_len, layout.size, layout.grid)
        return AttentionMask(keys, blocks if blocks.dim() == 2 else blocks[None])

    def _default_positions(
        self, cache_position: Tensor | slice | None, length: int, device: torch.device
    ) -> Tensor:
        if isinstance(cache_position, Tensor):
            return cache_position.clamp(min=0)
        start = cache_position.start or 0 if isinstance(cache_position, slice) else 0
        return torch.arange(start, start + length, device=device)[None]

    def _visible(
        self,
        mask: AttentionMask,
        batch: int,
        length: int,
        cache: KVCache | None,
        cache_position: Tensor | slice | None,
        device: torch.device,
    ) -> Any:
        if self.config._attn_implementation == "flex_attention" and (
            mask.keys is not None or mask.blocks is not None
        ):
            return mask.flex(
                batch, length, cache.length if cache is not None else length, cache_position, device
            )
        return mask.dense(cache_position)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [..., width]."""
        if self.shape.tied:
            weight = self.embedding().weight  # with a device map, not necessarily where the last layer is
            return F.linear(hidden.to(weight.device), weight)
        return cast(Tensor, self.get_submodule(self.names.head)(hidden))

    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.get_submodule(self.names.embed))

    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.get_submodule(self.names.layers))

    def projections(self) -> Iterator[tuple[Layer, str]]:
        """Every linear map of every layer, as the layer and the path in it. Embedding and head are not among them."""
        for layer in self.layers():
            for path in cast(Layer, layer).projections:
                yield cast(Layer, layer), path

    def new_cache(self, batch: int, length: int) -> KVCache:
        """Empty buffers for a canvas of `length`, on the devices of the layers."""
        return KVCache(
            self.shape.layers,
            batch,
            self.shape.kv_heads,
            length,
            self.shape.head_dim,
            self.dtype,
            [_device_of(layer) for layer in self.layers()],
        )

    @classmethod
    def can_generate(cls) -> bool:
        """Not in the sense of transformers, which is left to right."""
        return False

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """PEFT looks this name up when an adapter calls itself a causal language model; nothing may call it."""
        raise TadError("masked-diffusion models do not generate left to right; use a decoder of this package")

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding()

    def set_input_embeddings(self, value: nn.Module) -> None:
        place(self, self.names.embed, value)

    def get_output_embeddings(self) -> nn.Module | None:
        return None if self.shape.tied else self.get_submodule(self.names.head)


def _device_of(layer: nn.Module) -> torch.device:
    """Where a layer computes: its weights' device, or the one accelerate brings offloaded weights to."""
    device = next(layer.parameters()).device
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in layer.modules())
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((where for where in found if where is not None), device))
