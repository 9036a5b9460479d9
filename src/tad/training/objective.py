"""Objectives: what a batch costs. Functions of tensors; they know neither trainer nor data.

`masked_diffusion_loss` is the plain objective of pretraining and supervised fine-tuning, as published for LLaDA: a ratio
t ~ U(0, 1) per row, every answer token masked with that probability, cross-entropy of the masked ones over t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_RATIO = 1e-3


def mask_answers(
    ids: Tensor,  # [batch, width]
    prompt_lengths: Tensor,  # [batch]
    mask_id: int,
    generator: torch.Generator,
    floor: float = LEAST_RATIO,
) -> tuple[Tensor, Tensor]:
    """The noisy rows and the weight of every position, which is zero where nothing was masked.

    The ratios of a batch are one uniform draw spread evenly over (0, 1): each is uniform, together they cover the
    range. Weights sum the loss to (1/batch) sum_rows (1/answer length) sum_masked CE / max(ratio, floor). The default is
    the published loss, whose rare large weights drown the gradient of small batches; a higher floor tames them.
    """
    batch, width = ids.shape
    spread = torch.arange(batch, device=ids.device) / batch
    t = (torch.rand(1, generator=generator, device=ids.device) + spread) % 1
    ratio = ((1 - LEAST_RATIO) * t + LEAST_RATIO)[:, None]
    answer = torch.arange(width, device=ids.device) >= prompt_lengths[:, None]
    masked = answer & (torch.rand(batch, width, generator=generator, device=ids.device) < ratio)
    weight = masked / (ratio.clamp(min=floor) * answer.sum(1, keepdim=True) * batch)
    return ids.masked_fill(masked, mask_id), weight


def masked_diffusion_loss(model: Any, noisy: Tensor, ids: Tensor, weight: Tensor, shift: int) -> Tensor:
    """Weighted cross-entropy [scalar] of the true tokens; `shift` is the family's offset between output and token."""
    logits = model(noisy).logits
    width = ids.shape[1]
    loss = F.cross_entropy(
        logits[:, : width - shift].float().flatten(0, 1), ids[:, shift:].flatten(), reduction="none"
    )
    return (loss * weight[:, shift:].flatten()).sum()
