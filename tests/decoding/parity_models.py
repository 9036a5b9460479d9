"""The parity set's models, by the name of their folder in it, their prompts, and when two decodes are the same."""

from __future__ import annotations

from functools import cache

import pytest

from golden_lm import golden_lm as tiny
from golden_lm import golden_meta
from tad.decoding import Decoded

__all__ = ["assert_same", "tiny", "tiny_prompts"]


@cache
def tiny_prompts(family: str) -> list[list[int]]:
    """Five to eight prompts of different lengths: the parity set's, and where these are few, parts of them."""
    longest = golden_meta(family)["prompts"]
    if len(longest) > 4:
        return longest
    return [*longest, longest[2][3:], longest[3][5:30], longest[3][:17], longest[1][2:]]


def assert_same(found: list[Decoded], wanted: list[Decoded]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.steps == other.steps
        assert one.forwards == other.forwards
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)
