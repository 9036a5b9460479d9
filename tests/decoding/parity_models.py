"""The tiny trained checkpoints of the parity set as language models: their confidences run from flat to certain."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from tad.models import DREAM, LLADA, LM, SpecialTokens

DATA = Path(__file__).parents[1] / "golden" / "data"


@cache
def tiny(family: str) -> LM:
    facts = {"llada": LLADA, "dream": DREAM}[family]
    meta = json.loads((DATA / family / "meta.json").read_text())
    model = facts.model_class.from_pretrained(DATA / family / "checkpoint", dtype=torch.float32).eval()
    tokens = SpecialTokens(
        mask=meta["mask_token_id"],
        eos=meta["eos_token_id"],
        pad=meta["pad_token_id"],
        bos=meta["bos_token_id"],
        eot=meta["eot_token_id"],
    )
    return LM(model, facts, tokens, source=family)


@cache
def tiny_prompts(family: str) -> list[list[int]]:
    """Eight prompts of different lengths, cut from the parity set's."""
    longest = json.loads((DATA / family / "meta.json").read_text())["prompts"]
    return [*longest, longest[2][3:], longest[3][5:30], longest[3][:17], longest[1][2:]]
