"""States of a trajectory and their near and distant masks, from reveal steps alone; and the first unfinished block.

A trajectory reveals position i at step r_i = 1, 2, ... In state s (s = 0 is all masks) a position is masked iff
r_i > s. Seen from state s with a window, a masked position is *near* if it is revealed within the next `window`
steps and *distant* otherwise; a window that reaches beyond the last step makes every mask near. These are the
paper's equations with b_s = (r > s).
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(reveal: Tensor, step: int | Tensor) -> Tensor:
    """Which positions are masks in state `step`. reveal [..., length]; step a number or [..., 1]."""
    return reveal > step


def partition(reveal: Tensor, step: int | Tensor, window: int | Tensor) -> tuple[Tensor, Tensor]:
    """near and distant, both [..., length] bool: disjoint, and together the masks of state `step`."""
    near = (reveal > step) & (reveal <= step + window)
    distant = reveal > step + window
    return near, distant


def unfinished_block(hidden: Tensor, start: int, size: int) -> Tensor:
    """[length] bool: the positions in the first unfinished block, that of the first mask. The answer begins at position `start`
    of a grid of blocks.

    What a block-causal model that is decoded block by block predicts next; later blocks would stand behind unfinished ones.
    """
    block = (torch.arange(len(hidden)) + start) // size
    first = hidden.nonzero()[:1, 0]
    return block == block[first] if len(first) else torch.zeros_like(hidden)


def state(tokens: Tensor, reveal: Tensor, step: int | Tensor, mask_token: int) -> Tensor:
    """The canvas in state `step`: the trajectory's token where it is revealed, else the mask token."""
    return torch.where(masked(reveal, step), mask_token, tokens)
