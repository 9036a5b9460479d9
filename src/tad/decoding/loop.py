"""The decoding loop: feed, propose, reveal, until no mask is left. On token ids only.

One batch of rows on one canvas, prompts padded on the left so that the generated part shares its columns. Rows do
not see each other: a row gives the same tokens and the same number of forwards alone or in any batch. The host reads
one small tensor per forward; everything else stays on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tad.decoding.canvas import lay_out
from tad.decoding.decoders import Decoder
from tad.decoding.proposal import Proposal, propose
from tad.decoding.rule import Candidates, Credit, force_progress
from tad.decoding.schedule import Plan
from tad.decoding.table import BlockTable, keep_rows
from tad.models import AttentionRule, MaskedDiffusionModel, SpecialTokens

# Logits of this many positions are held at once, so that memory does not grow with batch x candidates x vocabulary.
_LOGIT_BYTES = 512 * 2**20


@dataclass
class Decoded:
    """One finished row."""

    tokens: list[int]  # the generated part, gen_length long
    steps: list[int]  # forward (1, 2, ...) that revealed each position; 0 where the end was filled
    confidence: list[float]  # probability of each token when it was revealed; 0 where filled
    forwards: int
    seconds: float  # from the start of its batch to its own end
    ends: tuple[int, ...] = field(repr=False, default=())

    @property
    def content(self) -> list[int]:
        """The tokens up to and including the first end token."""
        for i, token in enumerate(self.tokens):
            if token in self.ends:
                return self.tokens[: i + 1]
        return self.tokens

    @property
    def answer(self) -> list[int]:
        """The tokens before the first end token."""
        content = self.content
        return content[:-1] if content and content[-1] in self.ends else content

    @property
    def tpf(self) -> float:
        """Tokens per forward: content tokens, the first end token included, over forwards."""
        return len(self.content) / self.forwards

    @property
    def tpf_all(self) -> float:
        """All positions of the generated part, end filler included, over forwards."""
        return len(self.tokens) / self.forwards


@dataclass(frozen=True)
class Step:
    """What one forward revealed in one row; handed to the callback."""

    row: int  # index into the prompts of this call
    forward: int  # 1, 2, ...
    positions: list[int]  # in the generated part
    tokens: list[int]
    confidence: list[float]
    fed: int  # columns this row fed
    created: int  # blocks that exist


StepCallback = Callable[[Step], None]


@dataclass
class _Rows:
    """Per-row tensors of the batch; `canvas` is [rows, columns]."""

    canvas: Tensor
    pad: Tensor  # [rows] columns of left padding
    seed: Tensor  # [rows]
    origin: Tensor  # [rows] index into the prompts
    steps: Tensor  # [rows, length]
    confidence: Tensor  # [rows, length]
    hidden: Tensor | None  # [rows, columns + 1, width] last output of every column, kept where a cache is
    credit: Tensor | None  # [rows, length, vocab]


def decode_batch(
    model: MaskedDiffusionModel,
    prompts: Sequence[Sequence[int]],
    decoder: Decoder,
    length: int,
    tokens: SpecialTokens,
    shift: int,
    seeds: Sequence[int],
    on_step: StepCallback | None = None,
) -> list[Decoded]:
    """Decode all prompts as one batch. Arguments are taken as checked; `tad.decoding.decode` checks them."""
    return _Batch(
        model, prompts, decoder.prepared(length, shift), length, tokens, shift, seeds, on_step
    ).run()


class _Batch:
    def __init__(
        self,
        model: MaskedDiffusionModel,
        prompts: Sequence[Sequence[int]],
        decoder: Decoder,
        length: int,
        tokens: SpecialTokens,
        shift: int,
        seeds: Sequence[int],
        on_step: StepCallback | None,
    ) -> None:
        self.model, self.decoder, self.tokens, self.shift = model, decoder, tokens, shift
        self.length, self.on_step = length, on_step
        rows = len(prompts)
        canvas, pad = lay_out(prompts, length, tokens)
        self.columns = canvas.shape[1]
        self.prompt = self.columns - length
        self.padded = bool(pad.any())
        self.device = device = model.device
        stores = decoder.cache.stores
        shape = model.shape
        self.rows = _Rows(
            canvas=canvas.to(device),
            pad=pad.to(device),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            origin=torch.arange(rows, device=device),
            steps=torch.zeros(rows, length, dtype=torch.int64, device=device),
            confidence=torch.zeros(rows, length, dtype=torch.float32, device=device),
            hidden=torch.zeros(rows, self.columns + 1, shape.width, dtype=model.dtype, device=device)
            if stores
            else None,
            credit=torch.zeros(rows, length, shape.vocab, device=device)
            if isinstance(decoder.rule, Credit)
            else None,
        )
        self.table = BlockTable.start(rows, length, decoder.schedule.block or length, device)
        self.cache = model.new_cache(rows, self.columns) if stores else None
        self.done: list[Decoded | None] = [None] * rows

    @torch.inference_mode()
    def run(self) -> list[Decoded]:
        self.began = time.perf_counter()
        while len(self.rows.canvas):
            self.step()
        return [row for row in self.done if row is not None]

    @property
    def generated(self) -> Tensor:
        """[rows, length] view of the canvas."""
        return self.rows.canvas[:, self.prompt :]

    def step(self) -> None:
        """One forward for every row that still has masks; rows that have none leave first."""
        masked = self.generated == self.tokens.mask
        finished = self._fill_ends(masked)
        self.table.observe(masked)
        plan = self.decoder.schedule.plan(self.table, masked)
        feed = self.decoder.cache.feed(self.table, self.prompt, plan.visible)
        if self.decoder.opens_with_first(self.shift):
            # The first position's logits come from the column before it, which only an opening forward feeds.
            first = self.prompt + self.table.current * self.table.size
            here = torch.arange(self.columns, device=self.device)[self.prompt :] == first[:, None]
            plan.candidates = plan.candidates & (here | ~feed.opening[:, None])
        count = plan.candidates.sum(1)
        # The one read of this step: who is finished, what to feed, how many candidates.
        columns = (finished.long(), feed.start, feed.end, count, self.table.forwards_in_block, self.rows.pad)
        facts = torch.stack(columns, dim=1).tolist()
        if any(fact[0] for fact in facts):
            keep = self._leave([bool(fact[0]) for fact in facts])
            facts = [fact for fact in facts if not fact[0]]
            if not facts:
                return
            for record in (plan, feed):
                keep_rows(record, keep)
        _, starts, ends, counts, spent, pads = (list(column) for column in zip(*facts, strict=True))
        candidates = self._candidates(plan, feed.opening, max(counts), spent, pads)
        hidden = self._forward(starts, ends, candidates.position)
        proposal = self._propose(hidden, candidates)
        score = proposal.score(self.decoder.rule.score)
        reveal = self.decoder.rule.reveal(proposal, candidates) & candidates.valid
        reveal = force_progress(reveal, score, candidates, self.table.blocks)
        self._write(reveal, proposal, candidates)
        if self.on_step is not None:
            self._report(reveal, proposal, candidates, starts, ends)

    def _fill_ends(self, masked: Tensor) -> Tensor:
        """Which rows are finished; `masked` is brought up to date where a fill removes masks."""
        stop = self.decoder.stop
        if stop != "off":
            ends = torch.tensor(self.tokens.ends, device=self.device)
            is_end = torch.isin(self.generated, ends)
            after = is_end.long().cumsum(1) - is_end.long() > 0  # strictly behind the first end token
            if stop == "end":
                open_before = (masked & ~after).any(1, keepdim=True)
                fill = masked & after & ~open_before
            else:
                fill = after
            self.generated.masked_fill_(fill, self.tokens.eos)
            self.rows.steps.masked_fill_(fill, 0)
            self.rows.confidence.masked_fill_(fill, 0.0)
            masked &= ~fill
        if self.decoder.schedule.block_causal:
            # A pipelined canvas that met an end token does not grow: what never existed is filled when the rest is done.
            exists = (
                torch.arange(self.length, device=self.device)
                < (self.table.created * self.table.size)[:, None]
            )
            over = self.table.ended & ~(masked & exists).any(1)
            fill = masked & over[:, None]
            self.generated.masked_fill_(fill, self.tokens.eos)
            masked &= ~fill
        return ~masked.any(1)

    def _candidates(
        self, plan: Plan, opening: Tensor, width: int, spent: list[int], pads: list[int]
    ) -> Candidates:
        """Gather the candidate positions of each row, in order, padded to `width`."""
        position = plan.candidates.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        valid = plan.candidates.gather(1, position)
        must = plan.must.gather(1, position)
        if not self.decoder.rule.forced:
            only = opening if self.decoder.opens_with_first(self.shift) else torch.zeros_like(opening)
            must = must * only[:, None]
        lengths = [self.columns - pad for pad in pads]
        return Candidates(position, valid, must, spent, lengths, self.length)

    def _forward(self, starts: list[int], ends: list[int], position: Tensor) -> Tensor:
        """The outputs that predict `position` ([rows, m] in the generated part): [rows, m, width]."""
        source = self.prompt + position - self.shift
        rows, canvas = self.rows, self.rows.canvas
        keys = None
        if self.padded:
            keys = torch.arange(self.columns, device=self.device) >= rows.pad[:, None]
        blocks = None
        if self.decoder.schedule.block_causal:
            index = torch.arange(self.columns, device=self.device) - self.prompt
            blocks = (torch.div(index, self.table.size, rounding_mode="floor") + 1).clamp(min=0)
            blocks = blocks.expand(len(canvas), -1)
        if rows.hidden is None or self.cache is None:
            end = max(ends)
            rule = AttentionRule(
                None if keys is None else keys[:, :end], None if blocks is None else blocks[:, :end]
            )
            hidden = self._outputs(canvas[:, :end], rule)
            return _gather(hidden, source)
        rule = AttentionRule(keys, blocks)
        at: Tensor | slice
        if len(set(starts)) == len(set(ends)) == 1:
            at = slice(starts[0], ends[0])
            columns = torch.arange(starts[0], ends[0], device=self.device).expand(len(canvas), -1)
        else:
            fed = max(end - start for start, end in zip(starts, ends, strict=True))
            columns = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
                fed, device=self.device
            )
            at = columns = columns.masked_fill(columns >= torch.tensor(ends, device=self.device)[:, None], -1)
        slots = columns.clamp(min=0)
        out = self.model(
            canvas.gather(1, slots),
            position_ids=(slots - rows.pad[:, None]).clamp(min=0),
            rule=rule,
            cache=self.cache,
            at=at,
            head=False,
        ).hidden
        slots = (columns % (self.columns + 1))[:, :, None].expand_as(out)
        rows.hidden.scatter_(1, slots, out)
        return _gather(rows.hidden, source)

    def _outputs(self, canvas: Tensor, rule: AttentionRule) -> Tensor:
        """Outputs of a whole canvas; with guidance, the unconditional rows' follow along the width."""
        position_ids = (torch.arange(canvas.shape[1], device=self.device) - self.rows.pad[:, None]).clamp(
            min=0
        )
        if self.decoder.sampling.cfg == 0:
            hidden = self.model(canvas, position_ids=position_ids, rule=rule, head=False).hidden
            assert hidden is not None
            return hidden
        blind = canvas.clone()
        blind[:, : self.prompt] = self.tokens.mask
        twice = AttentionRule(
            *(None if part is None else part.repeat(2, 1) for part in (rule.keys, rule.blocks))
        )
        both = torch.cat((canvas, blind)), position_ids.repeat(2, 1)
        hidden = self.model(both[0], position_ids=both[1], rule=twice, head=False).hidden
        assert hidden is not None
        return torch.cat(hidden.chunk(2), dim=-1)

    def _propose(self, hidden: Tensor, candidates: Candidates) -> Proposal:
        """Head and scores at the candidates, a chunk of positions at a time."""
        rows, width = candidates.position.shape
        flat = hidden.reshape(rows * width, -1)
        position = candidates.position.reshape(-1)
        seed = self.rows.seed[:, None].expand(rows, width).reshape(-1)
        step = (self.table.forwards + 1)[:, None].expand(rows, width).reshape(-1)
        chunk = max(1, _LOGIT_BYTES // (4 * self.model.shape.vocab))
        parts = []
        for low in range(0, len(flat), chunk):
            here = slice(low, low + chunk)
            logits = self._logits(flat[here])
            if self.rows.credit is not None and isinstance(self.decoder.rule, Credit):
                logits = self._credit(self.decoder.rule, logits, here, candidates)
            parts.append(
                propose(
                    logits,
                    self.decoder.sampling,
                    self.tokens.mask,
                    self.tokens.ends,
                    seed[here],
                    step[here],
                    position[here],
                )
            )
        return Proposal(
            *(
                torch.cat([getattr(part, name) for part in parts]).view(rows, width)
                for name in ("token", "confidence", "odds", "entropy", "margin")
            )
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        cfg = self.decoder.sampling.cfg
        if cfg == 0:
            return self.model.head(hidden)
        with_prompt, without = (self.model.head(part) for part in hidden.chunk(2, dim=-1))
        return without + (cfg + 1) * (with_prompt - without)

    def _credit(self, rule: Credit, logits: Tensor, here: slice, candidates: Candidates) -> Tensor:
        """Fuse and store credit at the valid candidates of this chunk."""
        assert self.rows.credit is not None
        rows, width = candidates.position.shape
        entry = torch.arange(rows * width, device=self.device)[here]
        row, place = entry // width, candidates.position.reshape(-1)[here]
        old = self.rows.credit[row, place]
        new, fused = rule.accumulate(old, logits.float())
        valid = candidates.valid.reshape(-1)[here]
        self.rows.credit[row, place] = torch.where(valid[:, None], new, old)
        return fused

    def _write(self, reveal: Tensor, proposal: Proposal, candidates: Candidates) -> None:
        """Put the revealed tokens on the canvas, with step and confidence."""
        self.table.count_forward()
        step = self.table.forwards[:, None].expand_as(reveal)
        for target, value in (
            (self.generated, proposal.token),
            (self.rows.steps, step),
            (self.rows.confidence, proposal.confidence),
        ):
            old = target.gather(1, candidates.position)
            target.scatter_(1, candidates.position, torch.where(reveal, value.to(target.dtype), old))
        ends = torch.isin(
            proposal.token, torch.tensor(self.decoder.growth_ends(self.tokens), device=self.device)
        )
        self.table.ended = self.table.ended | (reveal & ends).any(1)

    def _leave(self, finished: list[bool]) -> Tensor:
        """Hand out the finished rows and drop them from the batch; returns the indices kept."""
        gone = torch.tensor([i for i, is_done in enumerate(finished) if is_done], device=self.device)
        keep = torch.tensor(
            [i for i, is_done in enumerate(finished) if not is_done], device=self.device
        ).long()
        seconds = time.perf_counter() - self.began
        columns = (
            self.rows.origin,
            self.generated,
            self.rows.steps,
            self.rows.confidence,
            self.table.forwards,
        )
        for origin, ids, steps, confidence, forwards in zip(
            *(part.index_select(0, gone).tolist() for part in columns), strict=True
        ):
            self.done[origin] = Decoded(ids, steps, confidence, forwards, seconds, self.tokens.ends)
        keep_rows(self.rows, keep)
        keep_rows(self.table, keep)
        if self.cache is not None:
            self.cache.keep(keep)
        return keep

    def _report(
        self, reveal: Tensor, proposal: Proposal, candidates: Candidates, starts: list[int], ends: list[int]
    ) -> None:
        assert self.on_step is not None
        origins, forwards = self.rows.origin.tolist(), self.table.forwards.tolist()
        created = self.table.created.tolist()
        for row, origin in enumerate(origins):
            here = reveal[row]
            self.on_step(
                Step(
                    row=origin,
                    forward=forwards[row],
                    positions=candidates.position[row][here].tolist(),
                    tokens=proposal.token[row][here].tolist(),
                    confidence=proposal.confidence[row][here].tolist(),
                    fed=ends[row] - starts[row],
                    created=created[row],
                )
            )


def _gather(hidden: Tensor, source: Tensor) -> Tensor:
    """hidden [rows, columns, width] at source [rows, m]."""
    return hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[-1]))
