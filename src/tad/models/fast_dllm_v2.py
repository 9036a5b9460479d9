"""Fast-dLLM v2: Qwen2.5 with block-causal attention, under the names of the released checkpoints (Fast_dLLM_v2_7B, 1.5B)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tad.models.qwen import NAMES, QwenConfig
from tad.models.transformer import Layer, MaskedDiffusionModel, Shape, read_blocks


class FastDLLMConfig(QwenConfig):
    """Qwen2's fields and the block size `bd_size`; defaults are those of the 7B model."""

    model_type = "Fast_dLLM_Qwen"

    max_position_embeddings: int = 32768
    bd_size: int | None = None

    @property
    def shape(self) -> Shape:
        return replace(super().shape, blocks=read_blocks(self, "bd_size", "32 as released"))


class FastDLLMDecoderLayer(Layer):
    names = NAMES


class Fast_dLLM_QwenForCausalLM(MaskedDiffusionModel):  # noqa: N801
    """Fast-dLLM v2 with its head; the class name is the one in the released config.json."""

    config_class = FastDLLMConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[Any] = ["FastDLLMDecoderLayer"]
    names = NAMES
    layer_class = FastDLLMDecoderLayer
