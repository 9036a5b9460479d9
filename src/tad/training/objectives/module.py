"""The module that is trained: a model and an objective, with the loss as its forward.

What DDP, FSDP and DeepSpeed wrap is this module, and one call of it is the whole loss: the teacher's forward, the student's,
and the head inside the chunked loss. That matters where parameters are sharded: outside the forward of the wrapped module a
head is a fragment, inside it is whole, and it is whole again when backward starts, because what backward starts from (the
loss) is this module's output. For the same reason which forwards run depends on the objective alone, not on the batch: all
processes gather the same parameters in the same order. Leave the head in the outermost unit (wrap layers only), and use
autocast for mixed precision: FSDP's own, in its first version, also rounds what is passed in, such as a batch's weights.

The teacher is the same weights with the adapter passed over. PEFT's own switch also changes `requires_grad`, which wrapped
parameters do not take well; passing over is a flag on each adapted layer. PEFT also casts the input of an adapter to its
weights' fp32, which autocast makes bf16 again for the GEMM; under autocast the adapters here take their input as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tad.errors import TadError
from tad.models import AttentionMask, BlockLayout, MaskedDiffusionModel, block_index
from tad.training.losses import Head, RowLosses, chunked_losses
from tad.training.objectives.base import Batch, LossOutput, Objective, PaddedIds, TermTargets


class LossModule(nn.Module):
    """`module(batch, totals)` is the batch's share of the loss.

    `student` is a model with adapters inside (PEFT's handle or the plain model), or a plain one that is trained whole; then a
    teacher has to be given (a frozen copy) if the objective needs one. `chunk` is how many positions the head takes at a time.
    """

    def __init__(
        self,
        student: nn.Module,
        objective: Objective,
        teacher: nn.Module | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.objective, self.chunk = objective, chunk
        for layer in _adapted(student):
            layer._cast_input_dtype = partial(_cast_outside_autocast, layer._cast_input_dtype)
        if teacher is not None:
            teacher.requires_grad_(False).eval()
        elif objective.needs_teacher and not _adapted(student):
            raise TadError(
                f"objective '{objective.name}' needs a teacher: train adapters (the model without them is the teacher),"
                " or keep a frozen copy of the model beside it"
            )

    def train(self, mode: bool = True) -> LossModule:
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        """The teacher goes first: what its forward needs is free again before the student's activations are kept."""
        teacher_hidden = None
        if self.objective.needs_teacher:
            assert batch.teacher is not None
            with torch.no_grad(), self._as_teacher() as model:
                teacher_hidden = self._hidden_states(model, batch.teacher)
        teacher_head = Head(*map(_detach, head_of(self.teacher or self.student)))
        student = plain_model(self.student)
        hidden = self._hidden_states(student, batch.student)
        outputs = ModelOutputs(hidden, teacher_hidden, head_of(student), teacher_head, self.chunk)
        return self.objective.loss(outputs, batch, totals)

    @contextmanager
    def _as_teacher(self) -> Iterator[MaskedDiffusionModel]:
        if self.teacher is not None:
            yield plain_model(self.teacher)
        else:
            with adapters_off(self.student):
                yield plain_model(self.student)

    def _hidden_states(self, model: MaskedDiffusionModel, padded: PaddedIds) -> Tensor:
        """Hidden states, flattened to [views * width, width of the model]."""
        mask, positions = mask_of(model, padded), positions_of(padded)
        hidden = model(padded.ids, position_ids=positions, mask=mask, head=False).hidden
        assert hidden is not None
        return hidden.flatten(0, 1)


@dataclass(frozen=True)
class ModelOutputs:
    """Student and teacher outputs for a batch, as hidden states; asked for the losses of one term at a time."""

    hidden: Tensor
    teacher_hidden: Tensor | None
    head: Head
    teacher_head: Head
    chunk: int | None

    def losses(
        self, targets: TermTargets, teacher: bool = False, tau: float = 1.0, temperature: float | None = None
    ) -> RowLosses:
        """The student's losses at a term's positions; with the teacher's distribution where asked for."""
        teacher_hidden = None
        if teacher:
            assert self.teacher_hidden is not None
            teacher_hidden = self.teacher_hidden[targets.teacher_index]
        return chunked_losses(
            self.hidden[targets.student_index],
            self.head,
            targets.labels,
            teacher_hidden,
            self.teacher_head,
            tau,
            temperature,
            self.chunk,
        )


def positions_of(padded: PaddedIds) -> Tensor:
    """Position ids [1 or views, width]; clean copies count from 0 again."""
    if padded.positions is not None:
        return padded.positions
    columns = torch.arange(padded.ids.shape[1], device=padded.ids.device)[None]
    if padded.clean_start is None:
        return columns
    start = padded.clean_start[:, None]
    return torch.where(columns < start, columns, columns - start)


def mask_of(model: MaskedDiffusionModel, padded: PaddedIds) -> AttentionMask:
    """Padding is hidden by length. A batch without padding needs no mask, which is the fast path of attention."""
    positions = torch.arange(padded.ids.shape[1], device=padded.ids.device)
    real = positions < padded.lengths[:, None] if padded.padded else None
    if padded.clean_start is not None and padded.blocks is not None:
        return AttentionMask.noisy_and_clean(
            padded.blocks, positions < padded.clean_start[:, None], keys=real
        )
    if padded.clean_start is not None and padded.block is not None:
        blocks = block_index(positions_of(padded), 0, padded.block[:, None], "absolute")
        return AttentionMask.noisy_and_clean(blocks, positions < padded.clean_start[:, None], keys=real)
    layout = None if padded.block is None else BlockLayout(padded.block[:, None])
    return model.attention_mask(positions, padded.prompt_len[:, None], real, layout)


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


def _cast_outside_autocast(cast: Callable[..., Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if torch.is_autocast_enabled(x.device.type) else cast(x, dtype)


def _detach(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def checkpoint_layers(model: nn.Module, every: int = 1) -> None:
    """Make every n-th layer's activations again in backward instead of keeping them; 0: keep all."""
    plain = plain_model(model)
    if every:
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, layer in enumerate(plain.layers()):
        layer.gradient_checkpointing = bool(every) and index % every == 0
