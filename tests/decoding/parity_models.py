"""The parity set's bidirectional models and their prompts."""

from __future__ import annotations

from functools import cache

from golden_lm import golden_lm as tiny
from golden_lm import golden_meta

__all__ = ["tiny", "tiny_prompts"]


@cache
def tiny_prompts(family: str) -> list[list[int]]:
    """Eight prompts of different lengths, cut from the parity set's."""
    longest = golden_meta(family)["prompts"]
    return [*longest, longest[2][3:], longest[3][5:30], longest[3][:17], longest[1][2:]]
