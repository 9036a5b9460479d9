"""Bundled models say what they can be asked."""

from __future__ import annotations

import pytest

from tad.tasks.nano import WORLD
from tad.tasks.nano.samples import explain_scope, sample_questions


def test_questions_of_the_world_pass_without_a_word_and_others_are_named() -> None:
    for family in WORLD.values():
        for index in range(50):
            assert explain_scope("nano-llada", family.problem("test", index).question) is None
    assert "'joke'" in str(explain_scope("nano-llada", "Find a joke."))
    assert explain_scope("GSAI-ML/LLaDA-8B-Instruct", "Find a joke.") is None


@pytest.mark.parametrize(("model", "count"), [("nano-dream", 6), ("/models/nano-llada", 6), ("other", 0)])
def test_a_nano_model_has_sample_questions_of_every_family(model: str, count: int) -> None:
    found = sample_questions(model, each=2)
    assert len(found) == len(dict(found)) == count
    assert all(explain_scope(model, question) is None for _, question in found)
