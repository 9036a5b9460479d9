"""Tokens per forward, by both definitions, over one row or many. Token counts and forwards only; no text.

A row's *content* is what was generated up to and including its first end token; *all* its positions include the filler
behind that. Over a set of rows, tokens per forward is the sum of tokens over the sum of forwards: the mean of the rows'
ratios would let short answers count as much as long ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Counted(Protocol):
    """Anything with counts: a row of a run."""

    @property
    def tokens(self) -> int: ...  # content

    @property
    def tokens_all(self) -> int: ...

    @property
    def forwards(self) -> int: ...


@dataclass(frozen=True)
class Count:
    """Sums over rows, and what is needed for the standard error of their ratio."""

    rows: int = 0
    tokens: int = 0
    tokens_all: int = 0
    forwards: int = 0
    squares: tuple[int, int, int] = (0, 0, 0)  # sums of tokens^2, tokens * forwards, forwards^2

    @classmethod
    def of(cls, rows: Iterable[Counted]) -> Count:
        return sum((cls.of_row(row) for row in rows), cls())

    @classmethod
    def of_row(cls, row: Counted) -> Count:
        squares = (row.tokens**2, row.tokens * row.forwards, row.forwards**2)
        return cls(1, row.tokens, row.tokens_all, row.forwards, squares)

    def __add__(self, other: Count) -> Count:
        one, two = self.squares, other.squares
        return Count(
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.tokens_all + other.tokens_all,
            self.forwards + other.forwards,
            (one[0] + two[0], one[1] + two[1], one[2] + two[2]),
        )

    @property
    def tpf(self) -> float:
        """Content tokens per forward."""
        return self.tokens / self.forwards if self.forwards else math.nan

    @property
    def tpf_all(self) -> float:
        """All generated positions per forward."""
        return self.tokens_all / self.forwards if self.forwards else math.nan

    @property
    def tpf_error(self) -> float:
        """Standard error of `tpf` as the ratio of two sums over independent rows (the delta method)."""
        if self.rows < 2 or not self.forwards:
            return math.nan
        ratio = self.tpf
        residuals = self.squares[0] - 2 * ratio * self.squares[1] + ratio**2 * self.squares[2]
        return math.sqrt(max(0.0, residuals) * self.rows / (self.rows - 1)) / self.forwards
