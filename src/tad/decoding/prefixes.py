"""Prefix sharing: a row whose text begins as another one's takes over the keys and values of the blocks they have in common.

Exact where attention is block-causal on a grid that begins with the row's first token: the keys of a finished block depend on the
tokens up to its end and on nothing else. A forward remembers the text in each of its slots, also when the row has left; so
system prompts, few-shot examples and the earlier turns of a chat are computed once, while some slot remembers them. At
least one block of a prompt is computed all the same, so that a row has the forwards it would have alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST = 64  # positions that are worth copying


class Held(NamedTuple):
    """The text in a slot whose keys and values are final."""

    start: int  # its first KV position
    text: list[int]


def find_prefix(prompt: Sequence[int], held: Mapping[int, Held], block: int) -> tuple[int, int]:
    """The slot that holds most of a prompt's beginning, and how many positions of it, in whole blocks."""
    found = (-1, 0)
    for slot, (_, text) in held.items():
        end, count = min((len(prompt) // block - 1) * block, len(text) // block * block), 0
        while count < end and [*prompt[count : count + block]] == text[count : count + block]:
            count += block
        found = max(found, (slot, count), key=lambda one: one[1])
    return found if found[1] >= LEAST else (-1, 0)


def final_text(prompt: Sequence[int], generated: Sequence[int], created: int, block: int) -> list[int]:
    """What is final of a row that has had a forward with `created` blocks: all but the last one."""
    text = [*prompt, *generated]
    return text[: (len(prompt) // block + created - 1) * block]
