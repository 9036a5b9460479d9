"""The one transformer behind all families: RMSNorm, RoPE, SwiGLU or experts, optional GQA, bias and q/k norm.

`MaskedDiffusionModel` is a Hugging Face `PreTrainedModel` without a family: subclasses say where their released
checkpoints keep each part (`Names`) and how their config maps to a `Shape`. It predicts; it does not decode, and
it does not shift logits (families whose logits are shifted say so, and the decoder reads them accordingly).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tad.errors import TadError
from tad.models.attention import AttentionMask, BlockLayout, block_index, open_block
from tad.models.cache import KVCache
from tad.models.layers import Attention, Layer, Names, RMSNorm, SwiGLU, place, rotary_table, take
from tad.models.moe import MoE
from tad.models.shape import Shape

_OF_PEFT = {"labels", "output_attentions", "output_hidden_states", "return_dict"}


@dataclass
class DiffusionOutput(ModelOutput):
    """logits [batch, positions, vocab] (None when the head was not asked for), hidden [batch, positions, width].

    The positions are all of those fed, or the ones named by `logits_at`.
    """

    logits: Tensor | None = None
    hidden: Tensor | None = None


class MaskedDiffusionModel(PreTrainedModel):
    """ids or embeddings in, logits out. See `forward`."""

    names: ClassVar[Names]
    attention_op: ClassVar[Attention] = Attention()

    base_model_prefix = "model"
    _no_split_modules: ClassVar[Any] = ["Layer"]
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shape: Shape = config.shape
        self.shape = shape
        place(self, self.names.embed, nn.Embedding(shape.vocab, shape.width))
        layers = (
            Layer(shape, index, self.names, self.attention_op, self.mlp_op(index))
            for index in range(shape.layers)
        )
        place(self, self.names.layers, nn.ModuleList(layers))
        place(self, self.names.norm, RMSNorm(shape.width, shape.eps))
        if not shape.tied:
            place(self, self.names.head, nn.Linear(shape.width, shape.vocab, bias=shape.bias))
        self.gated_token: int | None = None  # see `tad.models.conversion.gate`
        self.register_parameter("mask_embedding", None)
        self.post_init()

    def mlp_op(self, index: int) -> SwiGLU:
        """The MLP of a layer."""
        return MoE() if self.shape.has_experts(index) else SwiGLU()

    def forward(
        self,
        input_ids: Tensor | None = None,  # [batch, length]
        attention_mask: Tensor | None = None,  # [batch, length of the keys], 0 at padding
        position_ids: Tensor | None = None,  # [batch, length]
        inputs_embeds: Tensor | None = None,  # [batch, length, width]
        mask: AttentionMask | None = None,
        cache: KVCache | None = None,
        cache_position: Tensor | slice | None = None,  # [batch, length] or a slice: the fed positions
        logits_at: Tensor | None = None,  # [batch, m] or [m]: indices into the fed positions
        head: bool = True,
        **of_peft: Any,  # what PEFT's wrapper for causal language models adds; it says nothing here
    ) -> DiffusionOutput:
        """One forward.

        `mask` says who sees whom, by default what `attention_mask` below says without a prompt; the argument
        `attention_mask` is the short form for padding. With a `cache`, the keys are all of
        its positions, so a mask must hide the ones that hold nothing. `logits_at` names the positions whose outputs
        are wanted: the head, and of the last layer all but keys and values, run there only. `head=False` leaves the
        head out. Positions default to `cache_position` with a cache and to 0, 1, ... without.
        """
        if not of_peft.keys() <= _OF_PEFT:
            raise TypeError(f"forward() takes no {', '.join(sorted(of_peft.keys() - _OF_PEFT))}")
        x = self.embedding()(input_ids) if inputs_embeds is None else inputs_embeds
        masks = None
        if self.gated_token is not None:
            if input_ids is None:
                raise TypeError("a gated adapter needs input_ids: they say where the masks are")
            masks = input_ids == self.gated_token
            if not torch.is_grad_enabled() and x.device.type == "cpu" and not masks.any():
                masks = None  # the adapters are passed over; elsewhere one would wait for the device to know
        if masks is not None:
            x = torch.where(masks[..., None], cast(Tensor, self.mask_embedding).to(x.dtype), x)
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
        fed: dict[str, Any] = {"cache": cache, "cache_position": cache_position, "masks": masks}
        for layer in layers:
            x = layer(x, cos, sin, visible, **fed)
        if only is None or visible is None or isinstance(visible, Tensor):
            x = last(x, cos, sin, visible, **fed, only=only)
        else:  # a FlexAttention mask is made for all queries
            x = take(last(x, cos, sin, visible, **fed), only)
        hidden = self.get_submodule(self.names.norm)(x)
        return DiffusionOutput(logits=self.head(hidden) if head else None, hidden=hidden)

    def attention_mask(
        self,
        positions: Tensor,  # [length] or [batch, length]: position ids of the keys, negative in left padding
        prompt_len: int | Tensor = 0,  # int or [batch, 1]
        real: Tensor | None = None,  # [batch, length], 0 or False at padding
        layout: BlockLayout | None = None,
        opened: Tensor
        | None = None,  # [batch or 1, 2]: the open block's first position and the first behind it
    ) -> AttentionMask:
        """Who sees whom in this model: everybody, or what its config's block layout says.

        `layout` stands in for the model's own: a block-causal schedule on a model with full attention. With a token-causal
        context, only the positions of the block that is `opened` see each other; none by default.
        """
        keys = None if real is None else real.bool()
        layout = layout or self.shape.blocks
        if layout is None:
            return AttentionMask(keys)
        if layout.causal:
            return AttentionMask(keys, open_block(positions, opened))
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
