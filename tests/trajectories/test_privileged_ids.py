"""Prompts of student and teacher as token ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tad
from tad.errors import TadError
from tad.tasks import Example, Prompt, get_task
from tad.trajectories.privileged import plain_ids, privileged_ids


class Bare:
    """A nano task whose prompt is a text to continue."""

    name = "bare"
    instruction = ""

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        return replace(Prompt.from_user(example.question), raw=True, prefix=" So")


def test_a_bare_template_is_encoded_without_a_chat_around_it() -> None:
    lm = tad.load("nano-llada", device="cpu")
    example = get_task("nano-math", size=1).examples("test")[0]
    bare = plain_ids(lm, Bare(), example)  # type: ignore[arg-type]
    assert lm.decode(bare) == example.question + " So"
    chat = plain_ids(lm, get_task("nano-math", size=1), example)
    assert len(chat) > len(bare)


def test_a_bare_template_has_no_privileged_form() -> None:
    lm = tad.load("nano-llada", device="cpu")
    example = get_task("nano-math", size=1).examples("test")[0]
    with pytest.raises(TadError, match="no chat"):
        privileged_ids(lm, Bare(), example, "1 + 1 = 2")  # type: ignore[arg-type]
