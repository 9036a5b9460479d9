"""The block table: where each row of a batch stands, as tensors, one entry per block.

Everything a schedule, a cache or the loop must remember between forwards is here, so that rows can leave and join a batch by
selecting and appending rows of one object. Masks left are read off the canvas on every step and never counted by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


def keep_rows(record: object, rows: Tensor) -> None:
    """Select rows of every tensor field of a dataclass, in place."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            setattr(record, field.name, value.index_select(0, rows))


def append_rows(record: object, other: object) -> None:
    """Put another record's rows behind those of every tensor field, in place."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            setattr(record, field.name, torch.cat((value, getattr(other, field.name))))


@dataclass
class BlockTable:
    """Rows x blocks of the generated part; the prompt, finished from the start, is not a block here."""

    size: int  # positions per block
    masks: Tensor  # [rows, blocks] masks left
    created: Tensor  # [rows] blocks that exist so far; a block is a candidate from then on
    current: Tensor  # [rows] first block with masks left
    forwards: Tensor  # [rows] forwards so far
    forwards_in_block: Tensor  # [rows] forwards spent in the current block
    finished_at: Tensor  # [rows, blocks] forward at which a cache first saw the block finished, -1 before
    cached: Tensor  # [rows] leading blocks whose keys and values are frozen; -1 while the prompt's are not
    ended: Tensor  # [rows] bool: an end token has been revealed somewhere

    @classmethod
    def start(cls, rows: int, length: int, size: int, device: torch.device) -> BlockTable:
        blocks = length // size
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(
            size=size,
            masks=torch.full((rows, blocks), size, dtype=torch.int64, device=device),
            created=zeros.clone(),
            current=zeros - 1,
            forwards=zeros.clone(),
            forwards_in_block=zeros.clone(),
            finished_at=torch.full((rows, blocks), -1, dtype=torch.int64, device=device),
            cached=zeros - 1,
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    @property
    def blocks(self) -> int:
        return self.masks.shape[1]

    @property
    def index(self) -> Tensor:
        """[1, blocks]: 0, 1, ..."""
        return torch.arange(self.blocks, device=self.masks.device)[None]

    @property
    def progress(self) -> Tensor:
        """[rows, blocks] share decoded, in fp64 so that thresholds compare as they do in Python."""
        return 1 - self.masks.double() / self.size

    @property
    def previous_progress(self) -> Tensor:
        """[rows, blocks] progress of the block before; the prompt counts as decoded."""
        return torch.cat((torch.ones_like(self.progress[:, :1]), self.progress[:, :-1]), dim=1)

    def observe(self, masked: Tensor) -> None:
        """Read masks left and the current block off the canvas: masked [rows, length]."""
        self.masks = masked.view(masked.shape[0], self.blocks, self.size).sum(-1)
        before = self.current
        self.current = (self.masks > 0).int().argmax(1)
        self.forwards_in_block = torch.where(self.current == before, self.forwards_in_block, 0)

    def count_forward(self) -> None:
        self.forwards = self.forwards + 1
        self.forwards_in_block = self.forwards_in_block + 1

    def spread(self, per_block: Tensor) -> Tensor:
        """[rows, blocks] -> [rows, length]."""
        return per_block.repeat_interleave(self.size, dim=1)
