"""The module that is trained: a model and an objective, with the loss as its forward.

What DDP, FSDP and DeepSpeed wrap is this module, and one call of it is the whole loss: the teacher's forward, the student's,
and the head inside the chunked loss. That matters where parameters are sharded: outside the forward of the wrapped module a
head is a fragment, inside it is whole, and it is whole again when backward starts, because what backward starts from (the
loss) is this module's output. For the same reason which forwards run depends on the objective alone, not on the batch: all
processes gather the same parameters in the same order. Leave the head in the outermost unit (wrap layers only), and use
autocast for mixed precision: FSDP's own, in its first version, also rounds what is passed in, such as a batch's weights.

The teacher is the same weights with the adapter passed over. PEFT's own switch also changes `requires_grad`, which wrapped
parameters do not take well; passing over is a flag on each adapted layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from tad.errors import TadError
from tad.models import AttentionMask, BlockLayout, MaskedDiffusionModel
from tad.training.losses import Head, RowLosses, lean_losses, plain_losses
from tad.training.objectives.base import Batch, Canvas, Group, Objective, Parts


class LossModule(nn.Module):
    """`module(batch, totals)` is the batch's share of the loss.

    `student` is a model with adapters inside (PEFT's handle or the plain model), or a plain one that is trained whole; then a
    teacher has to be given (a frozen copy) if the objective needs one. `lean=False` makes whole logits in fp32 for every
    position of the batch and leaves the rest to autograd: slow, large, and what the lean way is tested against.
    """

    def __init__(
        self,
        student: nn.Module,
        objective: Objective,
        teacher: nn.Module | None = None,
        chunk: int | None = None,
        lean: bool = True,
    ) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.objective, self.chunk, self.lean = objective, chunk, lean
        if teacher is not None:
            teacher.requires_grad_(False).eval()
        elif (objective.needs_teacher or objective.needs_base) and not _adapted(student):
            raise TadError(
                f"objective '{objective.name}' needs a teacher: train adapters (the model without them is the teacher),"
                " or keep a frozen copy of the model beside it"
            )

    def train(self, mode: bool = True) -> LossModule:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, batch: Batch, totals: Mapping[str, float]) -> Parts:
        """The teacher goes first: what its forward needs is free again before the student's activations are kept."""
        taught = base = None
        with torch.no_grad(), self._as_teacher() as model:
            if self.objective.needs_teacher:
                assert batch.teacher is not None
                taught = self._see(model, batch.teacher)
            if self.objective.needs_base:
                base = self._see(model, batch.student, full=True)
        guide = Head(*map(_detach, head_of(self.teacher or self.student)))
        student = plain_model(self.student)
        hidden = self._see(student, batch.student)
        evidence = _Evidence(hidden, taught, base, head_of(student), guide, self.chunk, self.lean)
        return self.objective.loss(evidence, batch, totals)

    @contextmanager
    def _as_teacher(self) -> Iterator[MaskedDiffusionModel]:
        if self.teacher is not None:
            yield plain_model(self.teacher)
        else:
            with adapters_off(self.student):
                yield plain_model(self.student)

    def _see(self, model: MaskedDiffusionModel, canvas: Canvas, full: bool = False) -> Tensor:
        """Hidden states, flattened to [views * width, width of the model]."""
        hidden = model(canvas.ids, mask=mask_of(model, canvas, full), head=False).hidden
        assert hidden is not None
        return hidden.flatten(0, 1)


class _Evidence:
    """See `base.Evidence`."""

    def __init__(
        self,
        hidden: Tensor,
        taught: Tensor | None,
        base: Tensor | None,
        head: Head,
        guide: Head,
        chunk: int | None,
        lean: bool,
    ) -> None:
        self.hidden, self.taught, self.base = hidden, taught, base
        self.head, self.guide, self.chunk, self.lean = head, guide, chunk, lean
        if not lean:
            self.logits = _whole(hidden, head)
            self.teacher_logits = None if taught is None else _whole(taught, guide)

    def rows(
        self, group: Group, teacher: bool = False, tau: float = 1.0, temperature: float | None = None
    ) -> RowLosses:
        if teacher:
            assert self.taught is not None
            assert group.teacher_at is not None
        if not self.lean:
            wanted = (
                self.teacher_logits[group.teacher_at] if teacher and self.teacher_logits is not None else None
            )
            return plain_losses(self.logits[group.student_at], group.labels, wanted, tau, temperature)
        return lean_losses(
            self.hidden[group.student_at],
            self.head,
            group.labels,
            self.taught[group.teacher_at] if teacher and self.taught is not None else None,
            self.guide,
            tau,
            temperature,
            self.chunk,
        )

    def base_confidence(self, group: Group) -> Tensor:
        # Without a forward of its own, the base with the plain prompt is the teacher itself.
        source, at = (self.taught, group.teacher_at) if self.base is None else (self.base, group.student_at)
        assert source is not None
        assert at is not None
        with torch.no_grad():
            return lean_losses(source[at], self.guide, group.labels, chunk=self.chunk).confidence


def mask_of(model: MaskedDiffusionModel, canvas: Canvas, full: bool = False) -> AttentionMask:
    """Padding is hidden by length. A batch without padding needs no mask, which is the fast path of attention."""
    positions = torch.arange(canvas.ids.shape[1], device=canvas.ids.device)
    real = positions < canvas.lengths[:, None] if canvas.padded else None
    layout = None if full or canvas.block is None else BlockLayout(canvas.block[:, None])
    return model.attention_mask(positions, canvas.prompt_len[:, None], real, layout)


def plain_model(model: nn.Module) -> MaskedDiffusionModel:
    """The model inside PEFT's handle; adapters stay in its layers."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return cast(MaskedDiffusionModel, inner)


def head_of(model: nn.Module) -> Head:
    """The weights of a model's head: the embedding's where they are tied."""
    plain = plain_model(model)
    if plain.shape.tied:
        return Head(plain.embedding().weight)
    linear = cast(nn.Linear, plain.get_submodule(plain.names.head))
    return Head(linear.weight, linear.bias)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Adapted layers pass their adapters over; no parameter is touched."""
    layers = _adapted(model)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _adapted(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def _whole(hidden: Tensor, head: Head) -> Tensor:
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _detach(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def checkpoint_layers(model: nn.Module, every: int = 1) -> None:
    """Make every n-th layer's activations again in backward instead of keeping them; 0: keep all."""
    plain = plain_model(model)
    if every:
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, layer in enumerate(plain.layers()):
        layer.gradient_checkpointing = bool(every) and index % every == 0
