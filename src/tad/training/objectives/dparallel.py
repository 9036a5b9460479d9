"""dParallel's certainty forcing: learn the tokens, and become sure of those that are already right.

A window of the answer is masked at random; what stands after it is masked whole, what stands before is clean. A second view
masks the rest of the window instead (the complement), so that every token of the window is predicted once.

    total = [ CE(mask) + CE(complement) + entropy_weight * (H(mask) + H(complement)) ] / divide_by

H is the entropy at a low temperature, averaged over the masked positions whose most likely token is the label. How many
those are is the model's word: it is averaged inside a view, and views are averaged, so that splits of a batch agree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor

from tad.config import Positive, Share
from tad.training.objectives.base import (
    Batch,
    LossOutput,
    Objective,
    View,
    mask_ratio,
    mean_by_view,
    share,
    stats_of,
)
from tad.training.objectives.module import ModelOutputs
from tad.training.states import TrajectoryArrays


@dataclass(frozen=True)
class CertaintyForcing(Objective):
    """What dParallel and d3LLM share: everything but which positions of the answer are masked."""

    entropy_weight: float = 2.0
    """The weight of the entropies."""
    temperature: PositiveFloat = 0.5
    """Of the entropies."""
    complement: bool = True
    """Whether the complement is seen too."""
    complement_entropy: bool = True
    """Whether the complement has an entropy term."""
    divide_by: PositiveFloat = 1.0
    hard_average: Literal["view", "token"] = "view"
    """Cross-entropies: the mean of each view's own mean, or of all tokens of the global batch."""
    entropy_average: Literal["view", "batch"] = "view"
    """Entropies: of each view, or of the right tokens of a micro-batch together, which depends on how a batch is split."""
    filler: bool = True
    """Whether the end filler after the answer counts, as it does as published. Block-diffusion models have none."""
    block_causal: Positive | None = None
    """Block size of a block-causal student, behind the prompt; by default it has the model's own attention."""

    @abstractmethod
    def pattern(
        self, row: TrajectoryArrays, rng: np.random.Generator, progress: float
    ) -> tuple[int, int, Tensor]:
        """Start and end of the window in the answer, and which of the answer's positions [length] are masked in it."""

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        start, end, hidden = self.pattern(row, rng, progress)
        position = torch.arange(len(row.tokens))
        window, after = (position >= start) & (position < end), position >= end
        counted = torch.ones_like(window) if self.filler and self.model_block is None else ~row.filler
        sets = {"hard": window & hidden, "hard_complement": window & ~hidden}
        found = []
        for name, chosen in sets.items():
            if name == "hard" or self.complement:
                current, fed = self.limit_to_block(chosen | after, (row.plain_ids,), self.block_causal)
                found.append(
                    View(
                        row=row.id,
                        prompt=row.plain_ids,
                        noisy=row.tokens.masked_fill(chosen | after, self.mask_token)[:fed],
                        labels=row.tokens[:fed],
                        terms={name: (chosen & counted & current)[:fed].float()},
                        block=self.block_causal,
                    )
                )
        return found

    def counts(self, batch: Batch) -> dict[str, float]:
        tokens = {name: float(len(targets)) for name, targets in batch.terms.items()}
        views = {f"{name}/views": float(targets.views) for name, targets in batch.terms.items()}
        return {**tokens, **views}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        terms: dict[str, Tensor] = {}
        stats: dict[str, Tensor] = {}
        for name, targets in batch.terms.items():
            forced = name == "hard" or self.complement_entropy
            rows = outputs.losses(targets, temperature=self.temperature if forced else None)
            if self.hard_average == "token":
                terms[name] = share(rows.cross_entropy.sum(), totals[name])
            else:
                means = mean_by_view(
                    rows.cross_entropy, targets, torch.ones_like(rows.confidence), len(batch)
                )
                terms[name] = share(means.sum(), totals[f"{name}/views"])
            if rows.scaled_entropy is not None:
                if self.entropy_average == "batch":
                    entropy = (
                        targets.views
                        * (rows.scaled_entropy * rows.right).sum()
                        / rows.right.sum().clamp(min=1)
                    )
                else:
                    entropy = mean_by_view(rows.scaled_entropy, targets, rows.right, len(batch)).sum()
                terms[name.replace("hard", "entropy")] = share(entropy, totals[f"{name}/views"])
            stats.update(stats_of(name, rows))
        zero = torch.zeros(())
        hard = sum((value for name, value in terms.items() if name.startswith("hard")), zero)
        sure = sum((value for name, value in terms.items() if name.startswith("entropy")), zero)
        total = (hard + self.entropy_weight * sure) / self.divide_by
        return LossOutput(total, {name: value.detach() for name, value in terms.items()}, stats)


@dataclass(frozen=True)
class DParallel(CertaintyForcing):
    """Defaults are LLaDA's; on Dream the window is the whole answer."""

    name: ClassVar[str] = "dparallel"
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llada": {"block": 32, "entropy_weight": 2.0},
        "dream": {"block": "all", "entropy_weight": 1.0},
    }

    block: Positive | Literal["all"] = 32
    """Length of the window; the last one runs to the end of the answer."""
    ratio: Share = 0.5
    """Share of the window that is masked."""

    def pattern(
        self, row: TrajectoryArrays, rng: np.random.Generator, progress: float
    ) -> tuple[int, int, Tensor]:
        length = len(row.tokens)
        start, end = draw_window(length, length if self.block == "all" else self.block, rng)
        return start, end, torch.from_numpy(rng.random(length) < mask_ratio(self.ratio))


def draw_window(length: int, size: int, rng: np.random.Generator) -> tuple[int, int]:
    """One of the windows of `size` that a text has, each as likely; what does not fill one belongs to the last."""
    windows = max(1, length // size)
    index = int(rng.integers(windows))
    return index * size, length if index == windows - 1 else (index + 1) * size
