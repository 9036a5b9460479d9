"""The sampler: from logits to the token a position would become, and how sure the model is of it.

Everything is computed in fp32 from the head's output in its own dtype. The mask token is never sampled, but it keeps
its share of the probability, so confidences are those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tad.decoding.noise import gumbel

_PIECES = 16  # of a vocabulary
_COLDEST = 1e-30  # temperature: below it logits would become infinite, and equal


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Greedy by default."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    filtered_scores: bool = False
    """Score the tempered, filtered distribution (Dream's sampler) instead of the plain softmax (LLaDA's)."""
    cfg: float = 0.0
    """Classifier-free guidance: logits = u + (cfg + 1)(c - u), u with the prompt masked. Needs no cache."""
    suppress_ends: Literal["no", "eos-logits", "confidence"] = "no"
    """`eos-logits`: EOS is never sampled. `confidence`: end tokens may be sampled but have confidence 0."""


@dataclass
class Samples:
    """Per position: the token, and the scores of the distribution it came from. All [n] or [rows, m]."""

    token: Tensor
    confidence: Tensor  # probability p of the token
    odds: Tensor  # p / (1 - p): orders tokens as p does, without the ties of p near 1
    entropy: Tensor  # nats
    margin: Tensor  # best probability minus second best
    scorer_log_p: Tensor | None = (
        None  # log-probability of the token by a second model or prompt, where one scores
    )
    scorer_best: Tensor | None = None  # that one's largest log-probability of any token but the mask

    def score(self, by: str) -> Tensor:
        """Larger is surer, whatever the measure."""
        return {"confidence": self.odds, "entropy": -self.entropy, "margin": self.margin}[by]


def filter_logits(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """-inf outside the nucleus; the token that crosses `top_p` is kept, and always at least one."""
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(descending=True, dim=-1, stable=True)
        total = ordered.softmax(-1).cumsum(-1)
        drop = (total > top_p).roll(1, dims=-1)
        drop[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), float("-inf"))
    if top_k is not None and top_k < logits.shape[-1]:
        weakest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    return logits


def sample(
    logits: Tensor,  # [n, vocab]
    sampling: Sampling,
    mask_token: int,
    end_tokens: tuple[int, ...],  # EOS first
    seed: Tensor,  # [n] int64, as step and position
    step: Tensor,
    position: Tensor,
) -> Samples:
    """A token for each of n positions, with its scores."""
    logits = logits.float()
    if sampling.suppress_ends == "eos-logits":
        logits = _without(logits, end_tokens[:1])
    tempered = logits / max(sampling.temperature, _COLDEST) if sampling.temperature > 0 else logits
    drawn = filter_logits(tempered, sampling.top_p, sampling.top_k)
    scored = drawn if sampling.filtered_scores else logits
    if drawn is not tempered:
        # Where the filter left the mask token alone, which is never sampled, all others are there again.
        left = _without(drawn, (mask_token,)).amax(-1, keepdim=True)
        drawn = torch.where(left == float("-inf"), tempered, drawn)
    if sampling.temperature > 0:
        drawn = drawn + gumbel(seed, step, position, logits.shape[-1])
    token = _largest(_without(drawn, (mask_token,)))[1][:, 0]
    if sampling.suppress_ends == "confidence":
        # An end token is sampled as ever and loses its confidence, so it is revealed last.
        scored = _without(scored, end_tokens)
    return measure(scored, token)


def measure(logits: Tensor, token: Tensor) -> Samples:
    """Scores of given tokens [n] under softmax(logits) [n, vocab], relative to its largest entry so that near-certainty keeps its digits.

    With weights e = exp(logit - largest) and `rest` their sum without the largest, nothing is subtracted from one:
    a probability of 1 - 1e-9 and one of 1 - 2e-9 still differ in `odds`, and an entropy of 1e-8 is not rounding.
    """
    largest, peak = _largest(logits)
    weight = (logits - largest).exp()
    distance = (largest - logits).clamp(max=1e4)  # finite where a filter put -inf, whose weight is 0
    # By comparison: a scatter would be written out, vocabulary-wide, where all this is compiled.
    token_id = torch.arange(logits.shape[-1], device=logits.device)
    smaller = torch.where(token_id == peak, 0.0, weight)
    rest = smaller.sum(-1)
    own = weight.gather(-1, token[:, None])[:, 0]
    total = 1 + rest
    others = torch.where(token == peak[:, 0], rest, total - own)
    second = smaller.amax(-1)
    return Samples(
        token=token,
        confidence=own / total,
        odds=own / others,
        entropy=rest.log1p() + (weight * distance).sum(-1) / total,
        margin=(1 - second) / total,
    )


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row and where it is first, [n, 1] both. By pieces, so that a device which gives each of them
    to a processor is busy with few rows, too."""
    rows, vocab = logits.shape
    pieces = _PIECES if vocab % _PIECES == 0 else 1
    value, place = logits.reshape(rows, pieces, vocab // pieces).max(-1)
    largest, piece = value.max(-1, keepdim=True)
    return largest, place.gather(-1, piece) + piece * (vocab // pieces)


def _without(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    # By comparison, not by index: an index would come from the host, which a captured step must not ask.
    token_id = torch.arange(logits.shape[-1], device=logits.device)
    for token in tokens:
        logits = logits.masked_fill(token_id == token, float("-inf"))
    return logits
