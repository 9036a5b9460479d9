"""A tiny model with random weights and a byte-level tokenizer, written to a directory as released checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tad.models import LLADA, Family
from tad.models.family import FAST_DLLM_V2, LLADA2, SDAR
from tad.models.shapes import build

_HEADERS = {LLADA.name: ("<|start_header_id|>", "<|end_header_id|>"), LLADA2.name: ("<role>", "</role>")}
# What a family's config takes beside the sizes that all have.
_SIZES: dict[str, dict[str, int]] = {
    LLADA.name: {"kv_heads": 2},
    FAST_DLLM_V2.name: {"block": 8},
    SDAR.name: {"block": 4, "head_dim": 16},
    LLADA2.name: {
        "block": 8, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_group": 2, "topk_group": 1,
    },
}  # fmt: skip
CONTEXT = 256


def special_texts(family: Family) -> list[str]:
    """BOS, EOS, mask, end of turn, then what the chat format needs; their ids follow the 256 bytes."""
    begin = "<|startoftext|>" if family is LLADA else "<|beginoftext|>"
    headers = _HEADERS.get(family.name, ("<|im_start|>",))
    return [begin, "<|endoftext|>", family.mask_text, family.end_of_turn_text, *headers]


def write_checkpoint(
    folder: Path, family: Family = LLADA, tokenizer: bool = True, scale: float = 8.0
) -> Path:
    """`scale` multiplies the head, so that the random model is sure of some tokens and not of others."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 64, "vocab": 264, "context": CONTEXT,
        "mask_token_id": 258, "eos_token_id": 257, "pad_token_id": 257,
    }  # fmt: skip
    config = family.config_class.from_sizes(**{**sizes, **_SIZES.get(family.name, {})})
    model = build(config, "cpu", torch.float32, seed=3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(scale)
    model.save_pretrained(folder)
    if tokenizer:
        _write_tokenizer(folder, family)
    return folder


def _write_tokenizer(folder: Path, family: Family) -> None:
    special = special_texts(family)
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[1],
        "pad_token": special[1],
        "mask_token": special[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
