"""Losses of rows of logits: cross-entropy, KL to a teacher, entropy; with the head inside, never [rows, vocab] at once.

`chunked_losses` is a chunked linear cross-entropy (and KL, and entropy): it takes hidden states at the positions that are
wanted and the head, runs the head chunk by chunk, keeps one number per row, and runs it again in backward. What stays alive
between the two is [rows, width]. `plain_losses` is the formula on logits that exist. The chunked loss takes its values from it;
its gradient is written out, and held to what autograd makes of the plain one.

Everything after the head is in fp32 (fp64 if the logits are). Which rows, which weights and which average: not here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**25
"""Logits that exist at a time: 265 rows of 126k tokens, 134 MB in fp32, of which about five copies live at once. Small
vocabularies get many rows, since every chunk costs some dozen launches."""


class Head(NamedTuple):
    """The linear map from hidden states to logits."""

    weight: Tensor  # [vocab, width]
    bias: Tensor | None = None  # [vocab]


class RowLosses(NamedTuple):
    """One number per row, all [rows]. The first three carry a gradient; those that were not asked for are None."""

    cross_entropy: Tensor  # -log p(label)
    kl: Tensor | None  # tau^2 KL(teacher || student), both at temperature tau
    scaled_entropy: Tensor | None  # entropy of the student at `temperature`
    teacher_entropy: Tensor | None  # at tau
    confidence: Tensor  # p(label)
    entropy: Tensor  # of the student at temperature 1
    right: Tensor  # bool: the label is the most likely token

    @property
    def soft(self) -> Tensor:
        """Cross-entropy to the teacher's distribution, at tau = 1: the KL plus a constant of the student."""
        assert self.kl is not None
        assert self.teacher_entropy is not None
        return self.kl + self.teacher_entropy


def plain_losses(
    logits: Tensor,  # [rows, vocab]
    labels: Tensor,  # [rows]
    teacher_logits: Tensor | None = None,  # [rows, vocab]
    tau: float = 1.0,
    temperature: float | None = None,
) -> RowLosses:
    """The formulas as written, on whole logits."""
    logits = _wide(logits)
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, labels[:, None])[:, 0]
    kl = teacher_entropy = scaled_entropy = None
    if temperature is not None:
        scaled_entropy = _entropy((logits / temperature).log_softmax(-1))
    if teacher_logits is not None:
        given = logs if tau == 1 else (logits / tau).log_softmax(-1)
        wanted = (_wide(teacher_logits) / tau).log_softmax(-1)
        kl = tau**2 * (wanted.exp() * (wanted - given)).sum(-1)
        teacher_entropy = _entropy(wanted)
    with torch.no_grad():
        confidence, entropy, right = own.exp(), _entropy(logs), logits.argmax(-1) == labels
    return RowLosses(-own, kl, scaled_entropy, teacher_entropy, confidence, entropy, right)


def chunked_losses(
    hidden: Tensor,  # [rows, width]
    head: Head,
    labels: Tensor,  # [rows]
    taught: Tensor | None = None,  # [rows, width], the teacher's hidden states
    teacher_head: Head | None = None,
    tau: float = 1.0,
    temperature: float | None = None,
    chunk: int | None = None,  # rows at a time; default: CHUNK logits
) -> RowLosses:
    """`plain_losses` of `head(hidden)` and `teacher_head(taught)`. No gradient reaches the teacher.

    Under autocast the head's product is in autocast's dtype, as it would be outside.
    """
    kind = hidden.device.type
    mixed = torch.is_autocast_enabled(kind)
    compute = torch.get_autocast_dtype(kind) if mixed else head.weight.dtype
    teacher = teacher_head or head
    with torch.autocast(kind, enabled=False):
        found = _ChunkedLosses.apply(
            hidden,
            head.weight,
            head.bias,
            labels,
            None if taught is None else taught.detach(),
            teacher.weight.detach(),
            None if teacher.bias is None else teacher.bias.detach(),
            tau,
            temperature,
            max(1, chunk or CHUNK // len(head.weight)),
            compute,
        )
    return RowLosses(*cast(Any, found))


class _ChunkedLosses(torch.autograd.Function):
    """Forward keeps numbers per row; backward runs the head again and sums the gradient chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        taught: Tensor | None,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        tau: float,
        temperature: float | None,
        chunk: int,
        compute: torch.dtype,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(hidden, weight, bias, labels, taught, teacher_weight, teacher_bias)
        ctx.settings = (tau, temperature, chunk, compute)
        ctx.set_materialize_grads(False)
        head = Head(weight.to(compute), None if bias is None else bias.to(compute))
        teacher = Head(teacher_weight.to(compute), None if teacher_bias is None else teacher_bias.to(compute))
        pieces: list[RowLosses] = []
        # An empty set still goes through once, so that the outputs have their shapes.
        for low in range(0, max(1, len(hidden)), chunk):
            part = slice(low, low + chunk)
            logits = _logits(hidden[part], head)
            guide = None if taught is None else _logits(taught[part], teacher)
            pieces.append(plain_losses(logits, labels[part], guide, tau, temperature))
        joined = [None if column[0] is None else torch.cat(column) for column in zip(*pieces, strict=True)]
        ctx.mark_non_differentiable(*(column for column in joined[3:] if column is not None))
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, taught, teacher_weight, teacher_bias = ctx.saved_tensors
        tau, temperature, chunk, compute = ctx.settings
        by_ce, by_kl, by_entropy = grads[:3]
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        head = Head(weight.to(compute), None if bias is None else bias.to(compute))
        teacher = Head(teacher_weight.to(compute), None if teacher_bias is None else teacher_bias.to(compute))
        to_hidden = torch.zeros_like(hidden) if wants_hidden else None
        # Chunks are summed in fp32: a bf16 sum would lose the small ones.
        wide = torch.promote_types(weight.dtype, torch.float32)
        to_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if wants_bias and bias is not None else None
        for low in range(0, len(hidden), chunk):
            part = slice(low, low + chunk)
            logits = _logits(hidden[part], head)
            slope = torch.zeros_like(logits)
            if by_ce is not None:
                pull = by_ce[part, None].to(logits.dtype)
                slope += logits.softmax(-1) * pull
                slope.scatter_add_(-1, labels[part, None], -pull)
            if by_kl is not None:
                given, wanted = (logits / tau).softmax(-1), (_logits(taught[part], teacher) / tau).softmax(-1)
                slope += (given - wanted) * (tau * by_kl[part, None])
            if by_entropy is not None:
                logs = (logits / temperature).log_softmax(-1)
                slope -= (
                    logs.exp() * (logs + _entropy(logs)[:, None]) * (by_entropy[part, None] / temperature)
                )
            narrow = slope.to(compute)
            if to_hidden is not None:
                to_hidden[part] = narrow @ head.weight
            if to_weight is not None:
                to_weight += narrow.T @ hidden[part].to(compute)
            if to_bias is not None:
                to_bias += slope.sum(0)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *(None,) * 8,
        )


def _logits(hidden: Tensor, head: Head) -> Tensor:
    return _wide(F.linear(hidden.to(head.weight.dtype), head.weight, head.bias))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _entropy(logs: Tensor) -> Tensor:
    """Of log-probabilities [..., vocab], in nats."""
    return -(logs.exp() * logs).sum(-1)
