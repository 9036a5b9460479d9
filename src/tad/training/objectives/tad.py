"""TAD: hard labels for what the teacher reveals soon, the teacher's distribution for what it reveals later.

    total = near + lambda * distant
    near    = cross-entropy on the trajectory's tokens, over positions revealed within `window` steps of the state
    distant = tau^2 KL(teacher || student) over the other masks; the teacher sees the same state after its own prompt

The ablations are settings: either term may be `ce`, `kl` or `none`, the window may be `all`, the teacher's prompt `plain`.
Beyond the paper: `partition: adaptive` keeps a position near only where the base model, with the plain prompt, already gives
its token at least `floor`; `partition: smooth` fades from the near loss to the distant one over the steps to reveal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor

from tad.config import Positive, Share
from tad.errors import TadError
from tad.training.losses import RowLosses
from tad.training.objectives.base import (
    Batch,
    LossOutput,
    Objective,
    TermTargets,
    View,
    add_stats,
    share,
    stats_of,
)
from tad.training.objectives.module import ModelOutputs
from tad.training.states import TrajectoryArrays
from tad.trajectories.partition import masked, partition, state

Kind = Literal["ce", "kl", "none"]
_FAINT = 1e-3  # smooth weights below this are 0, so that hardly any position is in both terms


@dataclass(frozen=True)
class Tad(Objective):
    """Defaults are the paper's quality setting for LLaDA."""

    name: ClassVar[str] = "tad"
    uses_steps: ClassVar[bool] = True
    published: ClassVar[Mapping[str, Mapping[str, object]]] = {"llada": {"window": 8}, "dream": {"window": 6}}

    window: Positive | Literal["all"] = 8
    lambda_: float = 1.0
    tau: PositiveFloat = 1.0
    reduction: Literal["mean", "sum"] = "mean"
    """mean: each term over its own tokens, as released. sum: over tokens, averaged over states, as the equations say."""
    filler: bool = True
    """Whether the end filler after the answer counts, as it does in the release. Block-diffusion models have none."""
    teacher: Literal["privileged", "plain"] = "privileged"
    near: Kind = "ce"
    distant: Kind = "kl"
    partition: Literal["fixed", "adaptive", "smooth"] = "fixed"
    floor: Share = 0.5
    """adaptive: least confidence of the base model in a near token."""
    curve: Literal["logistic", "exponential"] = "logistic"
    """smooth: the weight of the near loss, d steps before the reveal: a logistic step at the window, or e^(-(d-1)/window)."""
    softness: PositiveFloat = 2.0
    """smooth, logistic: steps over which the weight falls; towards 0 it becomes the fixed partition."""
    block_causal: Positive | None = None
    """Block size of a block-causal student, behind the prompt; by default it has the model's own attention, as the teacher
    has in any case."""

    def __post_init__(self) -> None:
        if self.partition == "smooth" and self.window == "all":
            raise TadError("objective.partition: smooth needs a window that is a number")

    @property
    def needs_teacher(self) -> bool:
        return "kl" in (self.near, self.distant)

    @property
    def needs_base(self) -> bool:
        return self.partition == "adaptive" and not (self.needs_teacher and self.teacher == "plain")

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        assert step is not None  # `uses_steps`
        near, distant = self.weigh(row.reveal, step)
        if not self.filler or self.grid is not None:
            near, distant = near * ~row.filler, distant * ~row.filler
        taught = None
        if self.needs_teacher:
            taught = row.privileged_ids if self.teacher == "privileged" else row.plain_ids
        counted, fed = self.limit_to_block(
            masked(row.reveal, step), (row.plain_ids, taught), self.block_causal
        )
        return [
            View(
                row=row.id,
                prompt=row.plain_ids,
                noisy=state(row.tokens, row.reveal, step, self.mask_token)[:fed],
                labels=row.tokens[:fed],
                terms={"near": (near * counted)[:fed], "distant": (distant * counted)[:fed]},
                teacher_prompt=taught,
                block=self.block_causal,
            )
        ]

    def weigh(self, reveal: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Weights of the near and the distant loss [length]; on masks they sum to 1, elsewhere they are 0."""
        hidden = masked(reveal, step)
        if self.window == "all":
            return hidden.float(), torch.zeros(reveal.shape)
        if self.partition != "smooth":
            near, distant = partition(reveal, step, self.window)
            return near.float(), distant.float()
        ahead = (reveal - step).float()
        if self.curve == "logistic":
            soon = torch.sigmoid((self.window + 0.5 - ahead) / self.softness)
        else:
            soon = torch.exp((1 - ahead) / self.window)
        soon = torch.where(soon < _FAINT, 0.0, torch.where(soon > 1 - _FAINT, 1.0, soon))
        return soon * hidden, (1 - soon) * hidden

    def counts(self, batch: Batch) -> dict[str, float]:
        weights = {name: float(batch.terms[name].weights.double().sum()) for name in ("near", "distant")}
        return {**weights, "views": float(len(batch))}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        near, distant = batch.terms["near"], batch.terms["distant"]
        used = [("near", near, near.weights, self.near), ("distant", distant, distant.weights, self.distant)]
        found = {"distant": self._look(outputs, distant, {self.distant})}
        if self.partition == "adaptive":
            keep = (outputs.base_confidence(near) >= self.floor).float()
            found["near"] = self._look(outputs, near, {self.near, self.distant})
            used[0] = ("near", near, keep, self.near)
            used.append(("distant", near, 1 - keep, self.distant))
        else:
            found["near"] = self._look(outputs, near, {self.near})
        terms, stats = {}, {}
        for term in ("near", "distant"):
            pieces = [
                (found["near" if targets is near else "distant"], targets, weights, kind)
                for name, targets, weights, kind in used
                if name == term
            ]
            terms[term] = self._reduce(term, pieces, totals, len(batch))
            stats.update(add_stats(*(stats_of(term, rows, w > 0) for rows, _, w, _ in pieces)))
        total = terms["near"] + self.lambda_ * terms["distant"]
        return LossOutput(total, {name: value.detach() for name, value in terms.items()}, stats)

    def _look(self, outputs: ModelOutputs, targets: TermTargets, kinds: set[str]) -> RowLosses:
        """Rows that no loss uses are looked at for the log, without a gradient."""
        with torch.no_grad() if kinds == {"none"} else nullcontext():
            return outputs.losses(targets, teacher="kl" in kinds, tau=self.tau)

    def _reduce(
        self,
        term: str,
        pieces: Sequence[tuple[RowLosses, TermTargets, Tensor, str]],
        totals: Mapping[str, float],
        views: int,
    ) -> Tensor:
        by_view = pieces[0][0].cross_entropy.new_zeros(views)
        weight_by_view = torch.zeros_like(by_view)
        for rows, targets, weights, kind in pieces:
            values = _choose(rows, kind)
            if values is not None:
                by_view = by_view.index_add(0, targets.view, values * weights)
                weight_by_view = weight_by_view.index_add(0, targets.view, weights)
        if self.reduction == "sum":
            return share(by_view.sum(), totals["views"])
        if self.partition == "adaptive":
            # How many are near is the base model's word, so it is counted by view.
            return share((by_view / weight_by_view.clamp(min=1)).sum(), totals["views"])
        return share(by_view.sum(), totals[term])


def _choose(rows: RowLosses, kind: str) -> Tensor | None:
    return {"ce": rows.cross_entropy, "kl": rows.kl, "none": None}[kind]
