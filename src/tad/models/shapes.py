"""Named shapes without weights, models with random weights, and what one forward costs.

The named shapes are those of the released checkpoints; they serve measurements and `tad info --shape`. Loading a
checkpoint never asks this module: its shape comes from its own config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tad.errors import TadError
from tad.models.dream import DreamConfig
from tad.models.family import FAMILIES, Family
from tad.models.llada import LLaDAConfig
from tad.models.transformer import MaskedDiffusionModel, Shape

_LLADA_TOKENS = {"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081}
_DREAM_TOKENS = {"mask_token_id": 151666, "eos_token_id": 151643, "pad_token_id": 151643}

SHAPES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llada-8b": (LLaDAConfig, {"mlp_hidden_size": 12288, "embedding_size": 126464, **_LLADA_TOKENS}),
    "dream-7b": (DreamConfig, _DREAM_TOKENS),
}


def shape_config(name: str) -> Any:
    """The configuration of a named shape."""
    if name not in SHAPES:
        raise TadError(f"shape '{name}' is not known; known: {', '.join(SHAPES)}")
    config_class, values = SHAPES[name]
    return config_class(**values)


def family_of_config(config: Any) -> Family:
    """The family a configuration belongs to."""
    return FAMILIES[config.model_type]


def build(
    config: Any,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> MaskedDiffusionModel:
    """A model of this shape with random weights, made on the device itself: no copy passes through host memory."""
    with torch.device("meta"):
        model = family_of_config(config).model_class(config)
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
    return model.eval()


@dataclass(frozen=True)
class Cost:
    """One forward of one row of `length` tokens, everything fed, the head run everywhere."""

    length: int
    flops_per_token: int  # multiply and add counted as two
    flops: int
    head_flops_per_token: int  # the part of flops_per_token that `logits_at` saves
    weight_bytes: int  # weights read by a forward: all but the embedding, of which a forward reads rows
    cache_bytes_per_position: int


def forward_cost(shape: Shape, length: int, dtype: torch.dtype) -> Cost:
    """Arithmetic and weight traffic of a forward, from the shape alone."""
    inner, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 2 * shape.width * (inner + kv_width) + 3 * shape.width * shape.mlp
    head = shape.width * shape.vocab
    biases = shape.layers * (inner + 2 * kv_width) if shape.qkv_bias else 0
    norms = (2 * shape.layers + 1) * shape.width
    attention = 4 * length * inner * shape.layers  # scores and weighted sum over `length` keys
    per_token = 2 * (shape.layers * layer + head) + attention
    return Cost(
        length=length,
        flops_per_token=per_token,
        flops=per_token * length,
        head_flops_per_token=2 * head,
        weight_bytes=(shape.layers * layer + head + biases + norms) * dtype.itemsize,
        cache_bytes_per_position=2 * shape.layers * kv_width * dtype.itemsize,
    )
