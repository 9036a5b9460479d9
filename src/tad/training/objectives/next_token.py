"""Next-token prediction: the autoregressive loss on the answer, of a model whose attention is token-causal.

Token-causal attention is block-causal attention in blocks of one position. Such a model is what block diffusion starts from
(Fast-dLLM v2 from Qwen2.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tad.errors import TadError
from tad.training.objectives.base import Batch, TextObjective, View
from tad.training.states import TrajectoryArrays


@dataclass(frozen=True)
class NextToken(TextObjective):
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
        counted = torch.arange(ids.shape[1]) >= prompts[:, None]
        if not self.filler:
            counted = counted & (ids != filler)
        return self.collate_rows(ids, ids, counted.float(), prompts)
