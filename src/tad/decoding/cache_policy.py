"""Cache policies: the query range of the next forward, and which keys and values it leaves as they are.

KV positions are those of the model's `KVCache`: one in the query range is written anew, any other keeps what the last
forward that had it wrote. A policy gives one range per row, perhaps with a gap in it. An *opening* forward is one whose
range is the whole canvas, to start a block. None is exact except `NoCache` and, under block-causal attention,
`BlockCausalCache` and `BlockCache`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tad.decoding.table import BlockTable


@dataclass
class QueryRange:
    """KV positions [start, end) per row without those of the gap, and whether this forward opens a block."""

    start: Tensor  # [rows]
    end: Tensor  # [rows]
    opening: Tensor  # [rows] bool
    gap: Tensor | None = None  # [rows, 2] first position that is left out, and how many are; None for no row


@dataclass(frozen=True)
class NoCache:
    """Everything, every time: the exact decoding that papers report."""

    stores: ClassVar[bool] = False
    needs: ClassVar[str] = "any"

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        none = torch.zeros_like(visible)
        return QueryRange(none, prompt_len + visible, none.bool())


@dataclass(frozen=True)
class PrefixCache:
    """Fast-dLLM: a full forward opens each block; then the block and all that follows, against what precedes it."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "sequential"

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        opening = table.forwards_in_block == 0
        return QueryRange(
            torch.where(opening, 0, prompt_len + table.start_of(table.current)), prompt_len + visible, opening
        )


@dataclass(frozen=True)
class DualCache:
    """Fast-dLLM: a full forward opens each block; then the block alone, against everything around it."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "sequential"

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        opening = table.forwards_in_block == 0
        start = prompt_len + table.start_of(table.current)
        return QueryRange(
            torch.where(opening, 0, start),
            torch.where(
                opening, prompt_len + visible, prompt_len + table.start_of(table.current + 1).minimum(visible)
            ),
            opening,
        )


@dataclass(frozen=True)
class DelayedCache:
    """d3LLM: finished leading blocks are frozen `delay` forwards after they were seen finished.

    While a finished block waits, and at every `refresh`-th forward, everything is computed again. `refresh=1` therefore
    equals no cache.
    """

    delay: int = 2
    refresh: int = 3
    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "bidirectional"

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
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
        start = torch.where(table.cached < 0, 0, prompt_len + table.start_of(table.cached))
        grew = frozen > table.cached
        renew = (waiting | (now % self.refresh == 0)) & ~grew
        if self.refresh == 1:
            renew = torch.ones_like(renew)
        table.cached = frozen
        return QueryRange(torch.where(renew, 0, start), prompt_len + visible, renew & False)


@dataclass(frozen=True)
class ActiveCache(DelayedCache):
    """As `DelayedCache`, but to compute everything again means the prompt and the blocks that are neither frozen nor yet to
    come: frozen blocks stay as they are, and later ones keep the keys and values of the first forward until they
    exist. `refresh=1` equals no cache here too."""

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        found = super().query_range(table, prompt_len, visible)
        if self.refresh == 1:
            return found
        exists = prompt_len + table.start_of(table.created).minimum(visible)
        frozen = torch.where(found.start == 0, table.start_of(table.cached.clamp(min=0)), 0)
        return replace(
            found,
            end=torch.where(table.forwards == 0, found.end, exists),
            gap=torch.stack((torch.full_like(frozen, prompt_len), frozen), dim=1),
        )


@dataclass(frozen=True)
class BlockCausalCache:
    """D2F: a finished block that nothing before it can change is computed once more, then frozen for good."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "block-causal"

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        start = torch.where(table.cached < 0, 0, prompt_len + table.grid_start(table.cached))
        finished = (table.masks == 0) & (table.index < table.created[:, None])
        leading = finished.long().cumprod(1).sum(1)
        table.cached = leading
        return QueryRange(start, prompt_len + visible, torch.zeros_like(table.ended))


@dataclass(frozen=True)
class BlockCache:
    """Block diffusion, exact: the current block against the stored ones, then once more to store it. Where the schedule has
    no forward of its own for that, a finished block is stored by the first forward of the next one."""

    stores: ClassVar[bool] = True
    needs: ClassVar[str] = "block-by-block"

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        stored = table.cached - table.storing.long()  # before this forward
        start = torch.where(stored < 0, 0, prompt_len + table.grid_start(stored))
        end = torch.where(table.storing, table.grid_start(table.cached).minimum(visible), visible)
        table.cached = torch.where(table.storing, table.cached, table.created - 1)
        return QueryRange(start, prompt_len + end, torch.zeros_like(table.ended))


@dataclass(frozen=True)
class SubBlockCache(BlockCache):
    """Fast-dLLM v2's block cache, approximate: inside a block, a sub-block whose first token is known is computed alone, and
    the rest of the block keeps the keys and values of the last forward of the whole block."""

    def query_range(self, table: BlockTable, prompt_len: int, visible: Tensor) -> QueryRange:
        found = super().query_range(table, prompt_len, visible)
        alone = (table.part[:, 1] > 0) & (table.forwards_in_block > 0) & ~table.storing
        return replace(
            found,
            start=torch.where(alone, prompt_len + table.part[:, 0], found.start),
            end=torch.where(alone, prompt_len + table.part[:, 1].minimum(visible), found.end),
        )


CachePolicy = (
    NoCache
    | PrefixCache
    | DualCache
    | DelayedCache
    | ActiveCache
    | BlockCausalCache
    | BlockCache
    | SubBlockCache
)
