"""From the plan of a forward to its indices: which tokens are fed, where their keys go, who sees what, what is asked.

Tokens of all rows are packed behind each other. Entries beyond the last are scrap: their keys go to a slot that nobody
sees, and their outputs to a lane that nobody reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.slots import Method, Slots


class Asking(NamedTuple):
    """Queries as attention sees them: in lanes [slots, width], or packed as they are."""

    lane: Tensor  # [n] index into [slots * width] of each query, slots * width for scrap
    bias: Tensor | None  # added to scores, [slots, 1, width or 1, columns]; None where all see all
    bounds: (
        Tensor | None
    )  # [slots + 1] int32, only where packed: row i's queries are bounds[i] to bounds[i + 1]


class Prepared(NamedTuple):
    """Indices of one forward: of `tokens` fed, of `candidates` wanted, and of [slots, widest] positions to decide."""

    row: Tensor  # [tokens]
    column: Tensor
    position: Tensor  # in the row's own text
    place: Tensor  # in the buffers of keys and values
    every: Asking
    wanted_row: Tensor  # [candidates]
    wanted_column: Tensor
    wanted_token: Tensor  # index into the tokens fed
    some: Asking
    key_start: Tensor | None  # [slots + 1] int32, only where packed: a row's first column in the buffers
    key_count: Tensor | None  # [slots] int32: its columns
    candidate: Tensor  # [slots, widest] positions in the generated part, in order
    valid: Tensor
    must: Tensor


def prepare(
    rows: Slots,
    method: Method,
    packed: bool,
    tokens: int,
    window: int,
    candidates: int,
    widest: int,
    masked: bool,
) -> Prepared:
    """`masked` says that some row's prompt is shorter than its columns. `packed` is for attention over packed queries,
    which is told where rows begin and end instead of what they may not see."""
    slots, columns = rows.canvas.shape
    device = rows.canvas.device
    behind = rows.fed.cumsum(0)
    first = behind - rows.fed
    index = torch.arange(tokens, device=device)
    row = torch.searchsorted(behind, index, right=True).clamp(max=slots - 1)
    inside = index < behind[-1]
    offset = index - first[row]
    column = rows.start[row] + offset
    gap, left_out = rows.gap.unbind(1)
    column = torch.where(inside, torch.where(column < gap[row], column, column + left_out[row]), 0)
    candidate, valid, must = _candidates(rows, method, widest)
    lane, wanted_row, wanted_column = _wanted(candidate, valid, method, candidates)
    every = rows.start[:, None] + torch.arange(window, device=device)
    some = method.prompt + candidate - method.shift
    masked = masked and not packed
    key_start = key_count = None
    if packed:
        key_start = _bounds(torch.arange(1, slots + 1, device=device) * (columns + 1))
        key_start[:-1] += rows.pad
        key_count = (columns - rows.pad).int()
    return Prepared(
        row=row,
        column=column,
        position=(column - rows.pad[row]).clamp(min=0),
        place=torch.where(inside, row * (columns + 1) + column, columns),
        every=Asking(
            torch.where(inside, row * window + offset, slots * window),
            _bias(rows, method, masked, every),
            _bounds(behind) if packed else None,
        ),
        wanted_row=wanted_row,
        wanted_column=wanted_column,
        wanted_token=(
            first[wanted_row]
            + wanted_column
            - rows.start[wanted_row]
            - torch.where(wanted_column < gap[wanted_row], 0, left_out[wanted_row])
        ).clamp(0, tokens - 1),
        some=Asking(
            lane,
            _bias(rows, method, masked, some),
            _bounds(torch.full_like(behind, widest) if slots == 1 else valid.sum(1).cumsum(0))
            if packed
            else None,
        ),
        key_start=key_start,
        key_count=key_count,
        candidate=candidate,
        valid=valid,
        must=must,
    )


def _bounds(behind: Tensor) -> Tensor:
    """0 and the running counts, as int32."""
    return F.pad(behind, (1, 0)).int()


def _candidates(rows: Slots, method: Method, widest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the candidates in order, padded to `widest`, with validity and groups that must make progress."""
    order = rows.candidates.byte().argsort(dim=1, descending=True, stable=True)
    position = order[:, :widest].contiguous()
    valid = rows.candidates.gather(1, position)
    must = rows.must.gather(1, position)
    if not method.decoder.rule.forced:
        only = (
            rows.opening if method.decoder.opens_with_first(method.shift) else torch.zeros_like(rows.opening)
        )
        must = must * only[:, None]
    return position, valid, must


def _wanted(candidate: Tensor, valid: Tensor, method: Method, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lane, row and column of the outputs that predict the valid candidates, packed to `count`.

    With one slot there is nothing to pack, and every entry is asked for.
    """
    slots, widest = candidate.shape
    device = candidate.device
    entry = torch.arange(slots * widest, device=device)
    if slots == 1:
        return entry, torch.zeros_like(entry), method.prompt + candidate[0] - method.shift
    flat = valid.reshape(-1)
    rank = torch.where(flat, flat.long().cumsum(0) - 1, count)
    lane = torch.full((count + 1,), slots * widest, dtype=torch.int64, device=device)
    lane = lane.scatter(0, rank, entry)[:-1]
    inside = lane.clamp(max=slots * widest - 1)
    row = torch.div(inside, widest, rounding_mode="floor")
    return lane, row, method.prompt + candidate.reshape(-1)[inside] - method.shift


def _bias(rows: Slots, method: Method, masked: bool, asking: Tensor) -> Tensor | None:
    """0 or -inf for queries at columns [slots, width]: [slots, 1, width or 1, columns], None where all see all."""
    causal = method.decoder.schedule.block_causal
    if not masked and not causal:
        return None
    column = torch.arange(method.columns, device=asking.device)
    seen = (column >= rows.pad[:, None])[:, None, None]
    if causal:
        size, prompt = rows.table.size, method.prompt
        block, own = (
            (torch.div(of - prompt, size, rounding_mode="floor") + 1).clamp(min=0) for of in (column, asking)
        )
        seen = seen & (block <= own[:, None, :, None])
    zeros = torch.zeros(seen.shape, dtype=rows.confidence.dtype, device=seen.device)
    return zeros.masked_fill(~seen, float("-inf"))
