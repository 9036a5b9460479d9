"""The canvas: prompts of different lengths, padded on the left so that the generated part shares its columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tad.models import SpecialTokens


def lay_out(
    prompts: Sequence[Sequence[int]], length: int, tokens: SpecialTokens, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """ids [rows, width + length], masks behind the prompts, and the columns of padding of each row [rows].

    `width` is the room for the prompts, the longest one's length by default. On the CPU.
    """
    width = max(len(prompt) for prompt in prompts) if width is None else width
    canvas = torch.full((len(prompts), width + length), tokens.mask, dtype=torch.int64)
    canvas[:, :width] = tokens.pad
    for row, prompt in enumerate(prompts):
        canvas[row, width - len(prompt) : width] = torch.tensor(list(prompt), dtype=torch.int64)
    return canvas, torch.tensor([width - len(prompt) for prompt in prompts], dtype=torch.int64)
