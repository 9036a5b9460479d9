"""The parity set's models, by the name of their folder in it, and their prompts."""

from __future__ import annotations

from functools import cache

from golden_lm import golden_lm as tiny
from golden_lm import golden_meta

__all__ = ["tiny", "tiny_prompts"]


@cache
def tiny_prompts(family: str) -> list[list[int]]:
    """Five to eight prompts of different lengths: the parity set's, and where these are few, parts of them."""
    longest = golden_meta(family)["prompts"]
    if len(longest) > 4:
        return longest
    return [*longest, longest[2][3:], longest[3][5:30], longest[3][:17], longest[1][2:]]
