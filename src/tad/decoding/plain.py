"""The plain forward: the model's own, over the living rows. The specification of every other one; any device, any family.

Living rows are kept in the first slots, and KV positions that none of them uses are left out, so that a forward costs what
its rows need, whatever the state has room for. Guidance and a second prompt (`Request.scorer_prompt`) are further views of
the same rows in one forward, whose outputs follow each other along the width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tad.decoding.prefixes import Held
from tad.decoding.sampler import Samples, measure, sample
from tad.decoding.state import DecodeSpec, DecodeState, Request, RowFacts
from tad.decoding.step import Queries, decide, select_candidates, step
from tad.decoding.unmasking import Credit, OwnCanvas, TopKPerStep
from tad.models import AttentionMask, MaskedDiffusionModel


class PlainSizes(NamedTuple):
    """What the host knows of the living rows."""

    facts: list[RowFacts]
    pads: list[int]  # positions of padding before each row's prompt
    canvases: list[OwnCanvas]
    first: int  # KV position that any row uses
    uneven: bool  # whether some row has padding on either side of it

    @property
    def widest(self) -> int:
        return max(1, *(fact.candidates for fact in self.facts))  # a forward that only stores reveals nothing


class PlainForward:
    """Rows of one spec. `scorer` is the model that scores the tokens, this one by default. Steps run inside `context`."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        spec: DecodeSpec,
        slots: int,
        scorer: MaskedDiffusionModel | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.spec, self.slots, self.context = model, spec, slots, context
        self.scorer = scorer or model
        self.device = model.device
        self.state = DecodeState.empty(spec, slots, self.device)
        self.cache = model.new_cache(slots, spec.kv_len) if spec.decoder.cache.stores else None
        # The last output of every position; the last entry takes what belongs nowhere.
        width = model.shape.width if spec.keeps_outputs else 0
        self.kept = torch.zeros(slots, spec.kv_len + 1, width, dtype=model.dtype, device=self.device)
        self.held: dict[int, Held] = {}  # by slot

    def grown(self, slots: int) -> PlainForward:
        """The same rows with room for more."""
        other = PlainForward(self.model, self.spec, slots, self.scorer, self.context)
        other.state.put(torch.arange(self.slots, device=self.device), self.state)
        other.kept[: self.slots] = self.kept
        if self.cache is not None and other.cache is not None:
            pairs = ((self.cache.keys, other.cache.keys), (self.cache.values, other.cache.values))
            for own, new in pairs:
                for source, target in zip(own, new, strict=True):
                    target[: self.slots] = source
        other.held = self.held
        return other

    def compact(self, used: list[int]) -> dict[int, int]:
        """Move rows to the first slots: where each that moved now is."""
        free = [slot for slot in range(len(used)) if slot not in used]
        moves = dict(zip([slot for slot in used if slot >= len(used)], free, strict=True))
        caches = [] if self.cache is None else [*self.cache.keys, *self.cache.values]
        for source, target in moves.items():
            for tensor in (*self.state.tensors(), self.kept, *caches):
                tensor[target] = tensor[source]
            self.held.pop(target, None)
            if source in self.held:
                self.held[target] = self.held[source]
        return moves

    def copy_keys(self, source: Tensor, target: Tensor) -> None:
        """Keys and values from some slots and KV positions [n, 2] to others."""
        assert self.cache is not None
        for part in (*self.cache.keys, *self.cache.values):
            (slot, place), (to_slot, to_place) = (one.to(part.device).unbind(1) for one in (source, target))
            part[to_slot, :, to_place] = part[slot, :, place]

    def close(self, failed: bool = False) -> None:
        """Nothing outlives this object."""

    def run(self, rows: Mapping[int, tuple[Request, RowFacts]]) -> None:
        """One step of the rows in the first slots."""
        spec = self.spec
        requests, facts = zip(*(rows[slot] for slot in range(len(rows))), strict=True)
        pads = [spec.prompt_len - len(request.prompt) for request in requests]
        scorer_pads = [
            spec.prompt_len - len(request.scorer_prompt)
            for request in requests
            if request.scorer_prompt is not None
        ]
        first = min(pads + scorer_pads)
        sizes = PlainSizes(
            list(facts),
            pads,
            [
                OwnCanvas(len(request.prompt) + spec.length, fact.spent)
                for request, fact in zip(requests, facts, strict=True)
            ],
            first,
            uneven=any(pad != first for pad in pads + scorer_pads)
            or any(spec.own_length(request) != spec.length for request in requests),
        )
        with self.context():
            step(self.state.first(len(rows)), self, sizes)

    # The parts of a step

    def outputs(self, rows: DecodeState, sizes: PlainSizes) -> tuple[Queries, Tensor]:
        """What is asked, and [n, width], further views behind each other along the width."""
        position, valid, forced = select_candidates(rows, self.spec, sizes.widest)
        row = torch.arange(len(position), device=self.device)[:, None].expand_as(position)
        queries = Queries(position, valid, forced, row.reshape(-1), position.reshape(-1))
        # The KV positions whose outputs predict the candidates, from the first one that is used.
        source = rows.prompt_len + position - self.spec.logit_shift - sizes.first
        if self.spec.given and not self.spec.scored:  # nobody asks a model
            out = torch.zeros(position.numel(), 0, device=self.device)
        elif self.cache is None:
            out = self._all_positions(rows, source, sizes)
        else:
            out = self._query_range(rows, source, sizes)
        return queries, out.reshape(position.numel(), -1)

    def _all_positions(self, rows: DecodeState, source: Tensor, sizes: PlainSizes) -> Tensor:
        first, end = sizes.first, max(fact.end for fact in sizes.facts)
        canvas = rows.canvas[:, first:end]
        views = [(self.scorer if self.spec.given else self.model, canvas, rows.pad)]
        if self.spec.decoder.sampling.cfg:
            blind = canvas.clone()
            blind[:, : rows.prompt_len - first] = self.spec.tokens.mask
            views.append((self.model, blind, rows.pad))
        if rows.scorer_prompt is not None and rows.scorer_pad is not None:
            other = torch.cat((rows.scorer_prompt, rows.generated), dim=1)[:, first:end]
            views.append((self.scorer, other, rows.scorer_pad))
        if all(model is views[0][0] for model, _, _ in views):
            canvas, pad = torch.cat([view[1] for view in views]), torch.cat([view[2] for view in views])
            hidden = self._hidden(views[0][0], canvas, pad, rows, source.repeat(len(views), 1), sizes)
            return torch.cat(hidden.chunk(len(views)), dim=-1)
        return torch.cat([self._hidden(*view, rows, source, sizes) for view in views], dim=-1)

    def _hidden(
        self,
        model: MaskedDiffusionModel,
        canvas: Tensor,  # [views, n]
        pad: Tensor,
        rows: DecodeState,
        source: Tensor,
        sizes: PlainSizes,
    ) -> Tensor:
        place = torch.arange(sizes.first, sizes.first + canvas.shape[1], device=self.device)
        out = model(
            canvas,
            position_ids=(place - pad[:, None]).clamp(min=0),
            mask=self._mask(model, rows, place, pad, sizes),
            logits_at=source,
            head=False,
        ).hidden
        assert out is not None
        return out

    def _query_range(self, rows: DecodeState, source: Tensor, sizes: PlainSizes) -> Tensor:
        assert self.cache is not None
        facts, first, count = sizes.facts, sizes.first, len(sizes.facts)
        place = torch.arange(first, self.spec.kv_len, device=self.device)
        cache_position: Tensor | slice
        even = len({fact.end for fact in facts}) == 1 and not any(fact.gap for fact in facts)
        starts = {fact.start for fact in facts}
        if even and (len(starts) == 1 or [fact.start for fact in facts] == sizes.pads):
            cache_position = slice(min(starts) - first, facts[0].end - first)
            position = place[cache_position].expand(count, -1)
            index = source - cache_position.start
        else:
            widest = max(fact.queries for fact in facts)
            low, gap = (part[:, None] for part in rows.gap.unbind(1))
            position = rows.start[:, None] + torch.arange(widest, device=self.device)
            position = torch.where(position < low, position, position + gap)
            end = (rows.start + rows.queries)[:, None] + gap
            cache_position = (position - first).masked_fill(position >= end, -1)
            position = position.minimum(end - 1)
            index = source - rows.start[:, None] + first
            index = torch.where(source + first < low, index, index - gap)
        keeps = self.spec.keeps_outputs
        out = self.model(
            rows.canvas.gather(1, position),
            position_ids=(position - rows.pad[:, None]).clamp(min=0),
            mask=self._mask(self.model, rows, place, rows.pad, sizes),
            cache=self.cache.narrow(count, first),
            cache_position=cache_position,
            logits_at=None if keeps else index.clamp(0, position.shape[1] - 1),
            head=False,
        ).hidden
        assert out is not None
        if not keeps:
            return out
        kept = self.kept[:count, first:]
        if isinstance(cache_position, slice):
            kept[:, cache_position] = out
        else:
            kept.scatter_(1, (cache_position % kept.shape[1])[:, :, None].expand_as(out), out)
        return kept.gather(1, source[:, :, None].expand(-1, -1, out.shape[-1]))

    def _mask(
        self, model: MaskedDiffusionModel, rows: DecodeState, place: Tensor, pad: Tensor, sizes: PlainSizes
    ) -> AttentionMask:
        """Who sees whom among the KV positions `place` [m]; `pad` [views]."""
        real = None
        spec = self.spec
        layout = spec.layout if spec.decoder.schedule.block_causal else None  # else the asked model's own
        if sizes.uneven:
            end = rows.prompt_len + rows.length.repeat(len(pad) // len(rows.canvas))
            real = (place >= pad[:, None]) & (place < end[:, None])
        opened = rows.open_block(spec)
        if opened is not None:
            opened = opened.repeat(len(pad) // len(opened), 1) - pad[:, None]
        return model.attention_mask(
            place - pad[:, None], rows.prompt_len - pad[:, None], real, layout, opened
        )

    def sample(self, outputs: Tensor, rows: DecodeState, row: Tensor, position: Tensor) -> Samples:
        spec = self.spec
        sampling, mask = spec.decoder.sampling, spec.tokens.mask
        token = None if rows.given is None else rows.given[row, position]
        if token is not None and not spec.scored:
            sure = torch.ones_like(token, dtype=torch.float32)
            return Samples(token, sure, sure, sure, sure)
        views = outputs.split(self.model.shape.width, dim=-1)
        logits = (self.scorer if spec.given else self.model).head(views[0]).to(self.device)
        if sampling.cfg:
            without = self.model.head(views[1]).to(self.device)
            logits = without + (sampling.cfg + 1) * (logits - without)
        rule = spec.decoder.rule
        if rows.credit is not None and isinstance(rule, Credit):
            logits = self._credit(rule, logits, rows, row, position)
        if token is not None:
            samples = measure(logits.float(), token)
        else:
            number = (rows.table.forwards + 1)[row]
            samples = sample(logits, sampling, mask, spec.tokens.ends, rows.seed[row], number, position)
        if spec.scored:
            scores = logits if spec.given else self.scorer.head(views[-1]).to(self.device)
            log_p = scores.float().log_softmax(-1)
            samples.scorer_log_p = log_p.gather(-1, samples.token[:, None])[:, 0]
            log_p[:, mask] = float("-inf")
            samples.scorer_best = log_p.amax(-1)
        return samples

    def _credit(
        self, rule: Credit, logits: Tensor, rows: DecodeState, row: Tensor, position: Tensor
    ) -> Tensor:
        """Fuse credit, and keep it at the candidates; what is asked beside them is padding."""
        assert rows.credit is not None
        old = rows.credit[row, position]
        new, fused = rule.accumulate(old, logits.float())
        valid = rows.candidates[row, position]
        rows.credit[row, position] = torch.where(valid[:, None], new, old)
        return fused

    def decide(self, rows: DecodeState, samples: Samples, queries: Queries, sizes: PlainSizes) -> None:
        rule = self.spec.decoder.rule
        canvases = sizes.canvases if isinstance(rule, TopKPerStep) else None
        decide(rows, self.spec, rule, samples, queries.position, queries.valid, queries.forced, canvases)
