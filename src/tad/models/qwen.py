"""What the families built on Qwen share: the fields of their config.json and the key names of their checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from tad.models.transformer import Names, Shape, check_switches, read_theta, split_width

_SUPPORTED = {"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None, "use_mrope": False}


class QwenConfig(PreTrainedConfig):
    """Fields as in the released config.json files. Fields not named here are kept as they are."""

    hidden_size: int = 3584
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int | None = 4
    head_dim: int | None = None  # hidden_size / num_attention_heads where absent
    intermediate_size: int = 18944
    vocab_size: int = 152064
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    use_cache: bool = True
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    @classmethod
    def from_sizes(
        cls,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        mlp: int,
        vocab: int,
        context: int,
        **more: int,
    ) -> QwenConfig:
        """A config of these sizes, under the field names of the released ones; `more` are special token ids and the block size."""
        return cls(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp,
            vocab_size=vocab,
            max_position_embeddings=context,
            **more,
        )

    @property
    def shape(self) -> Shape:
        """Qwen2's: biases on queries, keys and values."""
        check_switches(self, _SUPPORTED)
        return Shape(
            width=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or split_width(self.hidden_size, self.num_attention_heads),
            mlp=self.intermediate_size,
            vocab=self.vocab_size,
            context=self.max_position_embeddings,
            eps=self.rms_norm_eps,
            theta=read_theta(self),
            qkv_bias=True,
            bias=False,
            tied=self.tie_word_embeddings,
            rotate_in_fp32=False,
        )


NAMES = Names(
    embed="model.embed_tokens",
    layers="model.layers",
    norm="model.norm",
    head="lm_head",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attn_out="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)
