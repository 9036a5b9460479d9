"""Masked diffusion, the plain objective of pretraining and supervised fine-tuning, as published for LLaDA.

A ratio t ~ U(0, 1) per row, every answer token masked with that probability, cross-entropy of the masked ones over t. A share
of rows can instead be states of decoding block by block, which uniform masks almost never look like.

`views` takes the final text of a trajectory and nothing else of it; `noise_rows` takes whole rows of ids at once, which is
how pretraining makes its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tad.config import Positive, Share
from tad.training.objectives.base import LEAST_RATIO, Batch, TextObjective, View, mask_ratio
from tad.training.states import TrajectoryArrays


@dataclass(frozen=True)
class Sft(TextObjective):
    """total = mean over views of (1/answer length) sum_masked CE / max(ratio, floor)."""

    name: ClassVar[str] = "sft"

    floor: float = LEAST_RATIO
    """The default is the published loss, whose rare large weights drown the gradient of small batches; more tames them."""
    filler: bool = True
    """Whether the end filler after the answer counts. It is masked like the rest either way."""
    block_states: Share = 0.0
    """Share of rows masked as decoding leaves them: blocks before a random one whole, only masks after it."""
    block: Positive = 32
    block_causal: Positive | None = None
    """Block size of a block-causal student, behind the prompt; by default it has the model's own attention."""

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        answer, real = torch.ones(1, len(row.tokens), dtype=torch.bool), ~row.filler
        ratio = self._ratios(answer, real[None], generator)
        masked = torch.rand(len(row.tokens), generator=generator) < ratio[0]
        counted = torch.ones_like(real) if self.filler else real
        weights = masked * counted / (ratio[0].clamp(min=self.floor) * counted.sum().clamp(min=1))
        noisy = row.tokens.masked_fill(masked, self.mask_token)
        return [View(row.id, row.plain_ids, noisy, row.tokens, {"hard": weights}, block=self.block_causal)]

    def noise_rows(
        self,
        ids: Tensor,
        prompts: Tensor,
        filler: int,
        generator: torch.Generator,
        mine: slice = slice(None),
    ) -> Batch:
        """Rows under noise of their own; all of what follows the prompt is the answer.

        The ratios of a batch are one uniform draw spread evenly over (0, 1): each is uniform, together they cover the range.
        """
        answer = torch.arange(ids.shape[1]) >= prompts[:, None]
        ratio = self._ratios(answer, answer & (ids != filler), generator)
        masked = answer & (torch.rand(ids.shape, generator=generator) < ratio)
        ids, prompts, answer, ratio, masked = (part[mine] for part in (ids, prompts, answer, ratio, masked))
        weights = masked / (ratio.clamp(min=self.floor) * answer.sum(1, keepdim=True))
        noisy = ids.masked_fill(masked, self.mask_token)
        return self.collate_rows(ids, noisy, weights, prompts, self.block_causal)

    def _ratios(self, answer: Tensor, real: Tensor, generator: torch.Generator) -> Tensor:
        """The probability of a mask [rows, width]: a row's own, or in block states 0, the row's own, 1.

        `real` are the answer's positions that are not filler: blocks of filler alone are not visited.
        """
        rows = len(answer)
        t = (torch.rand(1, generator=generator) + torch.arange(rows) / rows) % 1
        ratio = mask_ratio(t)[:, None].expand(answer.shape)
        if not self.block_states:
            return ratio
        place = answer.long().cumsum(1) - 1  # within the answer
        last = torch.where(real, place, 0).amax(1, keepdim=True)
        draw = torch.rand(2, rows, 1, generator=generator)
        current = (draw[0] * (last // self.block + 1)).long()
        block = place.clamp(min=0) // self.block
        by_block = torch.where(block == current, ratio, (block > current).to(ratio.dtype))
        return torch.where(draw[1] < self.block_states, by_block, ratio)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"hard": float(len(batch))}
