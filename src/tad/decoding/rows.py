"""The rows of a batch as tensors, and how a batch takes in rows of another width.

All rows share their columns: prompts end at column `prompt`, and generated parts begin there. A row whose prompt is
shorter has padding before it, a row whose generated part is shorter has padding behind it. To make room (or to give it
back) columns are added or dropped on both sides; nothing a row sees of itself changes, since positions count from its
own first token and keys are stored rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tad.decoding.canvas import lay_out
from tad.decoding.decoders import Decoder
from tad.decoding.rule import Credit
from tad.decoding.table import BlockTable
from tad.models import MaskedDiffusionModel, SpecialTokens
from tad.models.cache import KVCache


@dataclass
class Rows:
    """Per-row tensors of the batch; `canvas` is [rows, columns]."""

    canvas: Tensor
    pad: Tensor  # [rows] columns of padding before the prompt
    length: Tensor  # [rows] positions of the row's own generated part
    seed: Tensor  # [rows]
    name: Tensor  # [rows] how the caller knows the row
    steps: Tensor  # [rows, length]
    confidence: Tensor  # [rows, length]
    hidden: Tensor | None  # [rows, columns + 1, width] last output of every column, kept where a cache is
    credit: Tensor | None  # [rows, length, vocab]

    @classmethod
    def start(
        cls,
        model: MaskedDiffusionModel,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        names: Sequence[int],
        length: int,
        room: tuple[int, int],
        tokens: SpecialTokens,
    ) -> Rows:
        """Rows of masks behind their prompts; `room` is what the columns hold: prompt and generated part."""
        rows, device = len(prompts), model.device
        before, behind = room
        canvas, pad = lay_out(prompts, behind, tokens, before)
        canvas[:, before + length :] = tokens.eos
        stores, credits = decoder.cache.stores, isinstance(decoder.rule, Credit)
        width, vocab = model.shape.width, model.shape.vocab
        return cls(
            canvas=canvas.to(device),
            pad=pad.to(device),
            length=torch.full((rows,), length, dtype=torch.int64, device=device),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            name=torch.tensor(names, dtype=torch.int64, device=device),
            steps=torch.zeros(rows, behind, dtype=torch.int64, device=device),
            confidence=torch.zeros(rows, behind, dtype=torch.float32, device=device),
            hidden=torch.zeros(rows, before + behind + 1, width, dtype=model.dtype, device=device)
            if stores
            else None,
            credit=torch.zeros(rows, behind, vocab, device=device) if credits else None,
        )

    def resize(self, before: int, behind: int, tokens: SpecialTokens) -> None:
        """Add (or, where negative, drop) columns on both sides."""
        self.canvas = _resize(self.canvas, before, behind, tokens.eos)
        self.pad = self.pad + before
        self.steps = _resize(self.steps, 0, behind)
        self.confidence = _resize(self.confidence, 0, behind)
        if self.hidden is not None:
            columns, scrap = self.hidden[:, :-1], 1
            self.hidden = _resize(_resize(columns, before, behind), 0, scrap)
        if self.credit is not None:
            self.credit = _resize(self.credit, 0, behind)


def resize_table(table: BlockTable, behind: int) -> None:
    """Add or drop blocks at the end, where no present row has masks."""
    blocks = behind // table.size
    table.masks = _resize(table.masks, 0, blocks)
    table.finished_at = _resize(table.finished_at, 0, blocks, fill=-1)


def extend_cache(model: MaskedDiffusionModel, old: KVCache, rows: int, columns: int, before: int) -> KVCache:
    """A cache of `rows` x `columns` that begins with the old rows, `before` columns further to the right."""
    new = model.new_cache(rows, columns)
    low, high = max(0, -before), min(old.length, columns - before)
    for source, target in zip((*old.keys, *old.values), (*new.keys, *new.values), strict=True):
        target[: old.batch, :, low + before : high + before] = source[:, :, low:high]
    return new


def _resize(values: Tensor, before: int, behind: int, fill: int = 0) -> Tensor:
    """Pad dimension 1 with `fill` on both sides, or cut it where a count is negative."""
    kept = values[:, max(0, -before) : values.shape[1] - max(0, -behind)]
    edges = [values.new_full((len(values), max(0, n), *values.shape[2:]), fill) for n in (before, behind)]
    return torch.cat((edges[0], kept, edges[1]), dim=1)
