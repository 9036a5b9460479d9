"""Fast-dLLM v2: Qwen2.5 with block-causal attention, under the names of the released checkpoints (Fast_dLLM_v2_7B, 1.5B)."""

from __future__ import annotations

from typing import ClassVar

from tad.models.qwen import NAMES, QwenConfig
from tad.models.shape import Shape
from tad.models.transformer import MaskedDiffusionModel


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
    """Fast-dLLM v2 with its head; the class name is the one in the released config.json."""

    config_class = FastDLLMConfig
    names = NAMES
