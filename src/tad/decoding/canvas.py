"""The canvas: prompts of different lengths, padded on the left so that the generated parts share their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tad.models import SpecialTokens


def left_pad(
    prompts: Sequence[Sequence[int]], length: int, tokens: SpecialTokens, prompt_len: int | None = None
) -> tuple[Tensor, Tensor]:
    """ids [rows, prompt_len + length], masks behind the prompts, and the positions of padding of each row [rows].

    `prompt_len` is the room for the prompts, the longest one's length by default. On the CPU.
    """
    prompt_len = max(len(prompt) for prompt in prompts) if prompt_len is None else prompt_len
    canvas = torch.full((len(prompts), prompt_len + length), tokens.mask, dtype=torch.int64)
    canvas[:, :prompt_len] = tokens.pad
    for row, prompt in enumerate(prompts):
        canvas[row, prompt_len - len(prompt) : prompt_len] = torch.tensor(list(prompt), dtype=torch.int64)
    return canvas, torch.tensor([prompt_len - len(prompt) for prompt in prompts], dtype=torch.int64)
