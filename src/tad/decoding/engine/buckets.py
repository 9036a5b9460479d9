"""Sizes that steps are rounded up to, so that a few shapes serve every prompt, batch and window.

Each shape of a step is captured once. The sizes grow geometrically: their number is the logarithm of the largest, and
what rounding adds is bounded. What a size counts decides how fine its steps are: tokens cost time from two hundred
on, where the arithmetic takes longer than reading the weights; below, and elsewhere, coarse steps are free or nearly so.
"""

from __future__ import annotations

from dataclasses import dataclass

_FINE_FROM = 128
_FEW = 64  # positions of a row that attention takes for few


def doubled(count: int, least: int) -> int:
    """The first of least, 2 least, 4 least, ... that holds `count`."""
    size = least
    while size < count:
        size *= 2
    return size


def stepped(count: int, least: int) -> int:
    """The first of least, 1.5 least, 2 least, 3 least, 4 least, ... that holds `count`."""
    size = doubled(count, least)
    lower = 3 * size // 4
    return lower if lower >= max(count, least) else size


def token_bucket(count: int) -> int:
    """Tokens computed by a step, over all rows."""
    if count <= _FINE_FROM:
        return stepped(count, 32)
    unit = doubled(count, 2 * _FINE_FROM) // 8  # five to eight eighths of a power of two
    return -(-count // unit) * unit


def prompt_bucket(count: int) -> int:
    """KV positions for prompts; padding costs attention and memory, but is never computed."""
    return stepped(count, 64)


def slot_bucket(count: int) -> int:
    """Rows that are decoded side by side."""
    return count if count <= 4 else stepped(count, 4)


@dataclass(frozen=True)
class StepShape:
    """The sizes of one step. Candidates are padded per row for decisions, and packed for the head."""

    tokens: int  # computed, over all rows
    window: int  # the widest row's
    candidates: int  # over all rows
    widest: int  # the row's with most candidates

    @classmethod
    def holding(
        cls, queries: list[int], candidates: list[int], slots: int, kv_len: int, length: int, masked: bool
    ) -> StepShape:
        """For rows that compute and may reveal these numbers of positions. With one slot nothing is packed or padded.

        Rows of different lengths (`masked`) come in every combination: the widest is then taken to be one of two sizes, or all
        there is. Our own attention, which serves them, spends nothing on the difference, and decisions next to nothing.
        """
        tokens, widest = token_bucket(sum(queries)), min(doubled(max(candidates), 32), length)
        if slots == 1:
            return cls(tokens, tokens, widest, widest)
        window, packed = min(doubled(max(queries), _FEW), kv_len), doubled(sum(candidates), 32)
        if masked:
            return cls(tokens, window if window == _FEW else kv_len, packed, length)
        return cls(tokens, window, packed, widest)
