"""LLaDA2.0 and 2.1: block-causal attention, experts, RoPE on half of a head; names of the released checkpoints (mini, flash)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tad.errors import TadError
from tad.models.layers import NormedFusedAttention
from tad.models.qwen import NAMES as QWEN_NAMES
from tad.models.qwen import QwenConfig
from tad.models.shape import Experts, Shape
from tad.models.transformer import MaskedDiffusionModel


class LLaDA2MoeConfig(QwenConfig):
    """Fields as in the released config.json, many of them Qwen's; defaults are LLaDA2.0-mini's.

    No released file gives a block size: `block_size` is read where there is one, else it is the 32 of training.
    """

    model_type = "llada2_moe"
    _supported: ClassVar[dict[str, Any]] = {
        **QwenConfig._supported,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "norm_head": False,
        "norm_softmax": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
    }
    _block: ClassVar[str | None] = "block_size"

    hidden_size: int = 2048
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    intermediate_size: int = 5120
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int | None = 1
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    vocab_size: int = 157184
    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.5
    rope_theta: float = 600000.0
    use_cache: bool = False
    block_size: int = 32

    @property
    def shape(self) -> Shape:
        blocks = self.read_blocks("32 as released")
        experts = Experts.read(self, score_function="sigmoid")
        shape = self.read_shape(blocks=blocks, qk_norm=True, experts=experts)
        rotary_dim = int(shape.head_dim * self.partial_rotary_factor)
        if not 2 <= rotary_dim <= shape.head_dim or rotary_dim % 2:
            raise TadError(
                f"config.json: partial_rotary_factor {self.partial_rotary_factor!r:.40} of head_dim {shape.head_dim}"
                " should be an even number of dimensions, at least 2"
            )
        return replace(shape, rotary_dim=rotary_dim)


_FUSED = "attention.query_key_value"


class LLaDA2MoeModelLM(MaskedDiffusionModel):
    """LLaDA2 with its head; the class name is the one in the released config.json."""

    config_class = LLaDA2MoeConfig
    _keep_in_fp32_modules_strict: ClassVar[Any] = ["expert_bias"]
    names = replace(
        QWEN_NAMES,
        embed="model.word_embeddings",
        query=_FUSED,
        key=_FUSED,
        value=_FUSED,
        attn_out="attention.dense",
    )
    attention_op = NormedFusedAttention("attention.query_layernorm", "attention.key_layernorm")
