"""The ways to make a distillation step that `distill.py` measures, among them the published trainers' own, re-created."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.models import MaskedDiffusionModel
from tad.models.attention import AttentionMask
from tad.training.objectives import Batch


@dataclass(frozen=True)
class Variant:
    """One way to make a step."""

    name: str
    released: bool = False
    recompute_every: int = 0  # 1: all layers, 2: every other one, 0: none
    compiled: bool = False
    fp8: bool = False
    dropout: bool = True


VARIANTS = [
    Variant("lean"),
    Variant("lean + recompute", recompute_every=1),
    Variant("lean + recompute half", recompute_every=2),
    Variant("fast", compiled=True),
    Variant("fast + recompute half", compiled=True, recompute_every=2),
    Variant("fast + fp8", compiled=True, fp8=True),
    Variant("fast + fp8 + recompute half", compiled=True, fp8=True, recompute_every=2),
    Variant("lean, no dropout", dropout=False),
    Variant("fast, no dropout", compiled=True, dropout=False),
    Variant("released", released=True),
]


def released_loss(model: MaskedDiffusionModel, teacher: MaskedDiffusionModel, batch: Batch) -> Tensor:
    """The published trainer's step: whole logits of both models, rows picked from them, two means."""
    assert batch.teacher is not None
    near, distant = batch.terms["near"], batch.terms["distant"]
    assert distant.teacher_index is not None
    with torch.no_grad():
        taught = teacher(batch.teacher.ids, mask=not_pad(batch.teacher.ids, teacher)).logits.flatten(0, 1)
    given = model(batch.student.ids, mask=not_pad(batch.student.ids, model)).logits.flatten(0, 1)
    hard = F.cross_entropy(given[near.student_index], near.labels)
    soft = F.kl_div(
        given[distant.student_index].log_softmax(-1),
        taught[distant.teacher_index].softmax(-1),
        reduction="batchmean",
    )
    return hard + soft


def not_pad(ids: Tensor, model: MaskedDiffusionModel) -> AttentionMask:
    """The published trainer always passes a mask made from the ids, and with it leaves attention's fastest path."""
    return AttentionMask(keys=ids != model.config.pad_token_id)
