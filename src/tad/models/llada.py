"""LLaDA: configuration and model, with the key names of the released checkpoints (LLaDA-8B, 1.5, iLLaDA)."""

from __future__ import annotations

from typing import Any, ClassVar

from tad.models.layers import Names
from tad.models.shape import FamilyConfig, Shape
from tad.models.transformer import MaskedDiffusionModel


class LLaDAConfig(FamilyConfig):
    """Fields as in the released config.json; defaults are LLaDA-8B's."""

    model_type = "llada"
    _sizes: ClassVar[dict[str, str]] = {
        "width": "d_model",
        "layers": "n_layers",
        "heads": "n_heads",
        "kv_heads": "n_kv_heads",
        "mlp": "mlp_hidden_size",
        "vocab": "vocab_size",
        "context": "max_sequence_length",
        "tied": "weight_tying",
        "bias": "include_bias",
        "rotate_in_fp32": "rope_full_precision",
    }
    # Switches of the original code base that no released checkpoint uses.
    _supported: ClassVar[dict[str, Any]] = {
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
    tie_word_embeddings: bool = False  # the family's own switch is weight_tying

    @property
    def shape(self) -> Shape:
        return self.read_shape(
            kv_heads=self.n_kv_heads or (1 if self.multi_query_attention else self.n_heads),
            mlp=self.mlp_hidden_size or self.mlp_ratio * self.d_model,
            vocab=self.embedding_size or self.vocab_size,
            qkv_bias=self.include_bias or self.include_qkv_bias,
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


class LLaDAModelLM(MaskedDiffusionModel):
    """LLaDA with its head; the class name is the one in the released config.json."""

    config_class = LLaDAConfig
    names = NAMES
