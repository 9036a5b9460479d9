"""Short names for what a store depends on: the weights, the tokenizer, the text of a question.

A fingerprint of weights reads every tensor's shape and a fixed sample of its values, not all bytes: it tells models
apart in a second at 8B parameters, and is not a defence against tampering.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import torch

from tad.models import LM
from tad.models.shape import NO_TOKEN

_SAMPLE = 257  # values per tensor


def fingerprint_model(lm: LM) -> str:
    """Of the base weights; an attached adapter does not count."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(_base_tensors(lm).items()):
        flat = tensor.detach().reshape(-1)
        last = flat.numel() - 1
        # The places are in fp32, which rounds the last one of a large tensor to one past its end.
        picked = torch.linspace(0, last, min(_SAMPLE, flat.numel())).long().clamp(max=last).to(flat.device)
        values = flat[picked].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + values)
    return digest.hexdigest()


def _base_tensors(lm: LM) -> dict[str, torch.Tensor]:
    """Parameters under their released names, whether PEFT has wrapped their modules or not."""
    return {
        name.replace(".base_layer", ""): tensor
        for name, tensor in lm.model.named_parameters()
        if "lora_" not in name and name != "mask_embedding"
    }


def stored_mask(lm: LM) -> int:
    """The mask token by which a model's trajectories are known: none for an autoregressive model, converted or not, so that a
    parent's generations are those of all who share its weights."""
    layout = lm.model.shape.blocks
    return NO_TOKEN if layout is not None and layout.causal else lm.tokens.mask


def fingerprint_tokenizer(lm: LM) -> str:
    """Of the vocabulary, the special tokens and the chat template."""
    if lm.tokenizer is None:
        return "none"
    tokens = replace(lm.tokens, mask=stored_mask(lm))
    parts = [sorted(lm.tokenizer.get_vocab().items()), lm.tokenizer.chat_template]
    parts.append(str(tokens).replace(", stops=()", ""))  # as before there were further end tokens
    return short_digest(parts)


def row_seed(seed: int, example: str, sample: int) -> int:
    """The seed of one rollout: a function of the run's seed, the example and the sample, and of nothing else."""
    return int(short_digest([seed, example, sample]), 16) >> 1  # fits a signed 64-bit integer


def short_digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, ensure_ascii=False).encode(), digest_size=8).hexdigest()
