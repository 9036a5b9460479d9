"""What the three nano families share: a problem, its split, and generation from an index.

A family draws a *plan* (the numbers and operations, without any words), and writes it as question, reference and
solution. The hash of the plan's key decides the split, so two problems with the same content can never be in different
splits, however they are worded. This module knows no prompt, no tokenizer and no grader.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

SPLITS = ("train", "validation", "test")
# Of 100 hash buckets: the first ones are the test split, the next ones validation, the rest training.
_TEST, _VALIDATION = 6, 10

P = TypeVar("P")


@dataclass(frozen=True)
class Problem:
    """One problem in words. `solution` is the verbose text a model learns to write, `reference` the terse one."""

    kind: str
    level: int
    key: str  # the content without the wording
    question: str
    reference: str
    solution: str
    answer: Any


@dataclass(frozen=True)
class NanoFamily(Generic[P]):
    """A family: `draw` makes a plan, `key` names its content, `write` words it."""

    name: str
    draw: Callable[[random.Random], P]
    key: Callable[[P], str]
    write: Callable[[P, random.Random], Problem]

    def problem(self, split: str, index: int, seed: int = 0) -> Problem:
        """The problem at an index of a split: the same on every machine and in every process."""
        rng = random.Random(f"{self.name}/{split}/{seed}/{index}")
        while True:
            plan = self.draw(rng)
            if split_of(self.key(plan)) == split:
                return self.write(plan, rng)


def split_of(key: str) -> str:
    """The split in which a problem with this content lives."""
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if bucket < _TEST:
        return "test"
    return "validation" if bucket < _VALIDATION else "train"
