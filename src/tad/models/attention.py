"""Who sees whom: attention masks of masked-diffusion models, and the one function that applies them.

A mask is about the positions of a row's canvas. Without a cache the queries are all of them; with one the queries are
the positions fed (`cache_position`) and the keys are every position of the cache. Which mask a model has is said by its
config (`Shape.blocks`) and asked of `MaskedDiffusionModel.attention_mask`. Token-causal attention does not occur here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = Literal["answer", "absolute"]


@dataclass(frozen=True)
class BlockLayout:
    """Block-causal attention: bidirectional inside a block, causal between blocks.

    On the grid "answer" the prompt is one block and blocks start behind it (D2F). On the grid "absolute" blocks start at
    the row's position 0, so that the end of the prompt may share a block with the first answer tokens.
    """

    size: int | Tensor  # positions per block; [batch, 1] where rows differ
    grid: Grid = "answer"


def block_index(
    positions: Tensor, prompt_len: int | Tensor, size: int | Tensor, grid: Grid = "answer"
) -> Tensor:
    """The block of every position, counted from 0. The one place that knows where blocks start.

    `positions` [length] or [batch, length] count from the row's first token, and are negative in left padding, which goes
    with block 0; `prompt_len` is an int or [batch, 1]. On the grid "answer" only their difference matters, so both may
    count from the start of the padded canvas.
    """
    if grid == "absolute":
        return torch.div(positions, size, rounding_mode="floor").clamp(min=0)
    return (torch.div(positions - prompt_len, size, rounding_mode="floor") + 1).clamp(min=0)


@dataclass(frozen=True)
class AttentionMask:
    """Full attention by default; `keys` hides padding, `blocks` makes it block-causal. Both may be given."""

    keys: Tensor | None = None  # [batch, length] bool, True where the position is real
    blocks: Tensor | None = None  # [batch or 1, length] int: a query sees its own block and the earlier ones

    @classmethod
    def full(cls) -> AttentionMask:
        """Every position sees every position."""
        return cls()

    @classmethod
    def padded(cls, keys: Tensor) -> AttentionMask:
        """Nobody sees padding; left and right padding are the same to this mask."""
        return cls(keys=keys.bool())

    @classmethod
    def block_causal(cls, blocks: Tensor, keys: Tensor | None = None) -> AttentionMask:
        """A position sees its own block and every earlier one."""
        return cls(keys=None if keys is None else keys.bool(), blocks=blocks)

    def dense(self, cache_position: Tensor | slice | None = None) -> Tensor | None:
        """[batch, 1, queries, length] bool, True where a query sees a key; None where all see all."""
        if self.blocks is None:
            return None if self.keys is None else self.keys[:, None, None, :]
        seen = self.blocks[:, None, :] <= _at(self.blocks, cache_position)[:, :, None]
        if self.keys is not None:
            seen = seen & self.keys[:, None, :]
        return seen[:, None]

    def flex(
        self,
        batch: int,
        queries: int,
        length: int,
        cache_position: Tensor | slice | None,
        device: torch.device,
    ) -> Any:
        """The same mask for FlexAttention, which skips the tiles nobody sees."""
        from torch.nn.attention.flex_attention import create_block_mask

        keys = self.keys
        blocks = None if self.blocks is None else self.blocks.expand(batch, -1)
        query_blocks = None if blocks is None else _at(blocks, cache_position)

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = query >= 0
            if blocks is not None and query_blocks is not None:
                seen = seen & (blocks[row, key] <= query_blocks[row, query])
            if keys is not None:
                seen = seen & keys[row, key]
            return seen

        return create_block_mask(visible, batch, None, queries, length, device=str(device))


def _at(values: Tensor, cache_position: Tensor | slice | None) -> Tensor:
    """The entries of [batch or 1, length] at the fed positions. Dummy entries (-1) read the last one."""
    if cache_position is None:
        return values
    if isinstance(cache_position, slice):
        return values[:, cache_position]
    return values.expand(len(cache_position), -1).gather(1, cache_position % values.shape[1])


def _flex_attention(compiled: bool) -> Any:
    """FlexAttention pays only as a kernel: outside a compiled model, CUDA calls go through its own compilation."""
    from torch.nn.attention.flex_attention import flex_attention

    return _compile_once(flex_attention) if compiled else flex_attention


@cache
def _compile_once(function: Any) -> Any:
    return torch.compile(function)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Softmax attention. query [batch, heads, queries, dim]; key, value [batch, kv_heads, length, dim].

    `mask` is what `AttentionMask.dense` or `.flex` gave. Grouped key heads are repeated, as the original
    code does, except for FlexAttention, which groups them itself.
    """
    if mask is not None and not isinstance(mask, Tensor):
        flex = _flex_attention(compiled=query.is_cuda and not torch.compiler.is_compiling())
        return cast(
            Tensor, flex(query, key, value, block_mask=mask, enable_gqa=key.shape[1] != query.shape[1])
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
