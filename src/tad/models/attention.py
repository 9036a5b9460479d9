"""Who sees whom: attention masks of masked-diffusion models, and the one function that applies them.

A mask is about the positions of a row's canvas. Without a cache the queries are all of them; with one the queries are
the positions fed (`cache_position`) and the keys are every position of the cache. Which mask a model has is said by its
config (`Shape.blocks`) and asked of `MaskedDiffusionModel.attention_mask`. Token-causal attention
is block-causal with blocks of one position.
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

    With `causal`, the context (prompt and finished blocks) is token-causal, as in an autoregressive model, and only the
    positions of the open block see each other in both directions (`open_block`). A `size` of 1 is an autoregressive model.
    """

    size: int | Tensor  # positions per block; [batch, 1] where rows differ
    grid: Grid = "answer"
    causal: bool = False

    @property
    def drafts(self) -> bool:
        """Whether masks behind a token-causal context can be filled: an autoregressive model that was converted."""
        return self.causal and not (isinstance(self.size, int) and self.size == 1)


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


def open_block(positions: Tensor, opened: Tensor | None) -> Tensor:
    """Blocks of one position, but for one larger block: [batch or 1, length] indices for `AttentionMask.blocks`.

    `opened` [batch or 1, 2] are the first position of the open block and the first behind it, counted as `positions` are;
    None where all are finished.
    """
    blocks = (positions if positions.dim() == 2 else positions[None]).clamp(min=0)
    if opened is None:
        return blocks
    start, end = opened[:, :1], opened[:, 1:]
    return torch.where((blocks >= start) & (blocks < end), start, blocks)


@dataclass(frozen=True)
class AttentionMask:
    """Full attention by default; `keys` hides padding, `blocks` makes it block-causal. Both may be given.

    `noisy` and `samples` belong to the training layout of block-diffusion models, in which a row holds a noisy and a
    clean copy of its tokens (`noisy_and_clean`); they need `blocks`.
    """

    keys: Tensor | None = None  # [batch, length] bool, True where the position is real
    blocks: Tensor | None = None  # [batch or 1, length] int: a query sees its own block and the earlier ones
    noisy: Tensor | None = None  # [batch or 1, length] bool: in the noisy copy
    samples: Tensor | None = None  # [batch or 1, length] int: samples of a packed row do not see each other

    @classmethod
    def padded(cls, keys: Tensor) -> AttentionMask:
        """Nobody sees padding; left and right padding are the same to this mask."""
        return cls(keys=keys.bool())

    @classmethod
    def noisy_and_clean(
        cls, blocks: Tensor, noisy: Tensor, samples: Tensor | None = None, keys: Tensor | None = None
    ) -> AttentionMask:
        """A noisy block sees itself and the clean blocks before it; the clean copy is block-causal by itself.

        So every noisy block has the prefix it would have in decoding, all of them in one forward.
        """
        return cls(keys, blocks, noisy, samples)

    def dense(self, cache_position: Tensor | slice | None = None) -> Tensor | None:
        """[batch, 1, queries, length] bool, True where a query sees a key; None where all see all."""
        if self.blocks is None:
            return None if self.keys is None else self.keys[:, None, None, :]

        def pair(values: Tensor) -> tuple[Tensor, Tensor]:
            return _at(values, cache_position)[:, :, None], values[:, None, :]

        seen = _sees(*pair(self.blocks), None if self.noisy is None else pair(self.noisy))
        if self.samples is not None:
            query, key = pair(self.samples)
            seen = seen & (query == key)
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

        def pair(values: Tensor | None) -> tuple[Tensor, Tensor] | None:
            if values is None:
                return None
            of_keys = values.expand(batch, -1)
            return _at(of_keys, cache_position), of_keys

        keys, blocks, noisy, samples = self.keys, pair(self.blocks), pair(self.noisy), pair(self.samples)

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            def at(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                return values[0][row, query], values[1][row, key]

            seen = query >= 0
            if blocks is not None:
                seen = seen & _sees(*at(blocks), None if noisy is None else at(noisy))
            if samples is not None:
                same = at(samples)
                seen = seen & (same[0] == same[1])
            if keys is not None:
                seen = seen & keys[row, key]
            return seen

        return create_block_mask(visible, batch, None, queries, length, device=str(device))


def _sees(query: Tensor, key: Tensor, noisy: tuple[Tensor, Tensor] | None) -> Tensor:
    """Whether a query of one block sees a key of another; `noisy` says of both which copy they are in, if there are two."""
    if noisy is None:
        return key <= query
    of_query, of_key = noisy
    return ((key == query) & (of_key == of_query)) | ((key < query) & ~of_key)


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
