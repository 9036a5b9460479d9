"""Memory for keys, values and kept outputs: flat buffers, viewed as the sizes that are needed.

A pool is used by one batch at a time; batches that come after each other share its memory, whatever their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tad.decoding.engine.buckets import stepped
from tad.decoding.prefixes import Held
from tad.models import MaskedDiffusionModel


class KVPool:
    """`layers` is 1 where nothing is stored from forward to forward: one layer's buffers then serve all in turn."""

    def __init__(self, model: MaskedDiffusionModel, layers: int) -> None:
        self.model, self.layers = model, layers
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.outputs: Tensor | None = None
        self.held: dict[int, Held] = {}  # by slot
        self.tenant: object = (
            None  # whose they are: for others the keys lie elsewhere, or may be of other weights
        )

    def reserve(self, positions: int, with_outputs: bool, keep: bool = False) -> bool:
        """Make room for so many positions; True where buffers moved, and what was captured on them is void.

        Room grows in steps, so that this is rare. With `keep` the contents move too.
        """
        positions, shape = stepped(positions, 512), self.model.shape
        count = positions * shape.kv_heads * shape.head_dim
        moved = False
        if not self.keys or self.keys[0].numel() < count:
            self.keys, self.values = (
                self._grown(self.keys, count, keep),
                self._grown(self.values, count, keep),
            )
            moved = True
            if not keep:
                self.held.clear()
        if with_outputs and (self.outputs is None or self.outputs.numel() < positions * shape.width):
            old = [] if self.outputs is None else [self.outputs]
            self.outputs = None
            self.outputs = self._grown(old, positions * shape.width, keep, layers=1)[0]
            moved = True
        return moved

    def view(self, positions: int, with_outputs: bool) -> KVView:
        shape = self.model.shape
        heads = (positions, shape.kv_heads, shape.head_dim)
        count = positions * shape.kv_heads * shape.head_dim
        keys, values = ([flat[:count].view(heads) for flat in part] for part in (self.keys, self.values))
        outputs = None
        if with_outputs and self.outputs is not None:
            outputs = self.outputs[: positions * shape.width].view(positions, shape.width)
        return KVView(keys, values, outputs)

    def clear(self) -> None:
        """Zeros everywhere: what is not a number would reach rows that do not see it."""
        self.held.clear()
        for tensor in self.tensors():
            tensor.zero_()

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, *([] if self.outputs is None else [self.outputs])]

    def _grown(self, old: list[Tensor], count: int, keep: bool, layers: int | None = None) -> list[Tensor]:
        if not keep:
            old.clear()  # let go before asking for more
        # Zeros and not whatever was there: a position that nobody has written yet must still be finite.
        found = []
        for layer in range(self.layers if layers is None else layers):
            found.append(torch.zeros(count, dtype=self.model.dtype, device=self.model.device))
            if keep and layer < len(old):
                found[-1][: old[layer].numel()] = old[layer]
        return found

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


@dataclass(frozen=True)
class KVView:
    """Keys and values of each layer [positions, kv_heads, head_dim], outputs [positions, width].

    A position is slot * (kv_len + 1) + KV position; the last of each slot is a dummy, where padding is written.
    """

    keys: list[Tensor]
    values: list[Tensor]
    outputs: Tensor | None

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        place = number % len(self.keys)
        return self.keys[place], self.values[place]
