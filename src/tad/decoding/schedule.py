"""Block schedules: which masks may be revealed by the next forward, and which blocks have to make progress.

A schedule is a pure function of the block table, but for the blocks it creates. `forced` numbers the groups of
positions of which each has to reveal at least one token: progress is a law of the step, not of the unmasking strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

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


Schedule = Sequential | MultiBlock | Pipelined


def _grow(table: BlockTable, threshold: float, hold: Tensor | None) -> Tensor:
    """Blocks that exist after at most one more is added: when the last one is decoded to the threshold."""
    last = table.created - 1
    decoded = table.progress.gather(1, last.clamp(min=0)[:, None])[:, 0]
    add = (last < 0) | (decoded >= threshold) | (decoded >= 1)
    if hold is not None:
        add = add & ~hold
    return (table.created + add.long()).clamp(max=table.blocks)
