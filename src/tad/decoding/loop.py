"""The decoding loop: feed, propose, reveal, until no mask is left. On token ids only.

A session is a batch of rows on one canvas, prompts padded on the left so that the generated part shares its columns.
Rows join and leave it between forwards, and do not see each other: a row gives the same tokens and the same number of
forwards alone or in any batch. The host reads one small tensor per forward; everything else stays on the device.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from tad.decoding.decoders import Decoder
from tad.decoding.proposal import Proposal, propose
from tad.decoding.result import Decoded, Step, StepCallback
from tad.decoding.rows import Rows, extend_cache, resize_table
from tad.decoding.rule import Candidates, Credit, Quota, force_progress
from tad.decoding.schedule import Plan
from tad.decoding.table import BlockTable, append_rows, keep_rows
from tad.errors import TadError
from tad.models import AttentionMask, MaskedDiffusionModel, SpecialTokens
from tad.models.cache import KVCache

# Logits of this many positions are held at once, so that memory does not grow with batch x candidates x vocabulary.
_LOGIT_BYTES = 512 * 2**20


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
    session = Session(model, decoder.prepared(length, shift), tokens, shift, on_step)
    session.join(prompts, length, seeds, range(len(prompts)))
    done: dict[int, Decoded] = {}
    while len(session):
        done |= session.step()
    return [done[row] for row in range(len(prompts))]


def mixes_lengths(decoder: Decoder) -> bool:
    """Whether rows of different generated lengths can share a session: not where the decoder depends on the length."""
    return decoder.schedule.block is not None and not isinstance(decoder.rule, Quota)


class Member(NamedTuple):
    """What the host knows of a row."""

    prompt: int  # tokens
    length: int  # positions to generate
    joined: float  # on the performance counter


class Session:
    """Rows under one decoder (`Decoder.prepared` for their length), stepped one forward at a time."""

    rows: Rows
    table: BlockTable
    cache: KVCache | None = None

    def __init__(
        self,
        model: MaskedDiffusionModel,
        decoder: Decoder,
        tokens: SpecialTokens,
        shift: int,
        on_step: StepCallback | None = None,
    ) -> None:
        self.model, self.decoder, self.tokens, self.shift = model, decoder, tokens, shift
        self.on_step = on_step
        self.device = model.device
        self.prompt = self.length = 0  # columns of the prompts and of the generated parts
        self.members: dict[int, Member] = {}  # by name, in the order of the rows
        self._broken = torch.zeros((), dtype=torch.bool, device=self.device)  # a proposal was not a number

    def __len__(self) -> int:
        return len(self.members)

    @property
    def columns(self) -> int:
        return self.prompt + self.length

    @torch.inference_mode()
    def join(
        self, prompts: Sequence[Sequence[int]], length: int, seeds: Sequence[int], names: Sequence[int]
    ) -> None:
        """Add rows with `length` masks each. `names` are how steps and results call them; they are not in use."""
        if not mixes_lengths(self.decoder) and any(row.length != length for row in self.members.values()):
            raise ValueError(f"rows of this decoder must all have one length, not {length}")
        stay, now = len(self.members), time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self.members[name] = Member(len(prompt), length, now)
        room = (
            max(row.prompt for row in self.members.values()),
            max(row.length for row in self.members.values()),
        )
        before, behind = room[0] - self.prompt, room[1] - self.length
        self.prompt, self.length = room
        rows = Rows.start(self.model, self.decoder, prompts, seeds, names, length, room, self.tokens)
        block = self.decoder.schedule.block or length
        table = BlockTable.start(len(prompts), self.length, block, self.device)
        if stay:
            self.rows.resize(before, behind, self.tokens)
            append_rows(self.rows, rows)
            resize_table(self.table, behind)
            append_rows(self.table, table)
        else:
            self.rows, self.table = rows, table
        if self.cache is not None and stay:
            self.cache = extend_cache(self.model, self.cache, len(self), self.columns, before)
        elif self.decoder.cache.stores:
            self.cache = self.model.new_cache(len(self), self.columns)

    @torch.inference_mode()
    def leave(self, names: Collection[int]) -> None:
        """Drop rows before their end."""
        present = list(self.members)
        self._keep([i for i, name in enumerate(present) if name not in names])

    @property
    def generated(self) -> Tensor:
        """[rows, length] view of the canvas."""
        return self.rows.canvas[:, self.prompt :]

    @torch.inference_mode()
    def step(self) -> dict[int, Decoded]:
        """One forward for every row that still has masks; rows that have none leave first and are returned."""
        masked = self.generated == self.tokens.mask
        finished = self._fill_ends(masked)
        self.table.observe(masked)
        plan = self._plan(masked)
        feed = self.decoder.cache.feed(self.table, self.prompt, plan.visible)
        if self.decoder.opens_with_first(self.shift):
            # The first position's logits come from the column before it, which only an opening forward feeds.
            first = self.prompt + self.table.current * self.table.size
            here = torch.arange(self.columns, device=self.device)[self.prompt :] == first[:, None]
            plan.candidates = plan.candidates & (here | ~feed.opening[:, None])
        count = plan.candidates.sum(1)
        # The one read of this step: who is finished, what to feed, how many candidates.
        gap = torch.zeros_like(feed.start[:, None]).expand(-1, 2) if feed.gap is None else feed.gap
        columns = (finished.long(), feed.start, feed.end, count, self.table.forwards_in_block, *gap.unbind(1))
        broken = self._broken.long().expand_as(count)
        facts = torch.stack((*columns, broken), dim=1).tolist()
        if any(fact.pop() for fact in facts):
            raise TadError("the model's outputs are not numbers (nan); load it with dtype bf16 or fp32")
        done: dict[int, Decoded] = {}
        if any(fact[0] for fact in facts):
            done = self._collect([i for i, fact in enumerate(facts) if fact[0]])
            keep = self._keep([i for i, fact in enumerate(facts) if not fact[0]])
            facts = [fact for fact in facts if not fact[0]]
            if not facts:
                return done
            for record in (plan, feed):
                keep_rows(record, keep)
        _, starts, ends, counts, spent, *gaps = (list(column) for column in zip(*facts, strict=True))
        candidates = self._candidates(plan, feed.opening, max(counts), spent)
        hidden = self._forward(starts, ends, gaps, candidates.position)
        proposal = self._propose(hidden, candidates)
        self._broken = (proposal.confidence.isnan() & candidates.valid).any()
        score = proposal.score(self.decoder.rule.score)
        reveal = self.decoder.rule.reveal(proposal, candidates) & candidates.valid
        reveal = force_progress(reveal, score, candidates, self.table.blocks)
        self._write(reveal, proposal, candidates)
        if self.on_step is not None:
            pads = [self.prompt - row.prompt for row in self.members.values()]
            asked = zip(starts, ends, gaps[1], pads, strict=True)
            fed = [end - max(start, pad) - gap for start, end, gap, pad in asked]
            self._report(reveal, proposal, candidates, fed)
        return done

    def _plan(self, masked: Tensor) -> Plan:
        """The schedule's plan, held to each row's own generated part."""
        plan = self.decoder.schedule.plan(self.table, masked)
        own = self.rows.length
        self.table.created = self.table.created.minimum(own // self.table.size)
        plan.visible = plan.visible.minimum(own)
        return plan

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

    def _candidates(self, plan: Plan, opening: Tensor, width: int, spent: list[int]) -> Candidates:
        """Gather the candidate positions of each row, in order, padded to `width`."""
        position = plan.candidates.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        valid = plan.candidates.gather(1, position)
        must = plan.must.gather(1, position)
        if not self.decoder.rule.forced:
            only = opening if self.decoder.opens_with_first(self.shift) else torch.zeros_like(opening)
            must = must * only[:, None]
        lengths = [row.prompt + self.length for row in self.members.values()]
        return Candidates(position, valid, must, spent, lengths, self.length)

    def _forward(
        self, starts: list[int], ends: list[int], gaps: Sequence[list[int]], position: Tensor
    ) -> Tensor:
        """The outputs that predict `position` ([rows, m] in the generated part): [rows, m, width]."""
        source = self.prompt + position - self.shift
        rows, canvas = self.rows, self.rows.canvas
        keys = None
        if any(row[:2] != (self.prompt, self.length) for row in self.members.values()):
            here = torch.arange(self.columns, device=self.device)
            keys = (here >= rows.pad[:, None]) & (here < self.prompt + rows.length[:, None])
        blocks = None
        if self.decoder.schedule.block_causal:
            index = torch.arange(self.columns, device=self.device) - self.prompt
            blocks = (torch.div(index, self.table.size, rounding_mode="floor") + 1).clamp(min=0)
            blocks = blocks.expand(len(canvas), -1)
        if rows.hidden is None or self.cache is None:
            end = max(ends)
            rule = AttentionMask(
                None if keys is None else keys[:, :end], None if blocks is None else blocks[:, :end]
            )
            hidden = self._outputs(canvas[:, :end], rule)
            return _gather(hidden, source)
        rule = AttentionMask(keys, blocks)
        at: Tensor | slice
        if len(set(starts)) == len(set(ends)) == 1 and not any(gaps[1]):
            at = slice(starts[0], ends[0])
            columns = torch.arange(starts[0], ends[0], device=self.device).expand(len(canvas), -1)
        else:
            fed = max(end - start - gap for start, end, gap in zip(starts, ends, gaps[1], strict=True))
            start, end, low, gap = torch.tensor([starts, ends, *gaps], device=self.device)[..., None]
            columns = start + torch.arange(fed, device=self.device)
            columns = torch.where(columns < low, columns, columns + gap)
            at = columns = columns.masked_fill(columns >= end, -1)
        slots = columns.clamp(min=0)
        out = self.model(
            canvas.gather(1, slots),
            position_ids=(slots - rows.pad[:, None]).clamp(min=0),
            mask=rule,
            cache=self.cache,
            cache_position=at,
            head=False,
        ).hidden
        slots = (columns % (self.columns + 1))[:, :, None].expand_as(out)
        rows.hidden.scatter_(1, slots, out)
        return _gather(rows.hidden, source)

    def _outputs(self, canvas: Tensor, rule: AttentionMask) -> Tensor:
        """Outputs of a whole canvas; with guidance, the unconditional rows' follow along the width."""
        position_ids = (torch.arange(canvas.shape[1], device=self.device) - self.rows.pad[:, None]).clamp(
            min=0
        )
        if self.decoder.sampling.cfg == 0:
            hidden = self.model(canvas, position_ids=position_ids, mask=rule, head=False).hidden
            assert hidden is not None
            return hidden
        blind = canvas.clone()
        blind[:, : self.prompt] = self.tokens.mask
        twice = AttentionMask(
            *(None if part is None else part.repeat(2, 1) for part in (rule.keys, rule.blocks))
        )
        both = torch.cat((canvas, blind)), position_ids.repeat(2, 1)
        hidden = self.model(both[0], position_ids=both[1], mask=twice, head=False).hidden
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

    def _collect(self, rows: list[int]) -> dict[int, Decoded]:
        """Finished rows, by name."""
        now = time.perf_counter()
        index = torch.tensor(rows, device=self.device)
        columns = (self.rows.name, self.generated, self.rows.steps, self.rows.confidence, self.table.forwards)
        done = {}
        for name, ids, steps, confidence, forwards in zip(
            *(part.index_select(0, index).tolist() for part in columns), strict=True
        ):
            row = self.members[name]
            own = slice(row.length)
            done[name] = Decoded(
                ids[own], steps[own], confidence[own], forwards, now - row.joined, self.tokens.ends
            )
        return done

    def _keep(self, rows: list[int]) -> Tensor:
        """Drop all rows but these; returns them as indices."""
        present = list(self.members.items())
        self.members = dict(present[row] for row in rows)
        keep = torch.tensor(rows, device=self.device).long()
        keep_rows(self.rows, keep)
        keep_rows(self.table, keep)
        if self.cache is not None:
            self.cache.keep(keep)
        return keep

    def _report(self, reveal: Tensor, proposal: Proposal, candidates: Candidates, fed: list[int]) -> None:
        assert self.on_step is not None
        per_row = (
            self.table.forwards,
            self.table.created,
            reveal,
            candidates.position,
            proposal.token,
            proposal.confidence,
        )
        values = zip(*(part.tolist() for part in per_row), strict=True)
        for name, count, (forward, created, revealed, *lists) in zip(self.members, fed, values, strict=True):
            positions, tokens, confidence = (list(compress(one, revealed)) for one in lists)
            self.on_step(Step(name, forward, positions, tokens, confidence, count, created))


def _gather(hidden: Tensor, source: Tensor) -> Tensor:
    """hidden [rows, columns, width] at source [rows, m]."""
    return hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[-1]))
