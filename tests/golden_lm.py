"""The tiny trained checkpoints of the parity set as language models: their confidences run from flat to certain."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tad.models import LM, SpecialTokens, family_of

DATA = Path(__file__).parent / "golden" / "data"


@cache
def golden_meta(folder: str) -> dict[str, Any]:
    return json.loads((DATA / folder / "meta.json").read_text())


@cache
def golden_lm(folder: str) -> LM:
    """llada, dream, fastdllm_v2, sdar or llada2, in fp32. Shared: attach adapters to a copy."""
    path = DATA / folder / "checkpoint"
    family = family_of(json.loads((path / "config.json").read_text())["model_type"])
    model = family.model_class.from_pretrained(path, dtype="float32", attn_implementation="sdpa").eval()
    ids = (golden_meta(folder)[f"{name}_token_id"] for name in ("mask", "eos", "pad", "bos", "eot"))
    return LM(model, family, SpecialTokens(*ids), source=folder)
