"""The families built on Qwen: the fields of config.json and the key names that they share, and the two that add little to them,
Dream (Dream-7B, Dream-Coder, DiffuCoder) and Fast-dLLM v2 (Fast_dLLM_v2_7B, 1.5B). Class names are those in the released config.json.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tad.models.layers import Names
from tad.models.shape import FamilyConfig, Shape
from tad.models.transformer import MaskedDiffusionModel


class QwenConfig(FamilyConfig):
    """Fields as in the released config.json files."""

    _sizes: ClassVar[dict[str, str]] = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "mlp": "intermediate_size",
        "vocab": "vocab_size",
        "context": "max_position_embeddings",
        "tied": "tie_word_embeddings",
    }
    _supported: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_scaling": None,
        "use_mrope": False,
    }

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

    @property
    def shape(self) -> Shape:
        """Qwen2's: biases on queries, keys and values."""
        return self.read_shape(qkv_bias=True)


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


class DreamConfig(QwenConfig):
    """Qwen2's fields; defaults are Dream-7B's."""

    model_type = "Dream"


class DreamModel(MaskedDiffusionModel):
    """Dream with its head."""

    config_class = DreamConfig
    names = NAMES


class FastDLLMConfig(QwenConfig):
    """Qwen2's fields and the block size `bd_size`; defaults are those of the 7B model."""

    model_type = "Fast_dLLM_Qwen"
    _block: ClassVar[str | None] = "bd_size"

    max_position_embeddings: int = 32768
    bd_size: int | None = None

    @property
    def shape(self) -> Shape:
        return self.read_shape(qkv_bias=True, blocks=self.read_blocks("32 as released"))


class Fast_dLLM_QwenForCausalLM(MaskedDiffusionModel):  # noqa: N801
    """Fast-dLLM v2, which is Qwen2.5 with block-causal attention, with its head."""

    config_class = FastDLLMConfig
    names = NAMES
