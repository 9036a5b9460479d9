"""LLaDA: configuration and model, with the key names of the released checkpoints (LLaDA-8B, 1.5, iLLaDA)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tad.models.transformer import (
    Layer,
    MaskedDiffusionModel,
    Names,
    Shape,
    check_switches,
    read_theta,
    split_width,
)

# Switches of the original code base that no released checkpoint uses; a checkpoint that does is refused, not misread.
_SUPPORTED = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "alibi": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "block_group_size": 1,
    "bias_for_layer_norm": False,
}


class LLaDAConfig(PreTrainedConfig):
    """Fields as in the released config.json; defaults are LLaDA-8B's. Fields not named here are kept as they are."""

    model_type = "llada"

    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    multi_query_attention: bool | None = None
    mlp_hidden_size: int | None = None
    mlp_ratio: int = 4
    vocab_size: int = 126464
    embedding_size: int | None = None
    max_sequence_length: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_full_precision: bool = True
    include_bias: bool = False
    include_qkv_bias: bool = False
    weight_tying: bool = False
    init_std: float = 0.02
    use_cache: bool = False
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    tie_word_embeddings: bool = False  # the family's own switch is weight_tying

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
    ) -> LLaDAConfig:
        """A config of these sizes, under the field names of the released ones; `tokens` are special token ids."""
        return cls(
            d_model=width,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            mlp_hidden_size=mlp,
            vocab_size=vocab,
            embedding_size=vocab,
            max_sequence_length=context,
            **tokens,
        )

    @property
    def shape(self) -> Shape:
        check_switches(self, _SUPPORTED)
        kv_heads = self.n_kv_heads or (1 if self.multi_query_attention else self.n_heads)
        return Shape(
            width=self.d_model,
            layers=self.n_layers,
            heads=self.n_heads,
            kv_heads=kv_heads,
            head_dim=split_width(self.d_model, self.n_heads),
            mlp=self.mlp_hidden_size or self.mlp_ratio * self.d_model,
            vocab=self.embedding_size or self.vocab_size,
            context=self.max_sequence_length,
            eps=self.rms_norm_eps,
            theta=read_theta(self),
            qkv_bias=self.include_bias or self.include_qkv_bias,
            bias=self.include_bias,
            tied=self.weight_tying,
            rotate_in_fp32=self.rope_full_precision,
        )

    # Names that Hugging Face tooling (accelerate, PEFT, Trainer) reads.
    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def num_hidden_layers(self) -> int:
        return self.n_layers

    @property
    def num_attention_heads(self) -> int:
        return self.n_heads


NAMES = Names(
    embed="model.transformer.wte",
    layers="model.transformer.blocks",
    norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    attn_out="attn_out",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
    attn_norm="attn_norm",
    mlp_norm="ff_norm",
)


class LLaDABlock(Layer):
    names = NAMES


class LLaDAModelLM(MaskedDiffusionModel):
    """LLaDA with its head; the class name is the one in the released config.json."""

    config_class = LLaDAConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[Any] = ["LLaDABlock"]
    names = NAMES
    layer_class = LLaDABlock
