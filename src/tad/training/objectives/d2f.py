"""D2F: a block-causal student learns what the bidirectional base model says about the same noisy text.

Blocks get noisier from left to right: p_1 ~ U(least, most), p_{j+1} = p_j + U(0, 1) (most - p_1) / (blocks - 1), and each
token of block j is masked with probability p_j. The student sees the prompt, earlier blocks and its own.

    total = mean over masked tokens of CE(teacher's distribution, student) / p
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tad.config import Positive
from tad.errors import TadError
from tad.training.objectives.base import Batch, LossOutput, Objective, View, share, stats_of
from tad.training.objectives.module import ModelOutputs
from tad.training.states import TrajectoryArrays


@dataclass(frozen=True)
class D2F(Objective):
    """Defaults as published, for both families."""

    name: ClassVar[str] = "d2f"

    block: Positive = 16
    least: float = 0.2
    most: float = 0.7
    soft: bool = True
    """Labels: the teacher's distribution, or the text itself."""
    filler: bool = True
    """Whether the end filler after the answer counts, as it does as published."""

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most <= 1:
            raise TadError("objective.least and objective.most: 0 < least <= most <= 1")

    @property
    def term(self) -> str:
        return "soft" if self.soft else "hard"

    @property
    def needs_teacher(self) -> bool:
        return self.soft

    def ratios(self, length: int, rng: np.random.Generator) -> Tensor:
        """[length]: the probability of a mask at each position; constant in a block, never falling."""
        blocks = -(-length // self.block)
        first = rng.uniform(self.least, self.most)
        rises = rng.random(blocks - 1) * (self.most - first) / max(1, blocks - 1)
        by_block = first + np.concatenate(([0.0], np.cumsum(rises)))
        return torch.from_numpy(np.repeat(by_block, self.block)[:length])

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        ratios = self.ratios(len(row.tokens), rng)
        hidden = torch.from_numpy(rng.random(len(row.tokens))) < ratios
        counted = hidden if self.filler else hidden & ~row.filler
        return [
            View(
                row=row.id,
                prompt=row.plain_ids,
                noisy=row.tokens.masked_fill(hidden, self.mask_token),
                labels=row.tokens,
                terms={self.term: counted / ratios},
                teacher_prompt=row.plain_ids if self.soft else None,
                block=self.block,
            )
        ]

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(batch.terms[self.term]))}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        targets = batch.terms[self.term]
        rows = outputs.losses(targets, teacher=self.soft)
        values = rows.soft if self.soft else rows.cross_entropy
        loss = share((values * targets.weights).sum(), totals[self.term])
        return LossOutput(loss, {self.term: loss.detach()}, stats_of(self.term, rows))
