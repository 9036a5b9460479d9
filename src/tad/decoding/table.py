"""The block table: where each row of a batch stands, as tensors, one entry per block.

Everything a schedule, a cache policy or a step must remember between forwards is here. Masks left are read off the canvas
on every step and never counted by hand. Blocks begin behind the prompt; with an `offset` they lie on a grid that began
before it, so that the first block holds the end of the prompt too: for models that were trained on such a grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    ended: (
        Tensor  # [rows] bool: EOS has been revealed somewhere, after which a pipelined canvas does not grow
    )
    storing: Tensor  # [rows] bool: the next forward stores a finished block, or the prompt (`BlockByBlock`)
    settled: Tensor  # [rows] bool: the last forward saw no mask in its block and changed nothing
    post_steps: Tensor  # [rows] forwards in the current block since it has no mask
    part: Tensor  # [rows, 2] generated positions of the sub-block to decode; empty where it cannot be computed alone
    offset: Tensor | None = (
        None  # [rows] positions of the first block that belong to the prompt; None for no row
    )

    @classmethod
    def start(
        cls, rows: int, length: int, size: int, device: torch.device, offset: Tensor | None = None
    ) -> BlockTable:
        blocks = -(-length // size) + (offset is not None)
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
            ended=zeros > 0,
            storing=zeros > 0,
            settled=zeros > 0,
            post_steps=zeros.clone(),
            part=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            offset=offset,
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
        if self.offset is None:
            return 1 - self.masks.double() / self.size
        generated = self.start_of(self.index + 1) - self.start_of(self.index)
        return 1 - self.masks.double() / generated.clamp(min=1)

    @property
    def previous_progress(self) -> Tensor:
        """[rows, blocks] progress of the block before; the prompt counts as decoded."""
        return torch.cat((torch.ones_like(self.progress[:, :1]), self.progress[:, :-1]), dim=1)

    def start_of(self, block: Tensor) -> Tensor:
        """First generated position of a block: block [rows] or [rows, n]."""
        if self.offset is None:
            return block * self.size
        offset = self.offset if block.dim() == 1 else self.offset[:, None]
        return (block * self.size - offset).clamp(min=0)

    def grid_start(self, block: Tensor) -> Tensor:
        """First position of a block [rows] counted from the first generated one: negative where the prompt's end is in it."""
        return block * self.size - (0 if self.offset is None else self.offset)

    def block_of(self, position: Tensor) -> Tensor:
        """The block of generated positions [n] or [rows, n]; negative for those of the prompt before the first block."""
        if self.offset is not None:
            position = position + self.offset[:, None]
        return torch.div(position, self.size, rounding_mode="floor")

    def blocks_in(self, length: Tensor) -> Tensor:
        """[rows] blocks that `length` generated positions reach into."""
        return self.block_of(length[:, None] - 1)[:, 0] + 1

    def observe(self, masked: Tensor) -> None:
        """Read masks left and the current block off the canvas: masked [rows, length]."""
        rows, length = masked.shape
        if self.offset is None:
            self.masks = masked.view(rows, self.blocks, self.size).sum(-1)
        else:
            block = self.block_of(torch.arange(length, device=masked.device)[None])
            self.masks = torch.zeros_like(self.masks).scatter_add(1, block, masked.long())
        before = self.current
        self.current = (self.masks > 0).int().argmax(1)
        self.forwards_in_block = torch.where(self.current == before, self.forwards_in_block, 0)

    def count_forward(self, alive: Tensor | int = 1) -> None:
        self.forwards = self.forwards + alive
        self.forwards_in_block = self.forwards_in_block + alive

    def spread(self, per_block: Tensor, length: int) -> Tensor:
        """[rows, blocks] -> [rows, length]."""
        if self.offset is None:
            return per_block.repeat_interleave(self.size, dim=1)
        return per_block.gather(1, self.block_of(torch.arange(length, device=per_block.device)[None]))
