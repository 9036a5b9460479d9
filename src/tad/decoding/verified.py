"""Lossless decoding: a model fills masks behind what is known, and keeps of them what it would have said token by token.

A forward of a row feeds *clean* tokens, token-causal as in autoregressive decoding: those whose keys are not stored yet, then a
draft. Their outputs are the model's own next tokens; the draft is kept as far as it agrees with them, and one token more is known.
Behind some ends of the clean part it may also feed *groups* of masks: each sees the clean tokens up to its end and itself, in
both directions, and its outputs are the next draft if exactly that much is kept. Without a draft to verify there is one group,
behind what is known; with `Verified.ends`, there are some behind likely ends of the draft too, and no forward only drafts.

The keys of a clean token never depend on a mask, so the output is the autoregressive one, token for token. It is with a temperature,
too: noise depends on seed and position alone, and a draft is sampled with the noise of the token that it guesses. Rows of a batch
stand at different places. Left out: prefix sharing between rows, and CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tad.decoding.result import Decoded, Drafting, Step, StepCallback
from tad.decoding.sampler import Samples, sample
from tad.decoding.schedule import Verified
from tad.decoding.state import DecodeSpec, Request
from tad.decoding.unmasking import Candidates, ContiguousPrefix
from tad.errors import TadError
from tad.models import AttentionMask, KVCache, MaskedDiffusionModel

_LOGIT_BYTES = 256 * 2**20  # of logits held at once


@dataclass
class _Row:
    request: Request
    joined: float  # on the performance counter
    known: list[int]  # the prompt, then what was generated
    stored: int = 0  # leading known tokens whose keys and values are in the cache
    draft: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)  # confidence of each token of the draft
    steps: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    forwards: int = 0
    ended: bool = False
    misses: int = 0  # drafts in a row of which nothing was kept
    resting: int = 0  # forwards to come without masks
    drafting: Drafting = field(default_factory=Drafting)

    @property
    def generated(self) -> int:
        return len(self.steps)

    @property
    def left(self) -> int:
        """Tokens still to generate."""
        return self.request.length - self.generated

    @property
    def clean(self) -> list[int]:
        return [*self.known[self.stored :], *self.draft]

    def ends(self, count: int) -> list[int]:
        """How much of the draft may be kept, of those ends behind which masks are fed; where too little is left to draft, none.

        Without a draft that is the one end there is, else the `count` likeliest by the confidence of its tokens.
        """
        useful = range(min(len(self.draft), self.left - 3) + 1)
        if not self.draft:
            return list(useful)
        chance, likely = 1.0, []
        for end in useful:
            stays = self.sure[end] if end < len(self.draft) else 0.0
            likely.append((chance * (1 - stays), end))
            chance *= stays
        return sorted(end for _, end in sorted(likely, reverse=True)[:count])


class VerifiedBatch:
    """Rows of one spec, a forward each per step. Steps run inside `context`."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        spec: DecodeSpec,
        on_step: StepCallback | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        assert isinstance(spec.decoder.schedule, Verified)
        assert isinstance(spec.decoder.rule, ContiguousPrefix)
        if spec.scored or spec.given:
            raise TadError("decoder 'verified' writes the model's own tokens; none can be given or scored")
        self.model, self.spec, self.on_step, self.context = model, spec, on_step, context
        self.masks = spec.decoder.schedule.draft or 0  # per group
        self.ends, self.rest = spec.decoder.schedule.ends, spec.decoder.schedule.rest
        self.rule: ContiguousPrefix = spec.decoder.rule
        self.rows: list[_Row] = []  # by slot of the cache
        self.joining: list[_Row] = []  # their first forward is to come
        self.cache = self._new_cache(1, spec.kv_len)

    def __len__(self) -> int:
        return len(self.rows) + len(self.joining)

    def _new_cache(self, slots: int, length: int) -> KVCache:
        return self.model.new_cache(slots, length + max(1, self.ends) * self.masks)

    def admit(self, requests: Sequence[Request]) -> None:
        """Let rows in; their prompts are computed in the next step."""
        now = time.perf_counter()
        self.joining += [_Row(request, now, list(request.prompt)) for request in requests]

    @torch.inference_mode()
    def step(self) -> dict[int, Decoded]:
        """One forward of every row; the finished ones leave and are returned by name."""
        with self.context():
            if self.rows:
                self._advance(self.rows, self.cache)
            if self.joining:
                self._join()
        done = {}
        for slot in reversed(range(len(self.rows))):
            row = self.rows[slot]
            if row.ended or not row.left:
                done[row.request.name] = self._finish(row)
                self._free(slot)
        return done

    @torch.inference_mode()
    def drop(self, names: Collection[int]) -> None:
        """Let rows go before their end."""
        self.joining = [row for row in self.joining if row.request.name not in names]
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].request.name in names:
                self._free(slot)

    def close(self, failed: bool = False) -> None:
        """Nothing outlives this object."""

    def _join(self) -> None:
        """The first forward of new rows, in a cache of their own: nobody waits for their prompts' positions."""
        fresh, self.joining = self.joining, []
        longest = max(len(row.known) for row in fresh)
        theirs = self._new_cache(len(fresh), longest)
        self._advance(fresh, theirs)
        first, needed = len(self.rows), len(self.rows) + len(fresh)
        if needed > self.cache.batch:
            grown = self._new_cache(max(needed, 2 * self.cache.batch), self.spec.kv_len)
            self._copy(self.cache, grown, slice(first), slice(first))
            self.cache = grown
        self._copy(theirs, self.cache, slice(len(fresh)), slice(first, needed), longest)
        self.rows += fresh

    def _free(self, slot: int) -> None:
        """A row leaves; the last one takes its slot."""
        last = len(self.rows) - 1
        if slot < last:
            self._copy(self.cache, self.cache, slice(last, last + 1), slice(slot, slot + 1))
            self.rows[slot] = self.rows[last]
        self.rows.pop()

    @staticmethod
    def _copy(source: KVCache, target: KVCache, rows: slice, to: slice, length: int | None = None) -> None:
        length = source.length if length is None else length
        for mine, other in ((source.keys, target.keys), (source.values, target.values)):
            for one, into in zip(mine, other, strict=True):
                into[to, :, :length] = one[rows, :, :length]

    def _advance(self, rows: list[_Row], cache: KVCache) -> None:
        """One forward of these rows, which lie in the first slots of the cache, and what follows from it."""
        groups = [self._ends(row) for row in rows]
        samples, proposed = self._forward(rows, groups, cache)
        scores = [getattr(samples, name).tolist() for name in ("token", "confidence")]
        if any(value != value for value in scores[1]):
            raise TadError("the model's outputs are not numbers (nan); load it with dtype bf16 or fp32")
        outputs, lengths = iter(zip(*scores, strict=True)), iter(proposed.tolist())
        for row, ends in zip(rows, groups, strict=True):
            fed = len(row.clean) + len(ends) * self.masks
            said = [next(outputs) for _ in range(len(row.draft) + 1)]
            drafts = {}
            for end in ends:
                guesses = [next(outputs) for _ in range(self.masks - 1)]
                drafts[end] = guesses[: next(lengths)]
            drafted, kept = len(row.draft), self._keep(row, said)
            row.draft, row.sure = [], []
            if kept in drafts and not row.ended:
                for token, sure in drafts[kept][: max(0, row.left - 1)]:
                    row.draft.append(token)
                    row.sure.append(sure)
            self._report(row, said[: kept + 1], fed, drafted)

    def _ends(self, row: _Row) -> list[int]:
        """The ends of a row behind which this forward has masks."""
        if row.resting:
            row.resting -= 1
            return []
        return row.ends(self.ends) if self.masks > 1 else []

    def _keep(self, row: _Row, said: list[tuple[int, float]]) -> int:
        """Take what the model said: how much of the draft is kept. `said` has the token behind each kept length."""
        row.forwards += 1
        stops = self.spec.tokens.ends if self.spec.decoder.stop != "off" else ()
        kept = 0
        while kept < len(row.draft) and row.draft[kept] == said[kept][0] and said[kept][0] not in stops:
            kept += 1
        row.drafting.count(len(row.draft), kept)
        if row.draft:
            row.misses = 0 if kept else row.misses + 1
            row.resting = min(2 ** max(0, row.misses - 1) - 1, self.rest)
        row.stored = len(row.known) + kept
        for token, sure in said[: kept + 1]:
            row.known.append(token)
            row.steps.append(row.forwards)
            row.confidence.append(sure)
        row.ended = row.known[-1] in stops
        return kept

    def _report(self, row: _Row, tokens: list[tuple[int, float]], fed: int, drafted: int) -> None:
        if self.on_step is not None:
            ids, sure = zip(*tokens, strict=True)
            places = list(range(row.generated - len(ids), row.generated))
            self.on_step(
                Step(row.request.name, row.forwards, places, [*ids], [*sure], fed, 1, drafted=drafted)
            )

    def _forward(self, rows: list[_Row], groups: list[list[int]], cache: KVCache) -> tuple[Samples, Tensor]:
        """Samples of all wanted outputs, [n]: of each row its clean ones from the last known token on, then those of its groups,
        without the last mask's of each. And how many tokens of each group are proposed."""
        masks, device = self.masks, self.model.device
        cleans = [row.clean for row in rows]
        most = max(map(len, groups))
        frontier = max(len(row.known) + len(row.draft) for row in rows)  # groups are stored behind it
        width = max(len(clean) + len(ends) * masks for clean, ends in zip(cleans, groups, strict=True))
        length = frontier + most * masks
        ids = torch.full((len(rows), width), self.spec.tokens.eos)
        place = torch.full((len(rows), width), -1)  # in the cache
        position = torch.zeros(len(rows), width, dtype=torch.int64)
        blocks = torch.arange(length).repeat(len(rows), 1)
        blocks[:, frontier:] = -1
        wanted: list[list[int]] = []
        where: list[tuple[int, int]] = []  # seed and position in the generated part of each wanted output
        for number, (row, clean, ends) in enumerate(zip(rows, cleans, groups, strict=True)):
            count, known = len(clean), len(row.known)
            ids[number, :count] = torch.tensor(clean)
            place[number, :count] = position[number, :count] = torch.arange(row.stored, row.stored + count)
            asked = list(range(known - 1 - row.stored, count))
            guessed = list(range(row.generated, row.generated + len(asked)))
            for group, end in enumerate(ends):
                low, start = count + group * masks, known + end
                into = slice(low, low + masks)
                at = frontier + group * masks
                ids[number, into] = self.spec.tokens.mask
                place[number, into] = torch.arange(at, at + masks)
                position[number, into] = torch.arange(start, start + masks)
                blocks[number, at : at + masks] = start
                asked += range(low, low + masks - 1)
                guessed += range(row.generated + end + 1, row.generated + end + masks)
            wanted.append(asked)
            where += [(row.request.seed, one) for one in guessed]
        widest = max(map(len, wanted))
        logits_at = torch.tensor([[*one, *[0] * (widest - len(one))] for one in wanted])
        noisy = torch.arange(length)[None] >= frontier if most else None
        hidden = self.model(
            ids.to(device),
            position_ids=position.to(device),
            mask=AttentionMask(None, blocks.to(device), None if noisy is None else noisy.to(device)),
            cache=cache.narrow(len(rows), 0, length),
            cache_position=place.to(device),
            logits_at=logits_at.to(device),
            head=False,
        ).hidden
        real = torch.arange(widest) < torch.tensor([len(one) for one in wanted])[:, None]
        samples = self._sample(hidden[real.to(device)], torch.tensor(where, device=device))
        return samples, self._proposed(samples, wanted, groups)

    def _sample(self, hidden: Tensor, where: Tensor) -> Samples:
        """Tokens for outputs [n, width], with the noise that autoregressive decoding has at their positions, and its forwards."""
        spec, parts = self.spec, []
        chunk = max(1, _LOGIT_BYTES // (4 * spec.vocab))
        for low in range(0, len(hidden), chunk):
            seed, position = where[low : low + chunk].unbind(1)
            logits = self.model.head(hidden[low : low + chunk]).to(hidden.device)
            parts.append(
                sample(
                    logits,
                    spec.decoder.sampling,
                    spec.tokens.mask,
                    spec.tokens.ends,
                    seed,
                    position + 1,
                    position,
                )
            )
        names = ("token", "confidence", "odds", "entropy", "margin")
        return Samples(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def _proposed(self, samples: Samples, wanted: list[list[int]], groups: list[list[int]]) -> Tensor:
        """[groups] tokens of each that the rule proposes."""
        index: list[int] = []
        at = 0
        for asked, ends in zip(wanted, groups, strict=True):
            drafted = len(ends) * (self.masks - 1)
            index += range(at + len(asked) - drafted, at + len(asked))
            at += len(asked)
        if not index:
            return torch.zeros(sum(map(len, groups)), dtype=torch.int64)
        picked = torch.tensor(index, device=samples.token.device)
        shape = (-1, self.masks - 1)
        drafts = Samples(
            *(
                getattr(samples, name)[picked].view(shape)
                for name in ("token", "confidence", "odds", "entropy", "margin")
            )
        )
        valid = torch.ones_like(drafts.token, dtype=torch.bool)
        none = torch.zeros_like(drafts.token)
        candidates = Candidates(
            position=none, valid=valid, forced=none, spent=none[:, 0], seed=none[:, 0], forward=none[:, 0],
            length=self.spec.length,
        )  # fmt: skip
        return self.rule.choose(drafts, candidates).sum(1)

    def _finish(self, row: _Row) -> Decoded:
        tokens = row.known[len(row.request.prompt) :]
        filler = row.request.length - len(tokens)
        return Decoded(
            tokens + [self.spec.tokens.eos] * filler,
            row.steps + [0] * filler,
            row.confidence + [0.0] * filler,
            row.forwards,
            time.perf_counter() - row.joined,
            self.spec.tokens.ends,
            drafting=row.drafting,
        )
