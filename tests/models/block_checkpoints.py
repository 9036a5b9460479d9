"""Tiny checkpoints of the block-diffusion families, in the layout and field set of the released ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import edit_json

from tad.models import MaskedDiffusionModel, family_of
from tad.models.sdar import SDARMoeConfig, SDARMoeForCausalLM
from tad.models.shapes import build

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
RELEASED = ("fastdllm_v2", "sdar", "llada2")  # folders of the parity set
ALL = (*RELEASED, "sdar_moe")

# What the small vocabularies of the parity set cannot take from the families' defaults.
IDS = {
    "fastdllm_v2": {"mask_token_id": 311},
    "sdar": {},
    "llada2": {"mask_token_id": 295, "eos_token_id": 292},
    "sdar_moe": {},
}


def moe_config(**changes: Any) -> SDARMoeConfig:
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "block_size": 4,
        "mask_token_id": 313,
        "eos_token_id": 305,
        "pad_token_id": 305,
    }
    return SDARMoeConfig(**{**values, **changes})


def moe_model() -> SDARMoeForCausalLM:
    """Random weights large enough that experts differ."""
    model = build(moe_config(), "cpu", torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.dim() > 1 else 1.0)
    return model


def write_block_checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """A directory of one of `ALL`; `changes` are set in its config.json, None removes a field."""
    if name == "sdar_moe":
        moe_model().save_pretrained(folder)
        edit_json(folder / "config.json", torch_dtype="float32", dtype=None)
    else:
        shutil.copytree(GOLDEN / name / "checkpoint", folder)
    edit_json(folder / "config.json", **{**IDS[name], **changes})
    return folder


def block_model(name: str) -> MaskedDiffusionModel:
    if name == "sdar_moe":
        return moe_model()
    folder = GOLDEN / name / "checkpoint"
    declared = json.loads((folder / "config.json").read_text())["model_type"]
    model_class = family_of(declared).model_class
    return model_class.from_pretrained(folder, dtype="float32", attn_implementation="sdpa").eval()
