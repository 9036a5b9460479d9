"""LLaDA2.0 and 2.1: block-causal attention, experts, RoPE on half of a head; names of the released checkpoints (mini, flash)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tad.errors import TadError
from tad.models.moe import MoE, MoEShape
from tad.models.qk_norm import NormedFusedAttention
from tad.models.transformer import (
    Layer,
    MaskedDiffusionModel,
    Names,
    Shape,
    check_switches,
    read_blocks,
    read_theta,
    split_width,
)

_SUPPORTED = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "rope_scaling": None,
    "norm_head": False,
    "norm_softmax": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
}


class LLaDA2MoeConfig(PreTrainedConfig):
    """Fields as in the released config.json; defaults are LLaDA2.0-mini's. Fields not named here are kept as they are.

    No released file gives a block size: `block_size` is read where there is one, else it is the 32 of training.
    """

    model_type = "llada2_moe"

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
    rms_norm_eps: float = 1e-6
    rope_theta: float = 600000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = False
    block_size: int = 32
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    @property
    def shape(self) -> MoEShape:
        check_switches(self, _SUPPORTED)
        head_dim = self.head_dim or split_width(self.hidden_size, self.num_attention_heads)
        rotary_dim = int(head_dim * self.partial_rotary_factor)
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise TadError(
                f"config.json: partial_rotary_factor {self.partial_rotary_factor} of head_dim {head_dim}"
                " should be an even number of dimensions, at least 2"
            )
        return MoEShape(
            width=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=head_dim,
            mlp=self.intermediate_size,
            vocab=self.vocab_size,
            context=self.max_position_embeddings,
            eps=self.rms_norm_eps,
            theta=read_theta(self),
            qkv_bias=False,
            bias=False,
            tied=self.tie_word_embeddings,
            rotate_in_fp32=False,
            blocks=read_blocks(self, "block_size", "32 as released"),
            rotary_dim=rotary_dim,
            qk_norm=True,
            dense_layers=self.first_k_dense_replace,
            experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            expert_mlp=self.moe_intermediate_size,
            shared_mlp=self.moe_intermediate_size * (self.num_shared_experts or 0),
            groups=self.n_group,
            groups_per_token=self.topk_group,
            sigmoid=True,
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )


_FUSED = "attention.query_key_value"
NAMES = Names(
    embed="model.word_embeddings",
    layers="model.layers",
    norm="model.norm",
    head="lm_head",
    query=_FUSED,
    key=_FUSED,
    value=_FUSED,
    attn_out="attention.dense",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)


class LLaDA2MoeDecoderLayer(Layer):
    """The first layers have a dense MLP."""

    names = NAMES
    attention_op = NormedFusedAttention("attention.query_layernorm", "attention.key_layernorm")

    def __init__(self, shape: Shape, index: int) -> None:
        if isinstance(shape, MoEShape) and index >= shape.dense_layers:
            self.mlp_op = MoE()
        super().__init__(shape, index)


class LLaDA2MoeModelLM(MaskedDiffusionModel):
    """LLaDA2 with its head; the class name is the one in the released config.json."""

    config_class = LLaDA2MoeConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[Any] = ["LLaDA2MoeDecoderLayer"]
    _keep_in_fp32_modules_strict: ClassVar[Any] = ["expert_bias"]
    names = NAMES
    layer_class = LLaDA2MoeDecoderLayer
