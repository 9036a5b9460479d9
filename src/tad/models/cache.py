"""KV cache: keys and values of a whole canvas in preallocated buffers, one entry per position of the canvas.

A forward writes the positions it is fed and attends to all of them; a position that is not fed keeps what the last
forward that fed it wrote. That single behaviour serves every published cache: prefix (feed from the block on),
dual (feed the block), delayed (feed from the first unfrozen position), block-causal. Which positions to feed is the
decoder's business. Keys are stored after RoPE by their own position id, so the layout of the buffer is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor


class KVCache:
    """`cache_position` is a slice (all rows feed the same positions) or [batch, n] indices, -1 for a dummy entry."""

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | Sequence[torch.device],
    ) -> None:
        devices = [device] * layers if isinstance(device, (str, torch.device)) else list(device)
        shape = (batch, kv_heads, length + 1, head_dim)  # the last entry is a dummy
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=where) for where in devices]
        self.values = [torch.zeros(shape, dtype=dtype, device=where) for where in devices]

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def write(
        self, layer: int, cache_position: Tensor | slice, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store key and value [batch, kv_heads, n, head_dim] at their positions; return the keys and values of all positions."""
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(cache_position, slice):
            keys[:, :, cache_position], values[:, :, cache_position] = key, value
        else:
            index = (cache_position % (self.length + 1))[:, None, :, None].expand_as(key).to(keys.device)
            keys.scatter_(2, index, key)
            values.scatter_(2, index, value)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def narrow(self, rows: int, start: int, end: int | None = None) -> KVCache:
        """A view of the first `rows` without the positions before `start`, and without those from `end` on, whose first is the
        dummy entry of the view: nothing that is still needed may be there."""
        view, end = copy(self), self.length if end is None else end
        view.length = end - start
        view.keys = [keys[:rows, :, start : end + 1] for keys in self.keys]
        view.values = [values[:rows, :, start : end + 1] for values in self.values]
        return view

    @property
    def nbytes(self) -> int:
        """Memory the buffers hold."""
        return sum(part.numel() * part.element_size() for part in (*self.keys, *self.values))
