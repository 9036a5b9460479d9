"""Block schedules: which masks may be revealed by the next forward, and which blocks have to make progress.

A schedule is a pure function of the block table, but for the blocks it creates. `forced` numbers the groups of
positions of which each has to reveal at least one token: progress is a law of the step, not of the unmasking strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tad.decoding.table import BlockTable


@dataclass
class Plan:
    """What the next forward may do."""

    candidates: Tensor  # [rows, length] bool
    forced: Tensor  # [rows, length] int: 0 for none, else the group that needs a reveal
    visible: Tensor  # [rows] positions of the generated part that exist for the model


@dataclass(frozen=True)
class Sequential:
    """One block after the other; `block=None` is the whole canvas as a single block."""

    block: int | None = 32
    block_causal = False

    def plan(self, table: BlockTable, masked: Tensor) -> Plan:
        now = table.index == table.current[:, None]
        table.created = table.current + 1
        candidates = masked & table.spread(now, masked.shape[1])
        return Plan(candidates, candidates.long(), torch.full_like(table.created, masked.shape[1]))


@dataclass(frozen=True)
class MultiBlock:
    """d3LLM's and TAD's: the next block opens early, and every block that exists is decoded at once.

    A block is added when the last one is decoded to `block_add`; it has to make progress once the block before it is
    decoded to `decoded`. Only the first such block with masks left is forced.
    """

    block: int = 32
    block_add: float = 0.1
    decoded: float = 0.95
    block_causal = False

    def plan(self, table: BlockTable, masked: Tensor) -> Plan:
        table.created = _grow(table, self.block_add, hold=None)
        exists = table.index < table.created[:, None]
        active = exists & (table.previous_progress >= self.decoded) & (table.masks > 0)
        first = active & (active.cumsum(1) == 1)
        candidates = masked & table.spread(exists, masked.shape[1])
        forced = table.spread(first, masked.shape[1]) & masked
        return Plan(candidates, forced.long(), torch.full_like(table.created, masked.shape[1]))


@dataclass(frozen=True)
class Pipelined:
    """D2F's: the canvas itself grows, attention is block-causal, and every complete block is forced.

    A block is complete once the block before it is decoded to `decoded`. No block is added after an end token.
    """

    block: int = 32
    block_add: float = 0.1
    decoded: float = 0.95
    block_causal = True

    def plan(self, table: BlockTable, masked: Tensor) -> Plan:
        table.created = _grow(table, self.block_add, hold=table.ended)
        exists = table.index < table.created[:, None]
        complete = exists & (table.previous_progress >= self.decoded)
        candidates = masked & table.spread(exists, masked.shape[1])
        forced = table.spread(torch.where(complete, table.index + 1, 0), masked.shape[1]) * masked
        return Plan(candidates, forced, table.start_of(table.created))


@dataclass(frozen=True)
class BlockByBlock:
    """Block diffusion: the canvas grows block by block, on the model's own grid, which begins with the row's first token.

    With `store`, each finished block has one more forward, in which its keys and values become final; before the first
    block that is the prompt's whole blocks. Where logits are shifted, that forward also reveals the next block's first
    token. A block may be decoded in parts of `sub_block`, from left to right. With `post_steps`, the strategy may rewrite
    tokens of the current block: it is finished when a forward changes nothing, or after so many forwards without a mask.
    """

    block: int | None = None  # the model's own by default
    sub_block: int | None = None
    store: bool = True
    post_steps: int | None = None
    block_causal = True

    def finished(self, table: BlockTable, masked: Tensor) -> Tensor:
        """[rows] bool: the block that was opened last needs no more denoising; before the first one there is none."""
        done = ~(masked & self._opened(table, masked)).any(1)
        if self.post_steps is not None:
            done = done & (table.settled | (table.post_steps >= self.post_steps))
        return done | (table.created == 0)

    def to_store(self, table: BlockTable, masked: Tensor) -> Tensor:
        """[rows] bool: what is finished has to be stored first."""
        return self.finished(table, masked) & (table.cached < table.created) & self.store

    def busy(self, table: BlockTable, masked: Tensor) -> Tensor:
        """[rows] bool: a row without masks has something to do."""
        return ~self.finished(table, masked) | self.to_store(table, masked)

    def plan(self, table: BlockTable, masked: Tensor) -> Plan:
        table.storing = self.to_store(table, masked)
        opens = self.finished(table, masked) & ~table.storing
        table.cached = table.cached + table.storing
        table.created = table.created + opens
        table.forwards_in_block = torch.where(opens, 0, table.forwards_in_block)
        place = torch.arange(masked.shape[1], device=masked.device)
        block = self._opened(table, masked)
        candidates = masked & block
        if self.sub_block is not None:
            candidates = self._in_first_part(table, candidates, place)
        forced = candidates.long()
        if self.post_steps is not None:
            waiting = ~candidates.any(1)
            table.post_steps = torch.where(opens, 0, table.post_steps + waiting)
            candidates = block
        # A stored block's last output predicts the first token of the next one, where logits are shifted.
        follows = masked & (place == table.grid_start(table.created)[:, None])
        candidates = torch.where(table.storing[:, None], follows, candidates)
        forced = torch.where(table.storing[:, None], follows.long(), forced)
        return Plan(candidates, forced, table.start_of(table.created).clamp(max=masked.shape[1]))

    def _opened(self, table: BlockTable, masked: Tensor) -> Tensor:
        """[rows, length] bool: in the block that was opened last."""
        return table.spread(table.index == table.created[:, None] - 1, masked.shape[1])

    def _in_first_part(self, table: BlockTable, candidates: Tensor, place: Tensor) -> Tensor:
        """The candidates in the first sub-block that has any; `table.part` is that sub-block if its first token is known."""
        assert self.sub_block is not None
        assert table.offset is not None
        part = (place + table.offset[:, None]) // self.sub_block
        first = torch.where(candidates, part, part.amax() + 1).amin(1, keepdim=True)
        start = first * self.sub_block - table.offset[:, None]
        alone = ~(candidates & (place == start)).any(1, keepdim=True)
        table.part = torch.cat((start, start + self.sub_block), 1) * alone
        return candidates & (part == first)


@dataclass(frozen=True)
class TokenByToken(BlockByBlock):
    """Autoregressive: the forward that stores what is known reveals the token behind it. No mask is ever fed."""

    block: int | None = 1
    fixed: ClassVar[tuple[str, ...]] = (
        "block",
        "sub_block",
        "store",
        "post_steps",
    )  # nothing for a user to set

    def busy(self, table: BlockTable, masked: Tensor) -> Tensor:
        return torch.zeros_like(table.ended)

    def plan(self, table: BlockTable, masked: Tensor) -> Plan:
        table.storing = torch.ones_like(table.ended)
        known = (~masked).long().cumprod(1).sum(1)
        table.created = table.cached = known
        place = torch.arange(masked.shape[1], device=masked.device)
        follows = masked & (place == known[:, None])
        return Plan(follows, follows.long(), known)


@dataclass(frozen=True)
class Verified:
    """Lossless: masks behind what is known are filled at once, and a causal forward keeps what the model itself would have said,
    token after token (`tad.decoding.verified`).

    With `ends`, the forward that verifies a draft also has masks behind that many likely ends of what will be kept, so that
    the next draft is ready: one forward per cycle where one of them is met, else two.

    Where drafts fail, drafting rests: after the second draft in a row of which nothing was kept for a forward, then for 3, 7, ... up
    to `rest` forwards, each of which gives the next token. So drafts that are never right cost little.
    """

    draft: int | None = None  # masks per draft; the model's block size by default
    ends: int = 0
    rest: int = 15
    block: ClassVar[int | None] = None
    block_causal = True


Schedule = Sequential | MultiBlock | Pipelined | BlockByBlock


def _grow(table: BlockTable, threshold: float, hold: Tensor | None) -> Tensor:
    """Blocks that exist after at most one more is added: when the last one is decoded to the threshold."""
    last = table.created - 1
    decoded = table.progress.gather(1, last.clamp(min=0)[:, None])[:, 0]
    add = (last < 0) | (decoded >= threshold) | (decoded >= 1)
    if hold is not None:
        add = add & ~hold
    return (table.created + add.long()).clamp(max=table.blocks)
