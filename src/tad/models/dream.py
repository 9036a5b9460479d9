"""Dream: configuration and model, with the key names of the released checkpoints (Dream-7B, Dream-Coder, DiffuCoder)."""

from __future__ import annotations

from tad.models.qwen import NAMES, QwenConfig
from tad.models.transformer import MaskedDiffusionModel


class DreamConfig(QwenConfig):
    """Qwen2's fields; defaults are Dream-7B's."""

    model_type = "Dream"


class DreamModel(MaskedDiffusionModel):
    """Dream with its head; the class name is the one in the released config.json."""

    config_class = DreamConfig
    names = NAMES
