"""Is it the same run? What decided one is compared field by field; and which process of a run this is.

The words of a refusal are the caller's, who knows what can be done about it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """The first field that differs, by its dotted name."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} is {self.before!r} there and {self.now!r} here"


def find_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    """Of nested values, field by field; a field that is missing is None."""
    mine, theirs = flatten(before), flatten(now)
    for field in mine | theirs:
        if mine.get(field) != theirs.get(field):
            return Difference(field, mine.get(field), theirs.get(field))
    return None


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def find_rank() -> tuple[int, int]:
    """Which process this is and of how many, as torchrun and accelerate say it; the only one without them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
