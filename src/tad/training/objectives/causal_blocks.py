"""Masks behind a token-causal context: how an autoregressive model learns to fill a block, and to draft for itself.

The student sees blocks of a text with masks in them, and the text itself. The text is token-causal: there the model is the
autoregressive model it was (with a gated adapter, to the bit). A noisy block sees itself in both directions and the text
before it. Blocks begin at any position of the answer, since a draft begins wherever the last one ended, and are always
whole: behind the end of the answer stand masks, as in decoding.

    total = near + lambda * distant + next_token * next
    near     cross-entropy on the text, over masks within `window` of the beginning of their block
    distant  KL(model on the text || student) over the others: the distribution the autoregressive mode has at this place
    next     cross-entropy of the next token on the text; for models that are trained whole

Position p of a row predicts token p + 1. So the token behind the last mask of a block is learned, and the first token of a block
is not: the text before it predicts that.

The distant target comes from the same forward, since the text is in it. `window` is TAD's: a draft position k is near if k of its
predecessors can be expected to be kept. Trajectories are plain generations; the states of one are the prefixes at which blocks
begin, several in a row at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from tad.config import Positive
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
from tad.trajectories.partition import partition

_TERMS = ("near", "distant", "next")


@dataclass(frozen=True)
class CausalBlocks(Objective):
    """Defaults convert a model; `least: 1` and a `window` train a drafter."""

    name: ClassVar[str] = "causal-blocks"

    block: Positive | None = None
    """Positions of a block; by default the model's block size."""
    least: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The smallest share of masks in a block; shares are spread evenly from here to 1. 1: masks only, as in a draft."""
    window: Positive | Literal["all"] = "all"
    lambda_: Annotated[float, Field(ge=0)] = 1.0
    tau: PositiveFloat = 1.0
    """Temperature of the distributions behind the distant term."""
    next_token: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the next-token loss on the text: 0 where the model itself is frozen."""

    def __post_init__(self) -> None:
        if self.block is None or self.logit_shift != 1:
            raise TadError(
                f"objective '{self.name}' needs a converted autoregressive model; make one with `tad convert`"
            )

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        assert self.block is not None
        real = int(torch.where(row.filler, 0, torch.arange(len(row.tokens)) + 1).max())
        tokens = row.tokens[:real]
        start = int(rng.integers(min(self.block, max(1, real - 1))))  # of the first block, in the answer
        blocks = -(-(real - start) // self.block)
        place = torch.arange(blocks * self.block)
        ratio = self.least + (1 - self.least) * ((rng.random() + np.arange(blocks) / blocks) % 1)
        masked = torch.from_numpy(rng.random(len(place)) < np.repeat(rng.permutation(ratio), self.block))
        by_block = masked.view(blocks, self.block)
        one = torch.arange(self.block) == torch.from_numpy(rng.integers(self.block, size=(blocks, 1)))
        masked = torch.where(by_block.any(1, keepdim=True), by_block, one).flatten()
        masked = masked | (place + start >= real)
        padded = torch.cat((tokens, torch.full((len(place) + start + 1 - real,), self.mask_token)))
        noisy = padded[start:-1].masked_fill(masked, self.mask_token)
        return [
            View(
                row=row.id,
                prompt=row.plain_ids,
                noisy=noisy,
                labels=tokens,
                terms=self._weigh(masked, start, real),
                clean=True,
                start=start,
            )
        ]

    def _weigh(self, masked: Tensor, start: int, real: int) -> dict[str, Tensor]:
        """Weights of the terms at the answer's tokens [real]; a token counts for the position before it."""
        assert self.block is not None
        place = torch.arange(len(masked))  # of the position that predicts
        behind = place % self.block + 1  # how many tokens of the block the predicted one stands behind
        following = torch.cat((masked[1:], torch.zeros(1, dtype=torch.bool)))
        counted = torch.where(behind == self.block, masked, following)
        token = start + place + 1
        window = self.block if self.window == "all" else self.window
        near, distant = partition(behind, 0, window)
        found = {"next": torch.full((real,), float(self.next_token > 0))}
        for name, part in (("near", near), ("distant", distant)):
            found[name] = torch.zeros(real)
            chosen = part & counted & (token < real)
            found[name][token[chosen]] = 1.0
        return found

    def collate(self, views: Sequence[View]) -> Batch:
        """Rows of blocks and text. A block's index for the attention is the position of its first token; the text's are its
        positions."""
        assert self.block is not None
        rows = []
        for view in views:
            if not len(view.prompt):
                raise TadError(
                    f"trajectory {view.row}: its prompt is empty, but the output before the answer predicts its first token"
                )
            first = len(view.prompt) + view.start  # position of the first block
            noisy = first + torch.arange(len(view.noisy))
            text = torch.arange(len(view.prompt) + len(view.labels))
            begun = first + torch.arange(len(view.noisy)) // self.block * self.block
            ids = torch.cat((view.noisy, view.prompt, view.labels))
            rows.append((ids, torch.cat((noisy, text)), torch.cat((begun, text))))
        lengths = torch.tensor([len(ids) for ids, _, _ in rows])
        width = int(lengths.max())
        filled = [torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3)]
        filled[0] += self.mask_token
        for index, row in enumerate(rows):
            for whole, part in zip(filled, row, strict=True):
                whole[index, : len(part)] = part
        ids, positions, blocks = filled
        student = PaddedIds(
            ids,
            lengths,
            bool((lengths < width).any()),
            int(lengths.sum()),
            torch.tensor([len(view.prompt) for view in views]),
            clean_start=torch.tensor([len(view.noisy) for view in views]),
            positions=positions,
            blocks=blocks,
        )
        terms = {name: _targets(name, views, width) for name in _TERMS}
        return Batch(student, None, terms, tuple(view.row for view in views))

    def counts(self, batch: Batch) -> dict[str, float]:
        return {name: float(len(batch.terms[name])) for name in _TERMS}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        """The teacher is the model on the text; no gradient goes through what it says."""
        outputs = replace(outputs, teacher_hidden=outputs.hidden.detach())
        near = outputs.losses(batch.terms["near"])
        distant = outputs.losses(batch.terms["distant"], teacher=True, tau=self.tau)
        assert distant.kl is not None
        terms = {
            "near": share(near.cross_entropy.sum(), totals["near"]),
            "distant": share(distant.kl.sum(), totals["distant"]),
        }
        stats = {**stats_of("near", near), **stats_of("distant", distant)}
        loss = terms["near"] + self.lambda_ * terms["distant"]
        if self.next_token:
            text = outputs.losses(batch.terms["next"])
            terms["next"] = share(text.cross_entropy.sum(), totals["next"])
            loss = loss + self.next_token * terms["next"]
        return LossOutput(loss, {name: value.detach() for name, value in terms.items()}, stats)


def _targets(name: str, views: Sequence[View], width: int) -> TermTargets:
    """Where a term's tokens are predicted: in the blocks, or in the text for `next`. The teacher always looks at the text."""
    student, teacher, labels, rows = [], [], [], []
    for number, view in enumerate(views):
        token = view.terms[name].nonzero()[:, 0]
        text = len(view.noisy) + len(view.prompt) + token - 1
        block = token - 1 - view.start
        student.append(number * width + (text if name == "next" else block))
        teacher.append(number * width + text)
        labels.append(view.labels[token])
        rows.append(torch.full_like(token, number))
    index, view_of = torch.cat(student), torch.cat(rows)
    return TermTargets(
        index, torch.cat(teacher), torch.cat(labels), torch.ones(len(index)), view_of, len(views)
    )
