"""bench/infill.py: gaps lie between two given ends, every way of filling fills them, and soundness is arithmetic."""

from __future__ import annotations

import pytest

import infill as bench
import tad


@pytest.mark.parametrize(
    ("text", "answer", "sound"),
    [
        ("Then she has 3 + 4 = 7. That is 7 * 2 = 14.\n#### 14", 14, True),
        ("Then she has 3 + 4 = 8. That is 8 * 2 = 16.\n#### 16", 16, False),  # not true
        ("Then she has 3 + 4 = 7.\n#### 14", 14, False),  # does not lead to the answer
        ("She has some.\n#### 14", 14, False),
        ("Split it, 7 / 0 = 7.\n#### 7", 7, False),
    ],
)
def test_an_answer_is_sound_if_its_calculations_are_true_and_lead_to_it(
    text: str, answer: int, sound: bool
) -> None:
    assert bench.is_sound(text, answer) is sound


@pytest.mark.parametrize("model", ["nano-llada", "nano-dream"])
def test_gaps_are_filled_between_ends_that_stay(model: str) -> None:
    lm = tad.load(model, device="cpu")
    gaps = bench.make_gaps(lm, 6, 0.3)
    assert all(bench.is_sound(lm.decode(gap.ids[gap.start :]), gap.answer) for gap in gaps)
    spent = {}
    for order in bench.ORDERS:
        rows, spent[order] = bench.fill(lm, gaps, order, 0.5)
        for gap, row in zip(gaps, rows, strict=True):
            assert lm.tokens.mask not in row
            assert (row[: gap.low], row[gap.high :]) == (gap.ids[: gap.low], gap.ids[gap.high :])
    masks = sum(gap.high - gap.low for gap in gaps)
    assert spent["any order"] == spent["left to right"] == masks
    assert spent["parallel"] < masks
    right = bench.measure(lm, model, gaps, "any order", 0.5, 6).recovered
    assert right > 0.3  # a model that knows nothing would have none
