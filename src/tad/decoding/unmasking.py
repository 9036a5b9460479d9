"""Unmasking strategies: which of the candidates become tokens now.

A strategy is a pure function of the samples at the candidates; the step adds the best of every group that has to make
progress and got nothing. `score` says what "best" means. Positions are in increasing order, and ties go to the lowest one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from tad.decoding.sampler import Samples

Measure = Literal["confidence", "entropy", "margin"]
Keep = Literal["best", "leftmost"] | None  # what is unmasked at every forward, whatever the threshold


class OwnCanvas(NamedTuple):
    """What `TopKPerStep` asks the host about a row."""

    length: int  # of the row's own canvas: prompt and generated part
    spent: int  # forwards already spent in the current block


@dataclass
class Candidates:
    """The positions that may be revealed, gathered: [rows, m], padded where `valid` is False."""

    position: Tensor  # index into the generated part, increasing along m
    valid: Tensor
    forced: Tensor  # group that has to make progress, 0 for none
    spent: Tensor  # [rows] forwards already spent in the current block
    seed: Tensor  # [rows]
    forward: Tensor  # [rows] number of this forward: 1, 2, ...
    length: int  # of the generated part
    canvases: list[OwnCanvas] | None = None  # where the host knows the rows
    current: Tensor | None = None  # what stands there, where a strategy may also rewrite tokens
    masked: Tensor | None = None  # bool: a mask does


class Strategy:
    """What strategies share. Most are frozen dataclasses, whose fields are a decoder's parameters."""

    forced = True  # groups that got nothing reveal their best
    compiles = True  # `torch.compile` takes it

    @property
    def score(self) -> Measure:
        return "confidence"

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        """[rows, m] bool."""
        raise NotImplementedError


def first_best(score: Tensor, allowed: Tensor) -> Tensor:
    """[rows, m] one-hot at the first best allowed entry of each row (all False where none is allowed)."""
    score = score.masked_fill(~allowed, float("-inf"))
    return leftmost(allowed & (score == score.amax(1, keepdim=True)))


def leftmost(allowed: Tensor) -> Tensor:
    """[rows, m] one-hot at the first allowed entry of each row."""
    return allowed & (allowed.cumsum(1) == 1)


def first_best_of(score: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """The `count` [rows] best valid entries of each row, ties to the lowest position."""
    order = score.masked_fill(~valid, float("-inf")).argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, rank) < torch.where(valid, count[:, None], 0)


def force_progress(chosen: Tensor, score: Tensor, candidates: Candidates, groups: int) -> Tensor:
    """Add, for each forced group that reveals nothing, its first best candidate."""
    forced = candidates.forced * candidates.valid
    rows, width = forced.shape
    empty = torch.full((rows, groups + 1), float("-inf"), device=score.device, dtype=score.dtype)
    best = empty.scatter_reduce(1, forced, score, "amax")
    served = torch.zeros_like(empty).scatter_reduce(1, forced, chosen.to(score.dtype), "amax") > 0
    top = (forced > 0) & (score == best.gather(1, forced)) & ~served.gather(1, forced)
    index = torch.arange(width, device=forced.device).expand(rows, width)
    first = torch.full((rows, groups + 1), width, device=forced.device)
    first = first.scatter_reduce(1, forced, torch.where(top, index, width), "amin")
    return chosen | (top & (index == first.gather(1, forced)))


Kind = TypeVar("Kind", bound=Any)


def on_device(strategy: Kind, device: torch.device) -> Kind:
    """The strategy with its numbers on the device: what was compiled for one threshold then serves every other."""
    values = {part.name: getattr(strategy, part.name) for part in fields(strategy)}
    numbers: dict[str, Any] = {
        name: torch.tensor(value, device=device) for name, value in values.items() if isinstance(value, float)
    }
    if isinstance(strategy, TopKPerStep):
        numbers["count_table"] = torch.tensor(strategy.counts, device=device)
    return replace(strategy, **numbers)


@dataclass(frozen=True)
class Top1(Strategy):
    """One token per forward: the surest."""

    score: Measure = "confidence"

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        return first_best(samples.score(self.score), candidates.valid)


@dataclass(frozen=True)
class TopKPerStep(Strategy):
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
    count_table: Tensor | None = field(default=None, compare=False)  # `counts` on the device
    forced = False

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

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        score, valid = samples.score(self.score), candidates.valid
        if candidates.canvases is None:
            assert self.count_table is not None
            spent = candidates.spent.clamp(max=len(self.count_table) - 1)
            return first_best_of(score, valid, self.count_table[spent])
        # Exact ties are common here (a filtered distribution often has one token left), and the public samplers break
        # them as `topk` over a row's own canvas does. So that is what is called, for all rows alike at once.
        score, chosen = score.masked_fill(~valid, float("-inf")), torch.zeros_like(valid)
        alike: dict[tuple[int, int], list[int]] = {}
        for row, (length, spent) in enumerate(candidates.canvases):
            alike.setdefault((length, self.counts[min(spent, len(self.counts) - 1)]), []).append(row)
        for (length, count), members in alike.items():
            position = candidates.position[members] + (length - candidates.length)
            row_scores = torch.full((len(members), length), float("-inf"), device=score.device)
            row_scores.scatter_(1, position, score[members])
            top = torch.zeros_like(row_scores, dtype=torch.bool)
            top.scatter_(1, row_scores.topk(count, dim=1).indices, True)
            chosen[members] = top.gather(1, position)
        return chosen & valid


@dataclass(frozen=True)
class ConfidenceThreshold(Strategy):
    """Everything at least (or, if `strict`, more than) `threshold` sure; `keep` adds the best candidate
    of all, or the leftmost."""

    threshold: float = 0.9
    strict: bool = False
    keep: Keep = "best"

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        sure = samples.confidence
        passing = sure > self.threshold if self.strict else sure >= self.threshold
        return _with_kept(passing & candidates.valid, samples.confidence, candidates, self.keep)


@dataclass(frozen=True)
class EntropyThreshold(Strategy):
    """Everything of entropy below (or, unless `strict`, at most) `threshold` nats; `keep` as above."""

    threshold: float = 0.5
    strict: bool = True
    keep: Keep = "best"
    score = "entropy"

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        entropy = samples.entropy
        passing = entropy < self.threshold if self.strict else entropy <= self.threshold
        return _with_kept(passing & candidates.valid, -entropy, candidates, self.keep)


@dataclass(frozen=True)
class ContiguousPrefix(Strategy):
    """The leftmost candidate, and those after it up to the first that is not sure: of entropy below `threshold` nats or,
    with another `score`, at least `threshold`."""

    threshold: float = 0.5
    score: Measure = "entropy"

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        if self.score == "entropy":
            sure = samples.entropy < self.threshold
        else:
            measured = samples.confidence if self.score == "confidence" else samples.margin
            sure = measured >= self.threshold
        return (sure | leftmost(candidates.valid)).long().cumprod(1).bool() & candidates.valid


@dataclass(frozen=True)
class Factor(Strategy):
    """Fast-dLLM's factor: the r-th surest is revealed while its confidence is at least 1 - factor / (r + 1)."""

    factor: float = 1.0

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        sure = samples.confidence.masked_fill(~candidates.valid, float("-inf"))
        ordered, order = sure.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(1, sure.shape[1] + 1, device=sure.device)
        passing = (ordered >= 1 - self.factor / (rank + 1)) | (rank == 1)
        prefix = passing.long().cumprod(1).bool()
        return torch.zeros_like(prefix).scatter(1, order, prefix) & candidates.valid


@dataclass(frozen=True)
class Hierarchy(Strategy):
    """dInfer's: all above `threshold`, the best of each run of adjacent masks above `low`, and the best of all."""

    threshold: float = 0.92
    low: float = 0.62

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        sure, valid, position = samples.confidence, candidates.valid, candidates.position
        starts = torch.ones_like(valid)
        starts[:, 1:] = position[:, 1:] != position[:, :-1] + 1
        run = starts.long().cumsum(1)  # 1, 2, ... per row
        rows, width = run.shape
        best = torch.full((rows, width + 1), float("-inf"), device=sure.device)
        best = best.scatter_reduce(1, run, sure.masked_fill(~valid, float("-inf")), "amax")
        peak = sure == best.gather(1, run)
        passing = (sure > self.threshold) | (peak & (sure > self.low))
        return passing & valid | first_best(sure, valid)


@dataclass(frozen=True)
class Credit(Strategy):
    """dInfer's: tokens that stay on top gather credit, which is added to their logits before the threshold.

    The state keeps the credit ([rows, length, vocab]); `accumulate` is called on every forward.
    """

    threshold: float = 0.9
    alpha: float = 0.7
    beta: float = 0.8
    gamma: float = 0.2

    def accumulate(self, credit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """New credit and fused logits, both [n, vocab], for n positions."""
        top, token = logits.softmax(-1).max(-1, keepdim=True)
        credit = (credit * self.beta).scatter_add(1, token, top**self.gamma)
        return credit, logits + self.alpha * torch.log1p(credit)

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        passing = (samples.confidence >= self.threshold) & candidates.valid
        return passing | first_best(samples.confidence, candidates.valid)


@dataclass(frozen=True)
class BlockQuota(Strategy):
    """SDAR's and LLaDA2.0's: all more than `threshold` sure, if they are at least this forward's share of the block; else that share.

    A block is shared out evenly over `steps` forwards, one per position by default. `threshold=None` always takes the
    share, which is the surest (SDAR's static and dynamic) or the `leftmost` (its sequential; JetEngine's dynamic).
    """

    threshold: float | None = None
    steps: int | None = None
    leftmost: bool = False
    per_block: tuple[int, int] = (1, 1)  # positions and steps of a block, filled in when a decoding starts
    forced = False

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        (size, steps), valid = self.per_block, candidates.valid
        spent = candidates.spent.clamp(max=steps - 1)
        share = size // steps + (spent < size % steps).long()
        if self.leftmost:
            chosen = valid & (valid.cumsum(1) <= share[:, None])
        else:
            chosen = first_best_of(samples.score(self.score), valid, share)
        if self.threshold is None:
            return chosen
        sure = valid & (samples.confidence > self.threshold)
        return torch.where((sure.sum(1) >= share)[:, None], sure, chosen)


@dataclass(frozen=True)
class EntropyBound(Strategy):
    """JetEngine's: the tokens of least entropy while the sum of their entropies stays below `bound` nats; at least one."""

    bound: float = 0.35
    score = "entropy"

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        entropy = samples.entropy.masked_fill(~candidates.valid, float("inf"))
        ordered, order = entropy.sort(dim=1, stable=True)
        passing = ordered.cumsum(1) < self.bound
        passing[:, :1] = True
        return torch.zeros_like(passing).scatter(1, order, passing) & candidates.valid


@dataclass(frozen=True)
class TokenEditing(Strategy):
    """LLaDA2.1's: masks more than `threshold` sure, at least the `least` surest; and every token of the block that the model
    would now replace, if it is more than `edit_threshold` sure of that."""

    threshold: float = 0.95
    edit_threshold: float = 0.9
    least: int = 1

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        assert candidates.masked is not None
        assert candidates.current is not None
        masked, shown = candidates.valid & candidates.masked, candidates.valid & ~candidates.masked
        sure = masked & (samples.confidence > self.threshold)
        least = torch.full_like(candidates.spent, self.least)
        best = first_best_of(samples.score(self.score), masked, least)
        edits = shown & (samples.token != candidates.current) & (samples.confidence > self.edit_threshold)
        return torch.where((sure.sum(1) >= self.least)[:, None], sure, best) | edits


def _with_kept(chosen: Tensor, score: Tensor, candidates: Candidates, keep: Keep) -> Tensor:
    if keep is None:
        return chosen
    valid = candidates.valid
    return chosen | (leftmost(valid) if keep == "leftmost" else first_best(score, valid))
