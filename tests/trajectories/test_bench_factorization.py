"""The bench of the factorization gap against the enumerated joint of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import factorization
from tad.models import DREAM, LLADA, Family, load
from tiny_lm import write_checkpoint
from tiny_trajectory import make_trajectory


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=lambda family: family.name)
def test_the_gap_of_two_masks_is_that_of_the_enumerated_joint(tmp_path: Path, family: Family) -> None:
    lm = load(write_checkpoint(tmp_path, family, scale=6.0), device="cpu")
    row = make_trajectory()  # revealed from right to left: after six steps, position 1 is next and then 0
    prompt, answer = [row.plain_ids], torch.tensor([row.tokens])
    answer[0, :2] = lm.tokens.mask
    with torch.inference_mode():
        marginal = factorization.log_probabilities(lm, prompt, answer, torch.tensor([[1, 0]]))[0]
        first, vocabulary = marginal[0].exp(), marginal.shape[-1]
        filled = answer.repeat(vocabulary, 1)
        filled[:, 1] = torch.arange(vocabulary)
        place = torch.zeros(vocabulary, 1, dtype=torch.long)
        second = factorization.log_probabilities(lm, prompt * vocabulary, filled, place)[:, 0]
    inner = (second.exp() * (second - marginal[1])).sum(-1)
    exact = (first * inner).sum()
    assert exact > 0.01  # else the two masks say nothing about each other
    torch.manual_seed(0)
    gap, entropy = factorization.measure(lm, lm, [(0, row, 6)], samples=600, near=2)
    deviation = ((first * (inner - exact) ** 2).sum() / 600).sqrt()
    assert gap[0, 0] == pytest.approx(0.0, abs=1e-5)
    assert gap[0, 1] == pytest.approx(float(exact), abs=4 * float(deviation))
    assert entropy[0, 0] == pytest.approx(float(-(first * marginal[0]).sum()), rel=1e-4)
