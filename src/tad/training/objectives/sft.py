"""Supervised fine-tuning: pretraining's masked diffusion (`tad.training.objective`) as one of the objectives here.

The text is the row's: a reference answer, or what a trajectory ended in. Nothing else of a trajectory is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from tad.training.objective import LEAST_RATIO, mask_answers
from tad.training.objectives.base import Batch, Evidence, Objective, Parts, Row, View, share, stats_of


@dataclass(frozen=True)
class Sft(Objective):
    """total = mean over views of (1/answer length) sum_masked CE / ratio."""

    name: ClassVar[str] = "sft"

    floor: float = LEAST_RATIO
    """Masked tokens weigh 1 / max(ratio, floor)."""
    filler: bool = True
    """Whether the end filler after the answer counts. It is masked like the rest either way."""

    def views(
        self, row: Row, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        noisy, weight = mask_answers(
            row.tokens[None], torch.zeros(1, dtype=torch.long), self.mask_token, generator, self.floor
        )
        weights = weight[0]
        if not self.filler:
            real = ~row.filler
            weights = weights * real * (len(real) / max(1, int(real.sum())))
        return [View(row.id, row.plain_ids, noisy[0], row.tokens, {"hard": weights})]

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"views": float(len(batch))}

    def loss(self, evidence: Evidence, batch: Batch, totals: Mapping[str, float]) -> Parts:
        group = batch.groups["hard"]
        rows = evidence.rows(group)
        hard = share((rows.cross_entropy * group.weights).sum(), totals["views"])
        return Parts(hard, {"hard": hard.detach()}, stats_of("hard", rows))
