"""Cache policies: which columns of the canvas the next forward is fed, and which keys and values it leaves as they are.

Columns are those of the model's `KVCache`: a fed column is written anew, any other keeps what the last forward that
fed it wrote. A policy gives one range of columns per row, perhaps with a gap in it. An *opening* forward is one that feeds
the whole canvas to start a block. None of them is exact except `NoCache` and, under block-causal attention, `BlockCausalCache`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tad.decoding.table import BlockTable


@dataclass
class Feed:
    """Columns [start, end) per row without those of the gap, and whether this forward opens a block."""

    start: Tensor  # [rows]
    end: Tensor  # [rows]
    opening: Tensor  # [rows] bool
    gap: Tensor | None = None  # [rows, 2] first column that is left out, and how many are; None for no row


@dataclass(frozen=True)
class NoCache:
    """Everything, every time: the exact decoding that papers report."""

    stores: ClassVar[bool] = False
    needs: ClassVar[str] = "any"

    def feed(self, table: BlockTable, prompt: int, visible: Tensor) -> Feed:
        none = torch.zeros_like(visible)
        return Feed(none, prompt + visible, none.bool())


@dataclass(frozen=True)
class PrefixCache:
    """Fast-dLLM: a full forward opens each block; then the block and all that follows, against what precedes it."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "sequential"

    def feed(self, table: BlockTable, prompt: int, visible: Tensor) -> Feed:
        opening = table.forwards_in_block == 0
        return Feed(torch.where(opening, 0, prompt + table.current * table.size), prompt + visible, opening)


@dataclass(frozen=True)
class DualCache:
    """Fast-dLLM: a full forward opens each block; then the block alone, against everything around it."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "sequential"

    def feed(self, table: BlockTable, prompt: int, visible: Tensor) -> Feed:
        opening = table.forwards_in_block == 0
        start = prompt + table.current * table.size
        return Feed(
            torch.where(opening, 0, start),
            torch.where(opening, prompt + visible, start + table.size),
            opening,
        )


@dataclass(frozen=True)
class DelayedCache:
    """d3LLM: finished leading blocks are frozen `delay` forwards after they were seen finished.

    While a finished block waits, and at every `refresh`-th forward, everything is fed again. `refresh=1` therefore
    equals no cache.
    """

    delay: int = 2
    refresh: int = 3
    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "bidirectional"

    def feed(self, table: BlockTable, prompt: int, visible: Tensor) -> Feed:
        now = table.forwards + 1  # this forward's number
        frozen = torch.where(now >= self.delay, table.cached.clamp(min=0), table.cached)
        # A block starts to wait when it is finished and all before it are frozen; the prompt is before all.
        finished = table.masks == 0
        since = torch.where(table.finished_at < 0, now[:, None], table.finished_at)
        ready = finished & (now[:, None] - since >= self.delay)
        leading = (ready | (table.index < frozen[:, None])).long().cumprod(1).sum(1)
        frozen = torch.where(frozen < 0, frozen, leading)
        reached = finished & (table.index <= frozen[:, None])
        waiting = (frozen < 0) | (reached & ~ready & (table.index == frozen[:, None])).any(1)
        table.finished_at = torch.where(reached, since, table.finished_at)
        start = torch.where(table.cached < 0, 0, prompt + table.cached * table.size)
        grew = frozen > table.cached
        renew = (waiting | (now % self.refresh == 0)) & ~grew
        if self.refresh == 1:
            renew = torch.ones_like(renew)
        table.cached = frozen
        return Feed(torch.where(renew, 0, start), prompt + visible, renew & False)


@dataclass(frozen=True)
class ActiveCache(DelayedCache):
    """As `DelayedCache`, but to feed everything again means the prompt and the blocks that are neither frozen nor yet to
    come: frozen blocks stay as they are, and later ones keep the keys and values of the first forward until they
    exist. `refresh=1` equals no cache here too."""

    def feed(self, table: BlockTable, prompt: int, visible: Tensor) -> Feed:
        found = super().feed(table, prompt, visible)
        if self.refresh == 1:
            return found
        exists = prompt + (table.created * table.size).minimum(visible)
        frozen = torch.where(found.start == 0, table.cached.clamp(min=0) * table.size, 0)
        return replace(
            found,
            end=torch.where(table.forwards == 0, found.end, exists),
            gap=torch.stack((torch.full_like(frozen, prompt), frozen), dim=1),
        )


@dataclass(frozen=True)
class BlockCausalCache:
    """D2F: a finished block that nothing before it can change is fed once more, then frozen for good."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "block-causal"

    def feed(self, table: BlockTable, prompt: int, visible: Tensor) -> Feed:
        start = torch.where(table.cached < 0, 0, prompt + table.cached * table.size)
        finished = (table.masks == 0) & (table.index < table.created[:, None])
        leading = finished.long().cumprod(1).sum(1)
        table.cached = leading
        return Feed(start, prompt + visible, torch.zeros_like(table.ended))


Cache = NoCache | PrefixCache | DualCache | DelayedCache | ActiveCache | BlockCausalCache
