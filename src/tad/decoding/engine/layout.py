"""The query layout of a forward: which tokens are computed, where their keys go, who sees what, whose outputs are wanted.

Tokens of all rows are packed behind each other. Entries beyond the last are padding: their keys go to a dummy position
that nobody sees, and their outputs to a padded index that nobody reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tad.decoding.engine.buckets import StepShape
from tad.decoding.state import DecodeSpec, DecodeState
from tad.decoding.step import Queries, select_candidates


class Spans(NamedTuple):
    """Which packed queries are a slot's, and which of its KV positions each of them sees: one run for all masks there are."""

    first: Tensor  # [slots] index of the slot's first query
    count: Tensor  # [slots]
    start: Tensor  # [slots] KV position that its queries see first
    end: Tensor  # [n] behind the last one that the query sees


class QueryLayout(NamedTuple):
    """Packed queries as attention sees them. The library's wants them padded to [slots, width], our own their spans."""

    padded_index: Tensor  # [n] into [slots * width], slots * width for padding
    bias: (
        Tensor | None
    )  # added to scores, [slots, 1, width or 1, kv_len]; None where all see all, or spans say it
    spans: Spans | None  # where our own attention serves


class PackedQueries(NamedTuple):
    """Indices of one forward: of `tokens` computed, of `candidates` wanted, and of [slots, widest] positions to decide."""

    token_row: Tensor  # [tokens]
    token_place: Tensor  # KV position in its row
    rope_position: Tensor  # position in the row's own text
    kv_index: Tensor  # in the buffers of keys and values
    all_queries: QueryLayout  # of the tokens
    source: Tensor  # [candidates] KV position whose output predicts the candidate
    source_token: Tensor  # index into the tokens
    candidate_queries: QueryLayout  # of the candidates
    asked: Queries


def pack_queries(
    rows: DecodeState, spec: DecodeSpec, shape: StepShape, masked: bool, spanned: bool
) -> PackedQueries:
    """`masked` says that some query may not see some position, `spanned` that spans are wanted, and no bias."""
    slots, kv_len = rows.canvas.shape
    device = rows.canvas.device
    behind = rows.queries.cumsum(0)
    first = behind - rows.queries
    index = torch.arange(shape.tokens, device=device)
    row = torch.searchsorted(behind, index, right=True).clamp(max=slots - 1)
    inside = index < behind[-1]
    offset = index - first[row]
    place = rows.start[row] + offset
    gap, left_out = rows.gap.unbind(1)
    place = torch.where(inside, torch.where(place < gap[row], place, place + left_out[row]), 0)
    position, valid, forced = select_candidates(rows, spec, shape.widest)
    padded_index, wanted_row, source = _wanted(position, valid, spec, shape.candidates)
    positions = rows.start[:, None] + torch.arange(shape.window, device=device)
    positions = torch.where(positions < gap[:, None], positions, positions + left_out[:, None])
    candidates = spec.prompt_len + position - spec.logit_shift
    opened = rows.open_block(spec)
    alone = slots == 1  # nothing is packed then, and padding is computed like the rest

    def spans(count: Tensor, of: Tensor, at: Tensor) -> Spans | None:
        if not spanned:
            return None
        here = None if opened is None else opened[of]
        end = _seen_end(at, rows.pad[of], (rows.prompt_len + rows.length)[of], spec, here)
        first = torch.zeros_like(count) if alone else count.cumsum(0) - count
        return Spans(first, torch.full_like(count, len(at)) if alone else count, rows.pad, end)

    def bias(query: Tensor) -> Tensor | None:
        return _bias(rows, spec, query) if masked and not spanned else None

    return PackedQueries(
        token_row=row,
        token_place=place,
        rope_position=(place - rows.pad[row]).clamp(min=0),
        kv_index=torch.where(inside, row * (kv_len + 1) + place, kv_len),
        all_queries=QueryLayout(
            torch.where(inside, row * shape.window + offset, slots * shape.window),
            bias(positions),
            spans(rows.queries, row, place),
        ),
        source=source,
        source_token=(
            first[wanted_row]
            + source
            - rows.start[wanted_row]
            - torch.where(source < gap[wanted_row], 0, left_out[wanted_row])
        ).clamp(0, shape.tokens - 1),
        candidate_queries=QueryLayout(
            padded_index, bias(candidates), spans(valid.sum(1), wanted_row, source)
        ),
        asked=Queries(
            position,
            valid,
            forced,
            row=wanted_row,
            generated=source + spec.logit_shift - spec.prompt_len,
            padded_index=padded_index if slots > 1 else None,
        ),
    )


def _wanted(position: Tensor, valid: Tensor, spec: DecodeSpec, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded index, row and KV position of the outputs that predict the valid candidates, packed to `count`.

    With one slot there is nothing to pack, and every entry is wanted.
    """
    slots, widest = position.shape
    device = position.device
    entry = torch.arange(slots * widest, device=device)
    if slots == 1:
        return entry, torch.zeros_like(entry), spec.prompt_len + position[0] - spec.logit_shift
    flat = valid.reshape(-1)
    rank = torch.where(flat, flat.long().cumsum(0) - 1, count)
    padded_index = torch.full((count + 1,), slots * widest, dtype=torch.int64, device=device)
    padded_index = padded_index.scatter(0, rank, entry)[:-1]
    inside = padded_index.clamp(max=slots * widest - 1)
    row = torch.div(inside, widest, rounding_mode="floor")
    return padded_index, row, spec.prompt_len + position.reshape(-1)[inside] - spec.logit_shift


def _bias(rows: DecodeState, spec: DecodeSpec, query: Tensor) -> Tensor:
    """0 or -inf for queries at KV positions [slots, width]: [slots, 1, width or 1, kv_len]."""
    place = torch.arange(spec.kv_len, device=query.device)
    end = (rows.prompt_len + rows.length)[:, None]
    pad = rows.pad[:, None]
    if spec.layout is not None:
        opened = rows.open_block(spec)
        end = _seen_end(query, pad, end, spec, None if opened is None else opened[:, None])
    seen = (place >= pad[:, :, None]) & (place < end[:, :, None])
    zeros = torch.zeros(seen.shape, dtype=rows.confidence.dtype, device=seen.device)
    return zeros.masked_fill(~seen, float("-inf"))[:, None]


def _seen_end(
    query: Tensor, pad: Tensor, end: Tensor, spec: DecodeSpec, opened: Tensor | None = None
) -> Tensor:
    """Behind the last KV position that queries at KV positions see, in rows with so much padding that end there.

    Under block-causal attention that is the end of the query's block. A query in padding counts to the first block.
    `opened` [..., 2] is `DecodeState.open_block` of each query's row.
    """
    layout = spec.layout
    if layout is None:
        return end
    if opened is not None:
        first, behind = opened.unbind(-1)
        seen = torch.where((query >= first) & (query < behind), behind, query + 1)
        return seen.maximum(pad + 1).minimum(end)
    absolute = layout.grid == "absolute"
    start = pad if absolute else spec.prompt_len
    block = torch.div(
        query - start, layout.size, rounding_mode="floor"
    )  # -1: the prompt, where blocks begin behind it
    return (start + (block.clamp(min=0 if absolute else -1) + 1) * layout.size).minimum(end)
