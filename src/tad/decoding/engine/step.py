"""One step for all slots: forward, proposals, reveals, and the plan of the next forward. Nothing is read by the host.

The parts are those of the plain loop: schedules, caches, rules and proposals are the same functions. What is written anew
here is what the loop does with the host's knowledge of the rows, and `Quota`, which the loop answers row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tad.decoding.engine.buckets import StepShape
from tad.decoding.engine.network import Network, compile_whole, sized, spread
from tad.decoding.engine.prepare import Prepared, prepare
from tad.decoding.engine.slots import Lent, Method, Slots
from tad.decoding.proposal import Proposal, propose
from tad.decoding.rule import Candidates, Quota, Rule, force_progress

# Logits of this many positions are held at once.
_LOGIT_BYTES = 256 * 2**20
_SCORES = ("token", "confidence", "odds", "entropy", "margin")


class Stepper:
    """Steps of one method over one set of slots. `compiled` fuses the scores, `fused` also the many small kernels of
    preparing and deciding, which pays where a step is short and the same decoder is used for long."""

    def __init__(
        self,
        network: Network,
        method: Method,
        slots: Slots,
        lent: Lent,
        compiled: bool,
        fused: bool,
        packed: bool = False,
    ) -> None:
        self.network, self.method, self.slots, self.lent = network, method, slots, lent
        rule = method.decoder.rule
        # Made here: a step itself must not bring anything from the host.
        self.rotary = network.rotary(method.columns)
        device = slots.canvas.device
        counts = torch.tensor(rule.counts, device=device) if isinstance(rule, Quota) else None
        self.score = _scorer(method, compiled)
        # Block-causal rows hide some of their keys, which packed attention cannot.
        packed = packed and not method.decoder.schedule.block_causal
        self.prepare = _preparer(method, fused, packed)
        self.decide = _decider(method, with_tensors(rule, device), counts, fused)
        if fused:
            torch._dynamo.maybe_mark_dynamic(slots.canvas, 1)
            for tensor in slots.tensors() if len(slots.canvas) > 1 else ():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def step(self, shape: StepShape, masked: bool) -> None:
        """One forward of every living row, and what follows from it."""
        rows = self.slots.working()
        at: Prepared = self.prepare(rows, shape.tokens, shape.window, shape.candidates, shape.widest, masked)
        hidden = self.network.outputs(
            rows.canvas,
            self.lent,
            at,
            self.rotary,
            shape.window,
            shape.widest,
            self.method.keeps_outputs,
        )
        self.decide(rows, self._propose(hidden, rows, at), at.candidate, at.valid, at.must)
        self.slots.keep(rows)

    def _propose(self, hidden: Tensor, rows: Slots, at: Prepared) -> tuple[Tensor, ...]:
        """Head and scores at the candidates: the fields of a proposal, [slots, widest] each."""
        slots, widest = at.candidate.shape
        seed, step = rows.seed[at.wanted_row], (rows.table.forwards + 1)[at.wanted_row]
        position = at.wanted_column + self.method.shift - self.method.prompt
        chunk = max(1, _LOGIT_BYTES // (4 * self.network.shape.vocab))
        found = [
            self.score(
                self.network.model.head(hidden[low : low + chunk]),
                *(part[low : low + chunk] for part in (seed, step, position)),
            )
            for low in range(0, len(hidden), chunk)
        ]
        joined = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)]
        if slots == 1:
            return tuple(part[None] for part in joined)
        return tuple(spread(part, at.some.lane, slots, widest) for part in joined)


def with_tensors(rule: Rule, device: torch.device) -> Rule:
    """The rule with its numbers on the device: what was compiled for one threshold then serves every other."""
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    numbers: dict[str, Any] = {
        name: torch.tensor(value, device=device) for name, value in values.items() if isinstance(value, float)
    }
    return replace(rule, **numbers)


def reveal(
    rows: Slots,
    method: Method,
    rule: Rule,
    proposal: Proposal,
    candidates: Candidates,
    counts: Tensor | None,
) -> None:
    """Decide, and write the tokens with their step and confidence. `rule` is the method's, with its numbers on the device;
    `counts` is the quota of each forward of a block."""
    table = rows.table
    score = proposal.score(rule.score)
    if counts is not None:
        spent = table.forwards_in_block.clamp(max=len(counts) - 1)
        chosen = first_so_many(score, candidates.valid, counts[spent])
    else:
        chosen = rule.reveal(proposal, candidates) & candidates.valid
    chosen = force_progress(chosen, score, candidates, table.blocks)
    table.forwards = table.forwards + rows.alive
    table.forwards_in_block = table.forwards_in_block + rows.alive
    rows.shown.fill_(-1)
    step = table.forwards[:, None].expand_as(chosen)
    for target, value in (
        (rows.canvas[:, rows.prompt :], proposal.token),
        (rows.steps, step),
        (rows.confidence, proposal.confidence),
        (rows.shown, proposal.token),
        (rows.shown_confidence, proposal.confidence),
    ):
        old = target.gather(1, candidates.position)
        target.scatter_(1, candidates.position, torch.where(chosen, value.to(target.dtype), old))
    ends = _is_any(proposal.token, method.decoder.growth_ends(method.tokens))
    table.ended = table.ended | (chosen & ends).any(1)


def plan(rows: Slots, method: Method) -> None:
    """What the next forward of each row feeds and may reveal; rows without masks die here."""
    decoder, table, tokens = method.decoder, rows.table, method.tokens
    generated = rows.canvas[:, rows.prompt :]
    masked = generated == tokens.mask
    if decoder.stop != "off":
        is_end = _is_any(generated, tokens.ends)
        after = is_end.long().cumsum(1) - is_end.long() > 0  # strictly behind the first end token
        fill = after
        if decoder.stop == "end":
            fill = masked & after & ~(masked & ~after).any(1, keepdim=True)
        generated.masked_fill_(fill, tokens.eos)
        rows.steps.masked_fill_(fill, 0)
        rows.confidence.masked_fill_(fill, 0.0)
        masked = masked & ~fill
    place = torch.arange(method.length, device=masked.device)
    if decoder.schedule.block_causal:
        # A pipelined canvas that met an end token does not grow: what never existed is filled when the rest is done.
        exists = place < (table.created * table.size)[:, None]
        fill = masked & (table.ended & ~(masked & exists).any(1))[:, None]
        generated.masked_fill_(fill, tokens.eos)
        masked = masked & ~fill
    rows.alive = rows.alive & masked.any(1)
    table.observe(masked)
    planned = decoder.schedule.plan(table, masked)
    feed = decoder.cache.feed(table, rows.prompt, planned.visible)
    candidates = planned.candidates & rows.alive[:, None]
    if decoder.opens_with_first(method.shift):
        # The first position's logits come from the column before it, which only an opening forward feeds.
        here = place == (table.current * table.size)[:, None]
        candidates = candidates & (here | ~feed.opening[:, None])
    rows.candidates, rows.must, rows.opening = candidates, planned.must, feed.opening
    rows.start = feed.start.maximum(rows.pad)
    left_out = 0
    if feed.gap is not None:
        rows.gap, left_out = feed.gap, feed.gap[:, 1]
    rows.fed = (feed.end - rows.start - left_out) * rows.alive
    counts = (rows.alive.long(), rows.fed, candidates.sum(1), table.forwards, table.created)
    rows.facts = torch.stack(counts, dim=1)


def first_so_many(score: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """The `count` [rows] best valid entries of each row, ties to the lowest position."""
    order = score.masked_fill(~valid, float("-inf")).argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(score.shape[1], device=score.device).expand_as(order)
    return torch.zeros_like(order).scatter(1, order, rank) < torch.where(valid, count[:, None], 0)


def _is_any(ids: Tensor, tokens: Iterable[int]) -> Tensor:
    return reduce(torch.logical_or, [ids == token for token in tokens])


def _scorer(method: Method, compiled: bool) -> Callable[..., Any]:
    sampling, mask, ends = method.decoder.sampling, method.tokens.mask, method.tokens.ends

    def score(logits: Tensor, seed: Tensor, step: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        found = propose(logits, sampling, mask, ends, seed, step, position)
        return tuple(getattr(found, name) for name in _SCORES)

    # The noise of sampling is a hash whose 64-bit constants the compiler's back ends refuse; sampling is rare.
    return sized(score) if compiled and sampling.temperature == 0 else score


def _preparer(method: Method, fused: bool, packed: bool) -> Callable[..., Any]:
    def ready(rows: Slots, *sizes: Any) -> Prepared:
        return prepare(rows, method, packed, *sizes)

    return compile_whole(ready, dynamic=True) if fused else ready


def _decider(method: Method, rule: Rule, counts: Tensor | None, fused: bool) -> Callable[..., Any]:
    def decide(
        rows: Slots, scores: tuple[Tensor, ...], position: Tensor, valid: Tensor, must: Tensor
    ) -> None:
        candidates = Candidates(position, valid, must, [], [], method.length)
        reveal(rows, method, rule, Proposal(*scores), candidates, counts)
        plan(rows, method)

    if not fused:
        return decide
    compiled = compile_whole(decide)

    def call(rows: Slots, scores: tuple[Tensor, ...], position: Tensor, valid: Tensor, must: Tensor) -> None:
        for tensor in (*scores, position, valid, must):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
            if len(tensor) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(rows, scores, position, valid, must)

    return call
