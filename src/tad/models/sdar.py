"""SDAR: Qwen3 with block-causal attention, dense (SDAR-1.7B, 4B, 8B) or with experts (SDAR-30B-A3B)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tad.models.layers import NormedAttention
from tad.models.qwen import NAMES, QwenConfig
from tad.models.shape import Experts, Shape
from tad.models.transformer import MaskedDiffusionModel


class SDARConfig(QwenConfig):
    """Qwen3's fields and `block_size`; defaults are those of SDAR-8B-Chat.

    Some released files give no block size: it then is the 4 of the chat models. Models of other sizes say so in their name,
    and need the field.
    """

    model_type = "sdar"
    _supported: ClassVar[dict[str, Any]] = {**QwenConfig._supported, "attention_bias": False}
    _block: ClassVar[str | None] = "block_size"

    hidden_size: int = 4096
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    intermediate_size: int = 12288
    vocab_size: int = 151936
    max_position_embeddings: int = 32768
    block_size: int = 4

    @property
    def shape(self) -> Shape:
        blocks = self.read_blocks("4 for SDAR-*-Chat, for others it is in the model's name")
        return self.read_shape(blocks=blocks, qk_norm=True)


class SDARMoeConfig(SDARConfig):
    """Qwen3-MoE's fields and `block_size`; defaults are those of SDAR-30B-A3B-Chat."""

    model_type = "sdar_moe"
    _supported: ClassVar[dict[str, Any]] = {
        **SDARConfig._supported,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

    hidden_size: int = 2048
    num_hidden_layers: int = 48
    num_key_value_heads: int | None = 4
    intermediate_size: int = 6144
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True

    @property
    def shape(self) -> Shape:
        return replace(super().shape, experts=Experts.read(self))


class SDARForCausalLM(MaskedDiffusionModel):
    """SDAR with its head; the class name is the one in the released config.json."""

    config_class = SDARConfig
    names = NAMES
    attention_op = NormedAttention("self_attn.q_norm", "self_attn.k_norm")


class SDARMoeForCausalLM(SDARForCausalLM):
    """The same with experts in every layer."""

    config_class = SDARMoeConfig
