"""Which examples are used."""

from __future__ import annotations

import pytest

from tad.errors import TadError
from tad.tasks import Example
from tad.tasks.selection import choose_examples, exclude_questions


def made(*questions: str) -> list[Example]:
    return [Example(str(i), question, "r", "a") for i, question in enumerate(questions)]


def test_the_first_examples_or_a_sample_in_the_order_of_the_data() -> None:
    examples = made(*(f"q{i}" for i in range(40)))
    assert choose_examples(examples, limit=3) == examples[:3]
    small, large = choose_examples(examples, sample=5), choose_examples(examples, sample=9)
    assert {one.id for one in small} < {one.id for one in large}
    assert large == sorted(large, key=lambda one: int(one.id))
    assert small != examples[:5]
    with pytest.raises(TadError, match="sample 41"):
        choose_examples(examples, sample=41)


def test_questions_that_are_asked_elsewhere_are_left_out_whatever_their_spacing_and_case() -> None:
    examples = made("What is 2 + 2?", "What is 2 - 2?", "Why?")
    assert exclude_questions(examples, made("what is\n 2 + 2?", "else")) == examples[1:]
