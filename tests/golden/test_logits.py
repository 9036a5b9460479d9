"""Raw logits of both families against the reference implementations, in fp32."""

from __future__ import annotations

import re

import pytest
import torch
from cases import Case, model, parameters
from torch import Tensor

from tad.models import AttentionMask

TOLERANCE = 1e-4


def blocks_of(case: Case, length: int) -> Tensor:
    """[batch, length]: the prompt is block 0, then blocks of the case's size."""
    size = case.get("args", {}).get("block_size") or int(re.search(r"block (\d+)", case["note"])[1])
    offset = torch.arange(length)[None] - case["tensors"]["prompt_lengths"][:, None]
    return torch.where(offset < 0, 0, offset // size + 1)


def rule_of(case: Case) -> AttentionMask:
    tensors = case["tensors"]
    keys = tensors["attention_mask"].bool() if "attention_mask" in tensors else None
    if "prompt_lengths" not in tensors:
        return AttentionMask(keys=keys)
    return AttentionMask.block_causal(blocks_of(case, tensors["input_ids"].shape[1]), keys)


@pytest.mark.parametrize("case", parameters("logits"))
def test_logits_equal_the_reference(case: Case) -> None:
    tensors = case["tensors"]
    rule = rule_of(case)
    if "allowed" in tensors:
        assert torch.equal(rule.dense()[:, 0], tensors["allowed"])
    with torch.no_grad():
        output = model(case["family"])(
            tensors["input_ids"], position_ids=tensors.get("position_ids"), mask=rule
        )
    real = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"])).bool()
    difference = (output.logits - tensors["logits"])[real].abs().max().item()
    assert difference <= TOLERANCE, f"{case['name']}: largest difference {difference:.2e}"
