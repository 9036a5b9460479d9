"""Next-token prediction: the autoregressive loss on the answer, of a model whose attention is token-causal.

Token-causal attention is block-causal attention in blocks of one position. Such a model is what block diffusion starts from
(Fast-dLLM v2 from Qwen2.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tad.errors import TadError
from tad.training.objectives.base import (
    Batch,
    LossOutput,
    Objective,
    PaddedIds,
    TermTargets,
    View,
    share,
    stats_of,
)
from tad.training.objectives.module import ModelOutputs
from tad.training.states import TrajectoryArrays


@dataclass(frozen=True)
class NextToken(Objective):
    """total = mean over answer tokens of CE."""

    name: ClassVar[str] = "next-token"

    filler: bool = False
    """Whether the end filler behind the answer counts."""

    def __post_init__(self) -> None:
        if self.logit_shift != 1:
            raise TadError(
                f"objective '{self.name}' needs a family whose output i predicts token i + 1, such as fast-dllm-v2"
            )

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        counted = torch.ones(len(row.tokens)) if self.filler else (~row.filler).float()
        return [View(row.id, row.plain_ids, row.tokens, row.tokens, {"hard": counted})]

    def noise_rows(
        self,
        ids: Tensor,
        prompts: Tensor,
        filler: int,
        generator: torch.Generator,
        mine: slice = slice(None),
    ) -> Batch:
        """The rows as they are: there is no noise in this objective."""
        ids, prompts = ids[mine], prompts[mine]
        rows, width = ids.shape
        counted = torch.arange(width) >= prompts[:, None]
        if not self.filler:
            counted = counted & (ids != filler)
        view, at = counted.nonzero(as_tuple=True)
        targets = TermTargets(
            student_index=view * width + at - self.logit_shift,
            teacher_index=None,
            labels=ids[counted],
            weights=torch.ones(len(view)),
            view=view,
            views=rows,
        )
        padded = PaddedIds(ids, torch.full((rows,), width), False, ids.numel(), prompts)
        return Batch(padded, None, {"hard": targets})

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"hard": float(len(batch.terms["hard"]))}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        rows = outputs.losses(batch.terms["hard"])
        hard = share(rows.cross_entropy.sum(), totals["hard"])
        return LossOutput(hard, {"hard": hard.detach()}, stats_of("hard", rows))
