"""Named shapes without weights, models with random weights, and what one forward costs.

The named shapes are those of the released checkpoints; they serve measurements and `tad info --shape`. Loading a
checkpoint never asks this module: its shape comes from its own config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tad.errors import TadError
from tad.models.family import family_of
from tad.models.llada import LLaDAConfig
from tad.models.llada2 import LLaDA2MoeConfig
from tad.models.qwen import DreamConfig, FastDLLMConfig
from tad.models.sdar import SDARConfig, SDARMoeConfig
from tad.models.shape import Shape
from tad.models.transformer import MaskedDiffusionModel

# What differs from the defaults of the family's config.
SHAPES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llada-8b": (LLaDAConfig, {"mlp_hidden_size": 12288, "embedding_size": 126464}),
    "dream-7b": (DreamConfig, {}),
    "fast-dllm-v2-7b": (FastDLLMConfig, {"bd_size": 32}),
    "fast-dllm-v2-1.5b": (
        FastDLLMConfig,
        {
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "intermediate_size": 8960,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "bd_size": 32,
        },
    ),
    "sdar-4b": (SDARConfig, {"hidden_size": 2560, "intermediate_size": 9728}),
    "sdar-8b": (SDARConfig, {}),
    "sdar-30b-a3b": (SDARMoeConfig, {}),
    "llada2-mini": (LLaDA2MoeConfig, {}),
}


def shape_config(name: str) -> Any:
    """The configuration of a named shape, with the family's released token ids."""
    if name not in SHAPES:
        raise TadError(f"shape '{name}' is not known; known: {', '.join(SHAPES)}")
    config_class, values = SHAPES[name]
    family = family_of(config_class.model_type)
    ids = {
        "mask_token_id": family.mask_token_id,
        "eos_token_id": family.eos_token_id,
        "pad_token_id": family.eos_token_id,
    }
    return config_class(**values, **ids)


def build(
    config: Any,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> MaskedDiffusionModel:
    """A model of this shape with random weights, made on the device itself: no copy passes through host memory."""
    with torch.device("meta"):
        model = family_of(config.model_type).model_class(config)
    model = model.to(dtype)
    if torch.device(device).type == "meta":
        return model.eval()
    model = model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    scale = getattr(config, "initializer_range", None) or getattr(config, "init_std", 0.02)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, scale, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model.eval()


@dataclass(frozen=True)
class Cost:
    """One forward of one row of `length` tokens, everything fed, the head run everywhere."""

    length: int
    flops_per_token: int  # multiply and add counted as two
    flops: int
    head_flops_per_token: int  # the part of flops_per_token that `logits_at` saves
    weight_bytes: (
        int  # weights read by a forward: all (also all experts) but the embedding, of which it reads rows
    )
    cache_bytes_per_position: int


def forward_cost(shape: Shape, length: int, dtype: torch.dtype) -> Cost:
    """Arithmetic and weight traffic of a forward, from the shape alone."""
    inner, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = shape.layers * 2 * shape.width * (inner + kv_width)
    mlps_met, mlps = shape.mlp_weights
    head = shape.width * shape.vocab
    biases = shape.layers * (inner + 2 * kv_width) if shape.qkv_bias else 0
    norms = (2 * shape.layers + 1) * shape.width + shape.qk_norm * 2 * shape.layers * shape.head_dim
    attention = 4 * length * inner * shape.layers  # scores and weighted sum over `length` keys
    per_token = 2 * (projections + mlps_met + head) + attention
    return Cost(
        length=length,
        flops_per_token=per_token,
        flops=per_token * length,
        head_flops_per_token=2 * head,
        weight_bytes=(projections + mlps + head + biases + norms) * dtype.itemsize,
        cache_bytes_per_position=2 * shape.layers * kv_width * dtype.itemsize,
    )
