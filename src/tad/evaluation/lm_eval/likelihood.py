"""How likely a masked diffusion model finds a text: the Monte Carlo estimate published with LLaDA. On token ids only.

Of the L target tokens, l ~ U{1..L} are masked at random, and the cross-entropy of the masked ones is weighted by L / l.
The mean over draws estimates a bound on -log p(target | context); it is what the published scores of multiple-choice
benchmarks use in its place. There is no exact likelihood to compare with, and no perplexity of running text.

Models with a token-causal context have an exact likelihood, that of autoregressive decoding: one forward gives it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding import check_prompt, decode
from tad.errors import TadError
from tad.models import LM

# Positions whose logits are held at once, so that memory does not grow with draws x target x vocabulary.
_POSITIONS = 1024


def draw_masks(length: int, draws: int, generator: torch.Generator) -> Tensor:
    """Which target tokens each draw masks: bool [draws, length].

    One uniform draw, spread evenly over the draws: every count is uniform on 1..length, together they cover the range.
    The spread is in whole numbers, since rounding halves to even would favour even counts.
    """
    first = int(torch.randint(length, (), generator=generator))
    counts = (first + torch.arange(draws) * length // draws) % length + 1
    ranks = torch.rand(draws, length, generator=generator).argsort(1).argsort(1)
    return ranks < counts[:, None]


@torch.inference_mode()
def weigh_masks(lm: LM, context: Sequence[int], target: Sequence[int], masks: Tensor, batch: int) -> Tensor:
    """(L / l) x the cross-entropy of the masked tokens, for each mask [draws, length]: fp64 [draws]."""
    masks = masks.to(lm.device)
    truth = torch.tensor(target, device=lm.device)
    row = torch.tensor([*context, *target], device=lm.device)
    mask = lm.model.attention_mask(torch.arange(len(row), device=lm.device), len(context))
    found = []
    for chunk in masks.split(batch):
        canvas = row.repeat(len(chunk), 1)
        canvas[:, len(context) :].masked_fill_(chunk, lm.tokens.mask)
        hidden = lm.model(canvas, mask=mask, head=False).hidden
        rows, places = chunk.nonzero(as_tuple=True)
        outputs = hidden[rows, len(context) + places - lm.family.logit_shift]
        losses = [
            F.cross_entropy(lm.model.head(part).float(), wanted.to(part.device), reduction="none").double()
            for part, wanted in zip(outputs.split(_POSITIONS), truth[places].split(_POSITIONS), strict=True)
        ]
        total = torch.zeros(len(chunk), dtype=torch.float64, device=hidden.device)
        total.index_add_(0, rows.to(hidden.device), torch.cat(losses).to(hidden.device))
        found.append((total * len(target) / chunk.sum(1).to(hidden.device)).cpu())
    return torch.cat(found)


@torch.inference_mode()
def read_causal(lm: LM, context: Sequence[int], target: Sequence[int]) -> tuple[float, bool]:
    """log p(target | context) of a model with a token-causal context, and whether greedy decoding gives the target."""
    _check(lm, context, target)
    row, truth = (torch.tensor(ids, device=lm.device) for ids in ([*context, *target], target))
    places = torch.arange(len(context) - 1, len(row) - 1, device=lm.device)
    hidden = lm.model(row[None], logits_at=places, head=False).hidden[0]
    total, greedy = 0.0, True
    for part, wanted in zip(hidden.split(_POSITIONS), truth.split(_POSITIONS), strict=True):
        log_p = lm.model.head(part).double().log_softmax(-1)
        wanted = wanted.to(log_p.device)
        total += float(log_p.gather(1, wanted[:, None]).sum())
        greedy = greedy and bool((log_p.argmax(-1) == wanted).all())
    return total, greedy


def estimate_loglikelihood(
    lm: LM, context: Sequence[int], target: Sequence[int], draws: int = 128, batch: int = 32, seed: int = 0
) -> float:
    """The estimate of log p(target | context) from `draws` masks; `batch` decides the speed, not the value.

    A single target token is masked by every draw, so one forward gives the exact value; so it does where the context is
    token-causal.
    """
    if _causal(lm):
        return read_causal(lm, context, target)[0]
    _check(lm, context, target)
    generator = torch.Generator().manual_seed(seed)
    masks = draw_masks(len(target), 1 if len(target) == 1 else draws, generator)
    return -float(weigh_masks(lm, context, target, masks, batch).mean())


def decodes_greedily(lm: LM, context: Sequence[int], target: Sequence[int]) -> bool:
    """Whether revealing the surest position first, one by one on a canvas of the target's length, gives the target."""
    if _causal(lm):
        return read_causal(lm, context, target)[1]
    _check(lm, context, target)
    row = decode(lm, [context], "one-by-one", len(target), block=None, stop="off")[0]
    return row.tokens == list(target)


def _causal(lm: LM) -> bool:
    layout = lm.model.shape.blocks
    return layout is not None and layout.causal


def _check(lm: LM, context: Sequence[int], target: Sequence[int]) -> None:
    if not target:
        raise TadError("the continuation has no tokens; a likelihood needs at least one")
    check_prompt(lm, context, len(target), "the context")
    check_prompt(lm, target, 0, "the continuation")
