"""TAD: hard labels for what the teacher reveals soon, the teacher's distribution for what it reveals later.

    total = near + lambda * distant
    near    = cross-entropy on the trajectory's tokens, over positions revealed within `window` steps of the state
    distant = tau^2 KL(teacher || student) over the other masks; the teacher sees the same state after its own prompt

The ablations are settings: either term may be `ce`, `kl` or `none`, the window may be `all`, the teacher's prompt `plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor

from tad.config import Positive
from tad.training.objectives.base import Batch, LossOutput, Objective, View, share, stats_of
from tad.training.objectives.module import ModelOutputs
from tad.training.states import TrajectoryArrays
from tad.trajectories.partition import masked, partition, state

Kind = Literal["ce", "kl", "none"]


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
    block_causal: Positive | None = None
    """Block size of a block-causal student, behind the prompt; by default it has the model's own attention, as the teacher
    has in any case."""

    @property
    def needs_teacher(self) -> bool:
        return "kl" in (self.near, self.distant)

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        assert step is not None  # `uses_steps`
        near, distant = self.weigh(row.reveal, step)
        if not self.filler or self.model_block is not None:
            near, distant = near * ~row.filler, distant * ~row.filler
        teacher_prompt = None
        if self.needs_teacher:
            teacher_prompt = row.privileged_ids if self.teacher == "privileged" else row.plain_ids
        counted, fed = self.limit_to_block(
            masked(row.reveal, step), (row.plain_ids, teacher_prompt), self.block_causal
        )
        return [
            View(
                row=row.id,
                prompt=row.plain_ids,
                noisy=state(row.tokens, row.reveal, step, self.mask_token)[:fed],
                labels=row.tokens[:fed],
                terms={"near": (near * counted)[:fed], "distant": (distant * counted)[:fed]},
                teacher_prompt=teacher_prompt,
                block=self.block_causal,
            )
        ]

    def weigh(self, reveal: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Weights of the near and the distant loss [length]: each mask has one of them, what is revealed has none."""
        if self.window == "all":
            return masked(reveal, step).float(), torch.zeros(reveal.shape)
        near, distant = partition(reveal, step, self.window)
        return near.float(), distant.float()

    def counts(self, batch: Batch) -> dict[str, float]:
        weights = {name: float(batch.terms[name].weights.double().sum()) for name in ("near", "distant")}
        return {**weights, "views": float(len(batch))}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        terms, stats = {}, {}
        for name, kind in (("near", self.near), ("distant", self.distant)):
            targets = batch.terms[name]
            # Rows that no loss uses are looked at for the log, without a gradient.
            with torch.no_grad() if kind == "none" else nullcontext():
                rows = outputs.losses(targets, teacher=kind == "kl", tau=self.tau)
            nothing = torch.zeros_like(rows.cross_entropy)
            values = {"ce": rows.cross_entropy, "kl": rows.kl, "none": nothing}[kind]
            assert values is not None
            total = totals["views" if self.reduction == "sum" else name]
            terms[name] = share((values * targets.weights).sum(), total)
            stats.update(stats_of(name, rows, targets.weights > 0))
        loss = terms["near"] + self.lambda_ * terms["distant"]
        return LossOutput(loss, {name: value.detach() for name, value in terms.items()}, stats)
