"""What a step reads and leaves behind: one record per slot, in buffers that stay where they are.

A slot holds a row from its first forward to its last, then the next row. Everything is a tensor on the device, so that a
step can be recorded once and replayed; the host learns of it through `facts`, a few numbers per slot. Keys and values
are lent by an `Arena`, whose memory all batch and prompt sizes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tad.decoding.canvas import lay_out
from tad.decoding.decoders import Decoder
from tad.decoding.engine.buckets import stepped
from tad.decoding.table import BlockTable
from tad.models import MaskedDiffusionModel, SpecialTokens


@dataclass(frozen=True)
class Method:
    """A decoder and all that it needs to know of model and canvas."""

    decoder: Decoder  # prepared for the length
    tokens: SpecialTokens
    shift: int
    prompt: int  # columns for prompts
    length: int  # positions to generate

    @property
    def columns(self) -> int:
        return self.prompt + self.length

    @property
    def keeps_outputs(self) -> bool:
        """Whether a position may need the output of a column that is not fed: it is kept from an earlier forward."""
        return self.shift > 0 and self.decoder.cache.stores


@dataclass
class Slots:
    """Per-slot tensors: [slots], or [slots, length] over the generated part."""

    canvas: Tensor  # [slots, columns]
    pad: Tensor  # columns before the prompt
    seed: Tensor
    alive: Tensor  # bool: the row has masks left
    steps: Tensor
    confidence: Tensor
    candidates: Tensor  # bool, of the next forward
    must: Tensor  # groups that must make progress in it
    start: Tensor  # first column fed in it
    fed: Tensor  # number of columns fed, 0 for slots without a living row
    gap: Tensor  # [slots, 2] first column left out among them, and how many are
    opening: Tensor  # bool: it opens a block
    shown: Tensor  # tokens revealed by the last forward, -1 elsewhere
    shown_confidence: Tensor
    facts: Tensor  # [slots, 5]: alive, fed, candidates, forwards, blocks created
    table: BlockTable

    @classmethod
    def start_rows(
        cls, method: Method, prompts: Sequence[Sequence[int]], seeds: Sequence[int], device: torch.device
    ) -> Slots:
        """Rows of masks behind their prompts, before their first forward is planned."""
        canvas, pad = lay_out(prompts, method.length, method.tokens, method.prompt)
        rows, block = len(prompts), method.decoder.schedule.block or method.length
        flat = torch.zeros(rows, dtype=torch.int64, device=device)
        wide = torch.zeros(rows, method.length, dtype=torch.int64, device=device)
        return cls(
            canvas=canvas.to(device),
            pad=pad.to(device),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            alive=flat == 0,
            steps=wide.clone(),
            confidence=wide.float(),
            candidates=wide > 0,
            must=wide.clone(),
            start=flat.clone(),
            fed=flat.clone(),
            gap=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            opening=flat > 0,
            shown=wide - 1,
            shown_confidence=wide.float(),
            facts=torch.zeros(rows, 5, dtype=torch.int64, device=device),
            table=BlockTable.start(rows, method.length, block, device),
        )

    @classmethod
    def empty(cls, method: Method, slots: int, device: torch.device) -> Slots:
        """Slots without rows; their columns count as real, so that attention over them is defined."""
        made = cls.start_rows(method, [[method.tokens.eos] * method.prompt] * slots, [0] * slots, device)
        made.alive.zero_()
        return made

    @property
    def prompt(self) -> int:
        """Columns for prompts, by the tensors' sizes: compiled code serves every size, and every number as its own case."""
        return self.canvas.shape[1] - self.steps.shape[1]

    def tensors(self) -> list[Tensor]:
        records: tuple[object, ...] = (self, self.table)
        values = (getattr(record, field.name) for record in records for field in fields(record))  # type: ignore[arg-type]
        return [value for value in values if isinstance(value, Tensor)]

    def working(self) -> Slots:
        """The same tensors in a record of its own, whose fields can be assigned."""
        return replace(self, table=replace(self.table))

    def keep(self, working: Slots) -> None:
        """Copy back what was assigned, all of one dtype at once: on a device one kernel instead of many."""
        pairs = zip(self.tensors(), working.tensors(), strict=True)
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for own, new in pairs:
            if own is not new:
                owned, made = kinds.setdefault(own.dtype, ([], []))
                owned.append(own)
                made.append(new)
        for owned, made in kinds.values():
            torch._foreach_copy_(owned, made)

    def put(self, index: Tensor, rows: Slots) -> None:
        """Rows into the slots at `index`."""
        for own, new in zip(self.tensors(), rows.tensors(), strict=True):
            own.index_copy_(0, index, new)

    def clear(self) -> None:
        """No row anywhere."""
        for tensor in (self.alive, self.fed, self.gap, self.facts, self.candidates, self.pad):
            tensor.zero_()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


class Arena:
    """Flat buffers for keys, values and outputs, lent as views of the sizes that are needed. One size at a time is in
    use; a request that does not fit makes new buffers, and whatever was recorded on the old ones is void."""

    def __init__(self, model: MaskedDiffusionModel, layers: int) -> None:
        self.model, self.layers = model, layers
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.outputs: Tensor | None = None

    def reserve(self, positions: int, with_outputs: bool) -> bool:
        """Make room for so many positions; True where buffers moved. Room grows in steps, so that this is rare."""
        positions, shape = stepped(positions, 512), self.model.shape
        per_position = shape.kv_heads * shape.head_dim
        moved = False
        if not self.keys or self.keys[0].numel() < positions * per_position:
            self.keys, self.values = [], []  # let go before asking for more
            self.keys, self.values = (
                [self._zeros(positions * per_position) for _ in range(self.layers)] for _ in range(2)
            )
            moved = True
        if with_outputs and (self.outputs is None or self.outputs.numel() < positions * shape.width):
            self.outputs = None
            self.outputs = self._zeros(positions * shape.width)
            moved = True
        return moved

    def lend(self, positions: int, with_outputs: bool) -> Lent:
        shape = self.model.shape
        heads = (positions, shape.kv_heads, shape.head_dim)
        count = positions * shape.kv_heads * shape.head_dim
        keys, values = ([flat[:count].view(heads) for flat in part] for part in (self.keys, self.values))
        outputs = None
        if with_outputs and self.outputs is not None:
            outputs = self.outputs[: positions * shape.width].view(positions, shape.width)
        return Lent(keys, values, outputs)

    def _zeros(self, count: int) -> Tensor:
        # Zeros and not whatever was there: a column that nobody has written yet must still be finite.
        return torch.zeros(count, dtype=self.model.dtype, device=self.model.device)

    @property
    def nbytes(self) -> int:
        outputs = [] if self.outputs is None else [self.outputs]
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values, *outputs))


@dataclass(frozen=True)
class Lent:
    """Views of an arena: keys and values of each layer [positions, kv_heads, head_dim], outputs [positions, width].

    A position is slot * (columns + 1) + column; the last of each slot is scrap. Where nothing is stored from forward to
    forward, one layer's buffers serve all layers in turn.
    """

    keys: list[Tensor]
    values: list[Tensor]
    outputs: Tensor | None

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        place = number % len(self.keys)
        return self.keys[place], self.values[place]
