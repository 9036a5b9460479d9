"""Dream: configuration and model, with the key names of the released checkpoints (Dream-7B, Dream-Coder, DiffuCoder)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tad.errors import TadError
from tad.models.transformer import Layer, MaskedDiffusionModel, Names, Shape, read_theta, split_width

_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "rope_scaling": None, "use_mrope": False}


class DreamConfig(PreTrainedConfig):
    """Fields as in the released config.json; defaults are Dream-7B's. Fields not named here are kept as they are."""

    model_type = "Dream"

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
        **tokens: int,
    ) -> DreamConfig:
        """A config of these sizes, under the field names of the released ones; `tokens` are special token ids."""
        return cls(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp,
            vocab_size=vocab,
            max_position_embeddings=context,
            **tokens,
        )

    @property
    def shape(self) -> Shape:
        for field, value in _FIXED.items():
            if getattr(self, field, value) not in (value, None):
                raise TadError(
                    f"config.json: {field}={getattr(self, field)!r} is not supported (only {value!r} is)"
                )
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


class DreamDecoderLayer(Layer):
    names = NAMES


class DreamModel(MaskedDiffusionModel):
    """Dream with its head; the class name is the one in the released config.json."""

    config_class = DreamConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[Any] = ["DreamDecoderLayer"]
    names = NAMES
    layer_class = DreamDecoderLayer
