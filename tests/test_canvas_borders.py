"""Numbers and words are not cut where a block or a line of a picture ends."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad.canvas.svg import draw_svg
from tad.canvas.terminal import Canvas
from tad.canvas.text import MASK
from tad.decoding import Decoded

PIECES = [
    "",
    "\x03",
    " apples",
    "1",
    "2",
    "3",
    " =",
    " 4",
    ".",
    "s",
    " Adding",
    "\n",
]  # by token; 0 is the mask, 1 the end
BLOCK, LENGTH = 4, 12


def spell(ids: list[int]) -> str:
    return "".join(PIECES[token] for token in ids)


def rows(tokens: list[int | None]) -> list[str]:
    canvas = Canvas(LENGTH, BLOCK, spell, (1,))
    canvas.tokens, canvas.steps, canvas.forward, canvas.created = tokens, [1] * LENGTH, 1, 3
    starts = canvas._starts(3)
    return [canvas._draw_block(block, starts[block], starts[block + 1]).plain for block in range(3)]


@given(st.lists(st.one_of(st.none(), st.integers(2, 10)), min_size=LENGTH, max_size=LENGTH))
def test_rows_hold_every_position_once_and_end_between_words(tokens: list[int | None]) -> None:
    drawn = rows(tokens)
    assert "".join(drawn) == "".join(MASK if token is None else PIECES[token] for token in tokens)
    for number, (one, after) in enumerate(pairwise(drawn)):
        if one[-1:].isalnum() and after[:1].isalnum():  # only where the whole block is one word
            block = tokens[(number + 1) * BLOCK : (number + 2) * BLOCK]
            assert all(token is not None and PIECES[token].isalnum() for token in block)


def test_a_number_across_blocks_stands_in_one_row() -> None:
    tokens: list[int | None] = [6, 7, 3, 4, 5, 8, 2, 8, 6, 7, 8, 8]
    assert rows(tokens)[0] == " = 4123"


@pytest.mark.parametrize("columns", [8, 10, 14])
def test_a_picture_breaks_lines_between_words_and_has_the_question(columns: int) -> None:
    tokens = [10, 7, 3, 4, 6, 7, 5, 5, 2]
    row = Decoded(tokens=tokens, steps=[1] * 9, confidence=[1.0] * 9, forwards=1, seconds=1.0, ends=(1,))
    drawn = draw_svg(row, spell, "title", columns=columns, question="How many & <why>?")
    placed = re.findall(r'<text class="t1" x="[\d.]+" y="(\d+)"[^>]*>([^<]*)<', drawn)
    lines: dict[str, str] = {}
    for y, text in placed:
        lines[y] = lines.get(y, "") + text
    assert any("412" in line for line in lines.values())
    assert any("433" in line for line in lines.values())
    assert "&lt;why&gt;" in drawn
    assert "<why>" not in drawn
