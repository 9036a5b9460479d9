"""What predicts: one transformer and its families, as Hugging Face models under their released names."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tad.models.attention import AttentionMask, BlockLayout, block_index
from tad.models.cache import KVCache
from tad.models.defaults import DecodingDefaults, find_context, find_defaults
from tad.models.family import (
    AUTOREGRESSIVE,
    DREAM,
    FAMILIES,
    FAST_DLLM_V2,
    LLADA,
    LLADA2,
    LLAMA,
    QWEN2,
    QWEN3,
    SDAR,
    Family,
    family_named,
    family_of,
)
from tad.models.llada import LLaDAConfig, LLaDAModelLM
from tad.models.lm import LM, load
from tad.models.qwen import DreamConfig, DreamModel
from tad.models.tokenizer import Message
from tad.models.tokens import SpecialTokens
from tad.models.transformer import DiffusionOutput, MaskedDiffusionModel

__all__ = [
    "AUTOREGRESSIVE",
    "DREAM",
    "FAMILIES",
    "FAST_DLLM_V2",
    "LLADA",
    "LLADA2",
    "LLAMA",
    "LM",
    "QWEN2",
    "QWEN3",
    "SDAR",
    "AttentionMask",
    "BlockLayout",
    "DecodingDefaults",
    "DiffusionOutput",
    "DreamConfig",
    "DreamModel",
    "Family",
    "KVCache",
    "LLaDAConfig",
    "LLaDAModelLM",
    "MaskedDiffusionModel",
    "Message",
    "SpecialTokens",
    "block_index",
    "family_named",
    "family_of",
    "find_context",
    "find_defaults",
    "load",
]

for _family in FAMILIES.values():
    if _family in AUTOREGRESSIVE:
        continue  # transformers has classes of its own for these, which others in this process may want
    AutoConfig.register(_family.model_type, _family.config_class, exist_ok=True)
    AutoModel.register(_family.config_class, _family.model_class, exist_ok=True)
    AutoModelForCausalLM.register(_family.config_class, _family.model_class, exist_ok=True)
