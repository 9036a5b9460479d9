"""Reveal rules: which of the candidates become tokens now.

A rule is a pure function of the proposals at the candidates; the loop adds the best of every group that must make
progress and got nothing. `score` says what "best" means. Positions are in increasing order, and ties go to the
lowest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tad.decoding.proposal import Proposal

Measure = Literal["confidence", "entropy", "margin"]


@dataclass
class Candidates:
    """The positions that may be revealed, gathered: [rows, m], padded where `valid` is False."""

    position: Tensor  # index into the generated part, increasing along m
    valid: Tensor
    must: Tensor  # group that must make progress, 0 for none
    spent: list[int]  # per row, forwards already spent in the current block
    lengths: list[int]  # per row, length of its own canvas: prompt and generated part
    generated: int  # length of the generated part


def first_best(score: Tensor, allowed: Tensor) -> Tensor:
    """[rows, m] one-hot at the first best allowed entry of each row (all False where none is allowed)."""
    score = score.masked_fill(~allowed, float("-inf"))
    top = allowed & (score == score.amax(1, keepdim=True))
    return top & (top.cumsum(1) == 1)


def force_progress(reveal: Tensor, score: Tensor, candidates: Candidates, groups: int) -> Tensor:
    """Add, for each group in `must` that reveals nothing, its first best candidate."""
    must = candidates.must * candidates.valid
    rows, width = must.shape
    empty = torch.full((rows, groups + 1), float("-inf"), device=score.device, dtype=score.dtype)
    best = empty.scatter_reduce(1, must, score, "amax")
    served = torch.zeros_like(empty).scatter_reduce(1, must, reveal.to(score.dtype), "amax") > 0
    top = (must > 0) & (score == best.gather(1, must)) & ~served.gather(1, must)
    index = torch.arange(width, device=must.device).expand(rows, width)
    first = torch.full((rows, groups + 1), width, device=must.device)
    first = first.scatter_reduce(1, must, torch.where(top, index, width), "amin")
    return reveal | (top & (index == first.gather(1, must)))


@dataclass(frozen=True)
class Best:
    """One token per forward: the surest."""

    score: Measure = "confidence"
    forced: ClassVar[bool] = True

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        return first_best(proposal.score(self.score), candidates.valid)


@dataclass(frozen=True)
class Quota:
    """A fixed number per forward, the surest first: LLaDA's even split, or Dream's timestep schedule.

    `steps` forwards in all, `None` for one per position. Dream's schedule with as many steps as positions reveals
    nothing at its first step and two at its last. `opened` = 1 where the forward that opens a block reveals exactly
    one token by itself (Fast-dLLM on Dream).
    """

    steps: int | None = None
    timesteps: bool = False
    score: Measure = "confidence"
    eps: float = 1e-3
    opened: int = 0
    per_block: tuple[int, int] = (1, 1)  # positions and steps of a block, filled in when a decoding starts
    forced: ClassVar[bool] = False

    @cached_property
    def counts(self) -> list[int]:
        """Tokens to reveal at each forward of a block."""
        size, steps = self.per_block
        if not self.timesteps:
            return [size // steps + (i < size % steps) for i in range(steps)]
        time = torch.linspace(1, self.eps, steps + 1)
        left, counts = size - self.opened, [1] * self.opened
        for i in range(self.opened, steps):
            last = i == steps - 1
            counts.append(left if last else int(torch.tensor(float(left)) * (1 - time[i + 1] / time[i])))
            left -= counts[-1]
        return counts

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        # Exact ties are common here (a filtered distribution often has one token left), and the public samplers break
        # them as `topk` over a row's own canvas does. So that is what is called, for all rows alike at once.
        score = proposal.score(self.score).masked_fill(~candidates.valid, float("-inf"))
        rows, reveal = len(candidates.spent), torch.zeros_like(candidates.valid)
        alike: dict[tuple[int, int], list[int]] = {}
        for row in range(rows):
            count = self.counts[min(candidates.spent[row], len(self.counts) - 1)]
            alike.setdefault((candidates.lengths[row], count), []).append(row)
        for (length, count), members in alike.items():
            offset = length - candidates.generated
            row_scores = torch.full((len(members), length), float("-inf"), device=score.device)
            row_scores.scatter_(1, candidates.position[members] + offset, score[members])
            chosen = torch.zeros_like(row_scores, dtype=torch.bool)
            chosen.scatter_(1, row_scores.topk(count, dim=1).indices, True)
            reveal[members] = chosen.gather(1, candidates.position[members] + offset)
        return reveal & candidates.valid


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Everything at least (or, if `strict`, more than) `threshold` sure; `keep_best` adds the best candidate of all."""

    threshold: float = 0.9
    strict: bool = False
    keep_best: bool = True
    score: ClassVar[Measure] = "confidence"
    forced: ClassVar[bool] = True

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        sure = proposal.confidence
        passing = sure > self.threshold if self.strict else sure >= self.threshold
        return _with_best(passing & candidates.valid, proposal.confidence, candidates, self.keep_best)


@dataclass(frozen=True)
class EntropyThreshold:
    """Everything of entropy below (or, unless `strict`, at most) `threshold` nats; `keep_best` as above."""

    threshold: float = 0.5
    strict: bool = True
    keep_best: bool = True
    score: ClassVar[Measure] = "entropy"
    forced: ClassVar[bool] = True

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        entropy = proposal.entropy
        passing = entropy < self.threshold if self.strict else entropy <= self.threshold
        return _with_best(passing & candidates.valid, -entropy, candidates, self.keep_best)


@dataclass(frozen=True)
class Factor:
    """Fast-dLLM's factor: the r-th surest is revealed while its confidence is at least 1 - factor / (r + 1)."""

    factor: float = 1.0
    score: ClassVar[Measure] = "confidence"
    forced: ClassVar[bool] = True

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        sure = proposal.confidence.masked_fill(~candidates.valid, float("-inf"))
        ordered, order = sure.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(1, sure.shape[1] + 1, device=sure.device)
        passing = (ordered >= 1 - self.factor / (rank + 1)) | (rank == 1)
        prefix = passing.long().cumprod(1).bool()
        return torch.zeros_like(prefix).scatter(1, order, prefix) & candidates.valid


@dataclass(frozen=True)
class Hierarchy:
    """dInfer's: all above `threshold`, the best of each run of adjacent masks above `low`, and the best of all."""

    threshold: float = 0.92
    low: float = 0.62
    score: ClassVar[Measure] = "confidence"
    forced: ClassVar[bool] = True

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        sure, valid, position = proposal.confidence, candidates.valid, candidates.position
        starts = torch.ones_like(valid)
        starts[:, 1:] = position[:, 1:] != position[:, :-1] + 1
        run = starts.long().cumsum(1)  # 1, 2, ... per row
        rows, width = run.shape
        best = torch.full((rows, width + 1), float("-inf"), device=sure.device)
        best = best.scatter_reduce(1, run, sure.masked_fill(~valid, float("-inf")), "amax")
        peak = sure == best.gather(1, run)
        passing = (sure > self.threshold) | (peak & (sure > self.low))
        return _with_best(passing & valid, sure, candidates, True)


@dataclass(frozen=True)
class Credit:
    """dInfer's: tokens that stay on top gather credit, which is added to their logits before the threshold.

    The loop keeps the credit ([rows, length, vocab]) and calls `accumulate` on every forward.
    """

    threshold: float = 0.9
    alpha: float = 0.7
    beta: float = 0.8
    gamma: float = 0.2
    score: ClassVar[Measure] = "confidence"
    forced: ClassVar[bool] = True

    def accumulate(self, credit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """New credit and fused logits, both [n, vocab], for n positions."""
        top, token = logits.softmax(-1).max(-1, keepdim=True)
        credit = (credit * self.beta).scatter_add(1, token, top**self.gamma)
        return credit, logits + self.alpha * torch.log1p(credit)

    def reveal(self, proposal: Proposal, candidates: Candidates) -> Tensor:
        passing = (proposal.confidence >= self.threshold) & candidates.valid
        return _with_best(passing, proposal.confidence, candidates, True)


Rule = Best | Quota | ConfidenceThreshold | EntropyThreshold | Factor | Hierarchy | Credit


def _with_best(reveal: Tensor, score: Tensor, candidates: Candidates, keep_best: bool) -> Tensor:
    return reveal | first_best(score, candidates.valid) if keep_best else reveal
