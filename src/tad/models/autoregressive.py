"""Autoregressive checkpoints, Llama, Qwen2 and Qwen3, in the one network: the fields and class names of their released config.json.

Without `block_size` such a checkpoint is what it was trained to be: token-causal, one token after the other. With `block_size` and
`mask_token_id`, which `tad convert` adds, the same weights also fill a block of masks whose context is token-causal. Other programs
ignore the two fields, so that a converted checkpoint stays an autoregressive one to them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tad.errors import TadError
from tad.models.attention import BlockLayout
from tad.models.layers import NormedAttention
from tad.models.qwen import NAMES, QwenConfig
from tad.models.shape import RopeScaling, Shape
from tad.models.transformer import MaskedDiffusionModel

_SCALED = ("default", "llama3")  # kinds of rotary positions


class AutoregressiveConfig(QwenConfig):
    """What the three have in common."""

    _supported: ClassVar[dict[str, Any]] = {
        **{name: only for name, only in QwenConfig._supported.items() if name != "rope_scaling"},
        "attention_bias": False,
        "mlp_bias": False,
    }
    _block: ClassVar[str | None] = "block_size"

    rope_theta: float = 10000.0
    block_size: int | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None

    def read_causal_shape(self, **found: Any) -> Shape:
        """The shape with token-causal attention, of a converted model with blocks behind it."""
        layers = self.layer_types or []
        if not isinstance(layers, list) or any(kind != "full_attention" for kind in layers):
            raise TadError("config.json: layer_types other than 'full_attention' are not supported")
        if self.block_size is None:
            blocks = BlockLayout(1, "absolute", causal=True)
        else:
            if type(self.block_size) is not int or not 2 <= self.block_size <= 4096:
                raise TadError(
                    f"config.json: block_size is {self.block_size!r:.40}; a converted model has from 2 to 4096, any other none"
                )
            if self.mask_token_id is None:
                raise TadError("config.json: block_size needs mask_token_id, the id that stands for a mask")
            blocks = BlockLayout(self.block_size, "absolute", causal=True)
        return self.read_shape(blocks=blocks, rope_scaling=self._rope_scaling(), **found)

    def _rope(self) -> dict[str, Any]:
        """Newer files have `rope_parameters` with the base in it, older ones `rope_scaling` beside `rope_theta`."""
        given = self.rope_parameters or self.rope_scaling or {}
        if not isinstance(given, dict):
            raise TadError("config.json: rope_parameters should be an object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _SCALED:
            raise TadError(
                f"config.json: rotary positions of type {kind!r:.40} are not supported (only {' and '.join(_SCALED)} are)"
            )
        return {**given, "rope_type": kind}

    def _theta(self) -> Any:
        return self._rope().get("rope_theta", self.rope_theta)

    def _rope_scaling(self) -> RopeScaling | None:
        given = self._rope()
        if given["rope_type"] == "default":
            return None
        named = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for name in named:
            if name not in given:
                raise TadError(f"config.json: rotary positions of type 'llama3' need {name}")
        return RopeScaling(*(given[name] for name in named))


class LlamaConfig(AutoregressiveConfig):
    """Llama's fields (Llama 3, SmolLM2, TinyLlama)."""

    model_type = "llama"

    @property
    def shape(self) -> Shape:
        return self.read_causal_shape()


class Qwen2Config(AutoregressiveConfig):
    """Qwen2's and Qwen2.5's."""

    model_type = "qwen2"

    @property
    def shape(self) -> Shape:
        return self.read_causal_shape(qkv_bias=True)


class Qwen3Config(AutoregressiveConfig):
    """Qwen3's, dense."""

    model_type = "qwen3"

    head_dim: int | None = 128

    @property
    def shape(self) -> Shape:
        return self.read_causal_shape(qk_norm=True)


class LlamaForCausalLM(MaskedDiffusionModel):
    """Llama with its head."""

    config_class = LlamaConfig
    names = NAMES


class Qwen2ForCausalLM(MaskedDiffusionModel):
    """Qwen2 with its head."""

    config_class = Qwen2Config
    names = NAMES


class Qwen3ForCausalLM(MaskedDiffusionModel):
    """Qwen3 with its head."""

    config_class = Qwen3Config
    names = NAMES
    attention_op = NormedAttention("self_attn.q_norm", "self_attn.k_norm")
