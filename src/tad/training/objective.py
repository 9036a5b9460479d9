"""Objectives: what a batch costs. Functions of tensors; they know neither trainer nor data.

`masked_diffusion_loss` is the plain objective of pretraining and supervised fine-tuning, as published for LLaDA: a ratio
t ~ U(0, 1) per row, every answer token masked with that probability, cross-entropy of the masked ones over t. A share of
rows can instead be states of decoding block by block (`BlockStates`), which uniform masks almost never look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_RATIO = 1e-3


@dataclass(frozen=True)
class BlockStates:
    """Of the rows, `share` show whole blocks before a random block, and only masks after it."""

    share: float
    size: int
    filler: int  # the token that fills a row after its answer: blocks of filler alone are not visited


def mask_answers(
    ids: Tensor,  # [batch, width]
    prompt_lengths: Tensor,  # [batch]
    mask_id: int,
    generator: torch.Generator,
    floor: float = LEAST_RATIO,
    blocks: BlockStates | None = None,
) -> tuple[Tensor, Tensor]:
    """The noisy rows and the weight of every position, which is zero where nothing was masked.

    The ratios of a batch are one uniform draw spread evenly over (0, 1): each is uniform, together they cover the
    range. Weights sum the loss to (1/batch) sum_rows (1/answer length) sum_masked CE / max(ratio, floor). The default is
    the published loss, whose rare large weights drown the gradient of small batches; a higher floor tames them. In a
    block state the ratio is 0 before the block and 1 after it, under the same formula.
    """
    batch, width = ids.shape
    spread = torch.arange(batch, device=ids.device) / batch
    t = (torch.rand(1, generator=generator, device=ids.device) + spread) % 1
    ratio = ((1 - LEAST_RATIO) * t + LEAST_RATIO)[:, None]
    place = torch.arange(width, device=ids.device) - prompt_lengths[:, None]
    answer = place >= 0
    if blocks is not None and blocks.share > 0:
        ratio = _ratio_by_block(ids, place, ratio, blocks, generator)
    masked = answer & (torch.rand(batch, width, generator=generator, device=ids.device) < ratio)
    weight = masked / (ratio.clamp(min=floor) * answer.sum(1, keepdim=True) * batch)
    return ids.masked_fill(masked, mask_id), weight


def _ratio_by_block(
    ids: Tensor, place: Tensor, ratio: Tensor, blocks: BlockStates, generator: torch.Generator
) -> Tensor:
    """The ratio of every position [batch, width]: the row's own, or in block states 0, the row's own, 1."""
    last = torch.where(ids == blocks.filler, 0, place).amax(1, keepdim=True).clamp(min=0)
    draw = torch.rand(2, len(ids), 1, generator=generator, device=ids.device)
    current = (draw[0] * (last // blocks.size + 1)).long()
    block = torch.div(place, blocks.size, rounding_mode="floor")
    by_block = torch.where(block == current, ratio, (block > current).to(ratio.dtype))
    return torch.where(draw[1] < blocks.share, by_block, ratio)


def masked_diffusion_loss(model: Any, noisy: Tensor, ids: Tensor, weight: Tensor, shift: int) -> Tensor:
    """Weighted cross-entropy [scalar] of the true tokens; `shift` is the family's offset between output and token."""
    logits = model(noisy).logits
    width = ids.shape[1]
    loss = F.cross_entropy(
        logits[:, : width - shift].float().flatten(0, 1), ids[:, shift:].flatten(), reduction="none"
    )
    return (loss * weight[:, shift:].flatten()).sum()
