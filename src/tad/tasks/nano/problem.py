"""What the three nano families share: a problem, its split, and generation from an index.

A family draws a *plan* (the numbers and operations, without any words), and writes it as question, reference and
solution. The hash of the plan's content decides the split, so two problems with the same content can never be in different
splits, however they are worded. What the content is, the family says: the plan itself, or what a program computes. This
module knows no prompt, no tokenizer and no grader.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

SPLITS = ("train", "validation", "test")
# Of 100 hash buckets: the first ones are the test split, the next ones validation, the rest training.
_TEST, _VALIDATION = 6, 10


class Plan(Protocol):
    """The numbers and operations of a problem."""

    @property
    def level(self) -> int: ...


P = TypeVar("P", bound=Plan)


@dataclass(frozen=True)
class Problem:
    """One problem in words. `solution` is the verbose text a model learns to write, `reference` the terse one."""

    kind: str
    level: int
    key: str  # the plan without the wording
    content: str  # what two problems share if one gives the other away; it decides the split
    question: str
    reference: str
    solution: str
    answer: Any


@dataclass(frozen=True)
class NanoFamily(Generic[P]):
    """A family: `draw` makes a plan, `content` says what must not be in two splits, `write` words it.

    `edition` counts how often the family's problems were drawn anew: an index has another problem in every edition.
    `mix`: the levels of the problems at indices 0, 1, ..., in turn; without it they are as drawn. A family with few
    distinct problems at some level needs one: else a small sample has more of them than a large one.
    """

    name: str
    draw: Callable[[random.Random], P]
    content: Callable[[P], str]
    write: Callable[[P, random.Random], Problem]
    edition: int = 1
    mix: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """The name, with the edition behind the first: what the ids of problems begin with."""
        return self.name if self.edition == 1 else f"{self.name}.{self.edition}"

    def problem(self, split: str, index: int, seed: int = 0) -> Problem:
        """The problem at an index of a split: the same on every machine and in every process."""
        rng = random.Random(f"{self.label}/{split}/{seed}/{index}")
        level = self.mix[index % len(self.mix)] if self.mix else None
        while True:
            plan = self.draw(rng)
            if level in (None, plan.level) and split_of(self.content(plan)) == split:
                return self.write(plan, rng)


def split_of(key: str) -> str:
    """The split in which a problem with this content lives."""
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if bucket < _TEST:
        return "test"
    return "validation" if bucket < _VALIDATION else "train"
