"""Block diffusion as published for Fast-dLLM v2, SDAR and LLaDA2: the text, from noisy blocks after clean ones.

The student sees a row twice in one forward, noisy and clean: a noisy block sees itself and the clean blocks before it, as
in decoding, so all blocks of a row are trained at once. Only the noisy copy is scored. The three differ in how noise is
drawn, in the weight of a token, in the average, and in what becomes of the end filler behind an answer.

Rows are single samples. The public trainers also pack or concatenate samples; packed samples that do not see each other
(SDAR) have this loss, concatenated ones that do (Fast-dLLM v2) are not made here.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from tad.config import Positive
from tad.errors import TadError
from tad.training.objectives.base import Batch, TextObjective, View, mask_ratio
from tad.training.states import TrajectoryArrays

_TRIES = 10


@dataclass(frozen=True)
class BlockDiffusion(TextObjective):
    """What the three share."""

    block: Positive | None = None
    """The block size, on a grid that starts with the prompt; by default the model's own."""
    filler: bool | Literal["block"] = "block"
    """Whether the end filler behind the answer counts; `block`: that of the answer's last block. What does not count is a mask."""

    def __post_init__(self) -> None:
        if self.block is None:
            raise TadError(
                f"objective '{self.name}': the model's attention is not block-causal; set objective.block"
            )

    @abstractmethod
    def noise(self, positions: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Of answer tokens at `positions` [length] of their row: which are masked [length], and with which weights."""

    @property
    def complement(self) -> bool:
        """Whether a second copy masks the tokens that the first one shows."""
        return False

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        assert self.block is not None
        start, tokens = len(row.plain_ids), row.tokens
        real = int(torch.where(row.filler, 0, torch.arange(len(tokens)) + 1).max())  # answer without filler
        if self.filler is not True:
            # Nothing before a block depends on it: the blocks of filler alone are left out.
            tokens = tokens[: -(-(start + max(real, 1)) // self.block) * self.block - start]
        counted = torch.arange(len(tokens)) < (len(tokens) if self.filler else real)
        masked, weights = self.noise(start + torch.arange(len(tokens)), rng)
        copies = [masked, ~masked] if self.complement else [masked]
        return [
            View(
                row=row.id,
                prompt=row.plain_ids,
                noisy=tokens.masked_fill(chosen | ~counted, self.mask_token),
                labels=tokens,
                terms={"hard": (chosen & counted) * weights},
                block=self.block,
                clean=True,
                answer_tokens=int(counted.sum()) if number == 0 else 0,
            )
            for number, chosen in enumerate(copies)
        ]


@dataclass(frozen=True)
class FastDLLMv2(BlockDiffusion):
    """total = mean over answer tokens of CE. One ratio ~ U(0, 1) per block; the second copy has the complement of the masks."""

    name: ClassVar[str] = "fast-dllm-v2"

    filler: bool | Literal["block"] = False

    @property
    def complement(self) -> bool:
        return True

    def noise(self, positions: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        assert self.block is not None
        blocks = positions // self.block - int(positions[0]) // self.block
        ratios = mask_ratio(rng.random(int(blocks[-1]) + 1))
        masked = torch.from_numpy(rng.random(len(positions))) < torch.from_numpy(ratios)[blocks]
        return masked, torch.ones(len(positions))

    def noise_rows(
        self,
        ids: Tensor,
        prompts: Tensor,
        filler: int,
        generator: torch.Generator,
        mine: slice = slice(None),
    ) -> Batch:
        """The views of all rows at once: the masked copies, then their complements."""
        assert self.block is not None
        rows, width = ids.shape
        place = torch.arange(width)
        blocks = place // self.block
        t = torch.rand(rows, int(blocks[-1]) + 1, generator=generator)
        ratio = mask_ratio(t)[:, blocks]
        masked = torch.rand(ids.shape, generator=generator) < ratio
        answer = place >= prompts[:, None]
        last = torch.where(answer & (ids != filler), place, 0).amax(1, keepdim=True)  # that is not filler
        end = {False: last + 1, "block": (last // self.block + 1) * self.block}.get(self.filler, width)
        counted = answer & (place < end)
        masked, answer, counted, clean = (part[mine].repeat(2, 1) for part in (masked, answer, counted, ids))
        masked[len(masked) // 2 :] ^= True
        chosen = masked & counted
        noisy = clean.masked_fill(chosen | (answer & ~counted), self.mask_token)
        return self.collate_rows(
            clean, noisy, chosen.float(), prompts[mine].repeat(2), self.block, clean=True
        )


@dataclass(frozen=True)
class Sdar(BlockDiffusion):
    """total = sum of CE / ratio over masked tokens, over the number of answer tokens. One ratio ~ U(0, 1) per row."""

    name: ClassVar[str] = "sdar"

    def noise(self, positions: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        for _ in range(_TRIES):
            ratio = mask_ratio(rng.random())
            masked = torch.from_numpy(rng.random(len(positions))) < ratio
            if masked.any():
                break
        else:
            masked[int(rng.integers(len(positions)))] = True
        return masked, torch.full((len(positions),), 1 / ratio)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"hard": float(batch.answer_tokens)}


@dataclass(frozen=True)
class LLaDA2(BlockDiffusion):
    """total = mean over masked tokens of CE. One ratio ~ U(least, most) per row."""

    name: ClassVar[str] = "llada2"

    filler: bool | Literal["block"] = True
    least: float = 0.3
    most: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= self.most <= 1:
            raise TadError("objective.least and objective.most: 0 < least <= most <= 1")

    def noise(self, positions: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        masked = torch.from_numpy(rng.random(len(positions))) < rng.uniform(self.least, self.most)
        return masked, torch.ones(len(positions))
