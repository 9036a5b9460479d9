"""The decoding step: forward, sample, unmask, write, and the plan of the next forward. One function on one state.

What runs the forward is exchangeable: `tad.decoding.plain` calls the model, `tad.decoding.engine` replays a CUDA graph. The
plan comes last, so that the host knows the sizes of a forward before it starts. Nothing here is read by the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tad.decoding.sampler import Samples
from tad.decoding.schedule import BlockByBlock, Pipelined, Verified
from tad.decoding.state import DecodeSpec, DecodeState
from tad.decoding.unmasking import Candidates, OwnCanvas, Strategy, force_progress

# Logits of this many positions are held at once, so that memory does not grow with batch x candidates x vocabulary.
_LOGIT_BYTES = 256 * 2**20


class Queries(NamedTuple):
    """What is asked of a forward: the candidates [slots, widest], and those whose logits are computed [n]."""

    position: Tensor  # [slots, widest] in the generated part, in order
    valid: Tensor
    forced: Tensor
    row: Tensor  # [n] slot of each computed one
    generated: Tensor  # [n] its position in the generated part
    padded_index: Tensor | None = (
        None  # [n] its place in [slots * widest], beyond for padding; None: all, in order
    )


class StepForward(Protocol):
    """What runs the forward of a step, and the step's other parts as it wants them (compiled or not)."""

    spec: DecodeSpec

    def outputs(self, rows: DecodeState, sizes: Any) -> tuple[Queries, Tensor]:
        """What is asked, and [n, ...] what the head needs to predict the computed candidates."""

    def sample(self, outputs: Tensor, rows: DecodeState, row: Tensor, position: Tensor) -> Samples:
        """Samples of some of them, [n] each."""

    def decide(self, rows: DecodeState, samples: Samples, queries: Queries, sizes: Any) -> None:
        """`decide`, below."""


def step(state: DecodeState, forward: StepForward, sizes: Any) -> None:
    """One forward of every living row, and what follows from it."""
    rows = state.working()
    queries, outputs = forward.outputs(rows, sizes)
    samples = _sample_in_chunks(forward, outputs, rows, queries)
    forward.decide(rows, samples, queries, sizes)
    state.keep(rows)


def _sample_in_chunks(forward: StepForward, outputs: Tensor, rows: DecodeState, queries: Queries) -> Samples:
    slots, widest = queries.position.shape
    chunk = max(1, _LOGIT_BYTES // (4 * forward.spec.vocab))
    parts = [
        vars(
            forward.sample(
                outputs[low : low + chunk],
                rows,
                queries.row[low : low + chunk],
                queries.generated[low : low + chunk],
            )
        )
        for low in range(0, len(outputs), chunk)
    ]
    joined = {
        name: torch.cat([part[name] for part in parts]) if len(parts) > 1 else value
        for name, value in parts[0].items()
        if value is not None
    }
    index = queries.padded_index
    return Samples(
        **{
            name: value.view(slots, widest) if index is None else scatter_rows(value, index, slots, widest)
            for name, value in joined.items()
        }
    )


def scatter_rows(values: Tensor, padded_index: Tensor, slots: int, width: int) -> Tensor:
    """values [n, ...] to their places in [slots, width, ...], 0 where nothing goes."""
    flat = torch.zeros(slots * width + 1, *values.shape[1:], dtype=values.dtype, device=values.device)
    flat.index_copy_(0, padded_index, values)
    return flat[:-1].view(slots, width, *values.shape[1:])


def select_candidates(rows: DecodeState, spec: DecodeSpec, widest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the candidates in order, padded to `widest`, with validity and forced groups: [slots, widest] each."""
    order = rows.candidates.byte().argsort(dim=1, descending=True, stable=True)
    position = order[:, :widest].contiguous()
    valid = rows.candidates.gather(1, position)
    forced = rows.forced.gather(1, position)
    if not spec.decoder.rule.forced:
        opens = spec.decoder.opens_with_first(spec.logit_shift)
        forced = forced * (rows.opening if opens else torch.zeros_like(rows.opening))[:, None]
    return position, valid, forced


def decide(
    rows: DecodeState,
    spec: DecodeSpec,
    strategy: Strategy,
    samples: Samples,
    position: Tensor,
    valid: Tensor,
    forced: Tensor,
    canvases: list[OwnCanvas] | None = None,
) -> None:
    """Unmask and write, then plan the next forward. `strategy` is the decoder's, perhaps with its numbers on the device."""
    table, schedule = rows.table, spec.decoder.schedule
    candidates = Candidates(
        position=position,
        valid=valid,
        forced=forced,
        spent=table.forwards_in_block,
        seed=rows.seed,
        forward=table.forwards + 1,
        length=rows.steps.shape[1],
        canvases=canvases,
    )
    if isinstance(schedule, BlockByBlock) and schedule.post_steps is not None:
        candidates.current = rows.generated.gather(1, position)
        candidates.masked = candidates.current == spec.tokens.mask
    chosen = strategy.choose(samples, candidates) & valid
    chosen = force_progress(chosen, samples.score(strategy.score), candidates, table.blocks)
    if candidates.masked is not None:
        table.settled = ~(chosen | (valid & candidates.masked)).any(1)
    rows.broken = (samples.confidence.isnan() & valid).any(1)
    table.count_forward(rows.alive)
    _write(rows, chosen, samples, position)
    table.ended = table.ended | (chosen & (samples.token == spec.tokens.eos)).any(1)
    plan(rows, spec)


def _write(rows: DecodeState, chosen: Tensor, samples: Samples, position: Tensor) -> None:
    """The chosen tokens with their step and confidence."""
    rows.revealed.fill_(-1)
    targets = [
        (rows.generated, samples.token),
        (rows.steps, rows.table.forwards[:, None].expand_as(chosen)),
        (rows.confidence, samples.confidence),
        (rows.revealed, samples.token),
        (rows.revealed_confidence, samples.confidence),
    ]
    if rows.scorer_confidence is not None and samples.scorer_log_p is not None:
        targets.append((rows.scorer_confidence, samples.scorer_log_p.exp()))
    for target, value in targets:
        old = target.gather(1, position)
        target.scatter_(1, position, torch.where(chosen, value.to(target.dtype), old))


def plan(rows: DecodeState, spec: DecodeSpec) -> None:
    """What the next forward of each row computes and may reveal. Finished rows are marked inactive."""
    decoder, table = spec.decoder, rows.table
    assert not isinstance(decoder.schedule, Verified)  # batches of its own
    masked = _fill_ends(rows, spec)
    if isinstance(decoder.schedule, BlockByBlock):
        rows.alive = rows.alive & (masked.any(1) | decoder.schedule.busy(table, masked))
    else:
        rows.alive = rows.alive & masked.any(1)
    table.observe(masked)
    planned = decoder.schedule.plan(table, masked)
    # A row's own generated part may be shorter than the state's.
    table.created = table.created.minimum(table.blocks_in(rows.length))
    asked = decoder.cache.query_range(table, rows.prompt_len, planned.visible.minimum(rows.length))
    candidates = planned.candidates & rows.alive[:, None]
    if isinstance(decoder.schedule, BlockByBlock) and not spec.logit_shift:
        candidates = candidates & ~table.storing[:, None]  # no output of a stored block predicts what follows
    if decoder.opens_with_first(spec.logit_shift):
        # The first position's logits are the output of the position before it, which only an opening forward computes.
        place = torch.arange(rows.steps.shape[1], device=masked.device)
        here = place == table.start_of(table.current)[:, None]
        candidates = candidates & (here | ~asked.opening[:, None])
    rows.candidates, rows.forced, rows.opening = candidates, planned.forced, asked.opening
    rows.start = asked.start.maximum(rows.pad + rows.known)
    if asked.gap is not None:
        rows.gap = asked.gap
    rows.queries = (asked.end - rows.start - rows.gap[:, 1]) * rows.alive
    facts = (
        rows.alive.long(),
        rows.start,
        rows.queries,
        *rows.gap.unbind(1),
        candidates.sum(1),
        table.forwards,
        table.forwards_in_block,
        table.created,
        rows.broken.long(),
    )
    rows.facts = torch.stack(facts, dim=1)


def _fill_ends(rows: DecodeState, spec: DecodeSpec) -> Tensor:
    """Write EOS where decoding stops; returns the masks that are left, [slots, length]."""
    stop, table, generated = spec.decoder.stop, rows.table, rows.generated
    masked = generated == spec.tokens.mask
    if isinstance(spec.decoder.schedule, BlockByBlock):
        return _stop_blocks(rows, spec, spec.decoder.schedule, masked)
    if stop != "off":
        is_end = _is_any(generated, spec.tokens.ends)
        after = is_end.long().cumsum(1) - is_end.long() > 0  # strictly behind the first end token
        fill = after
        if stop == "end":
            fill = masked & after & ~(masked & ~after).any(1, keepdim=True)
        generated.masked_fill_(fill, spec.tokens.eos)
        rows.steps.masked_fill_(fill, 0)
        rows.confidence.masked_fill_(fill, 0.0)
        masked = masked & ~fill
    if isinstance(spec.decoder.schedule, Pipelined):
        # A pipelined canvas that met an end token does not grow: what never existed is filled when the rest is done.
        place = torch.arange(rows.steps.shape[1], device=masked.device)
        exists = place < table.start_of(table.created)[:, None]
        fill = masked & (table.ended & ~(masked & exists).any(1))[:, None]
        generated.masked_fill_(fill, spec.tokens.eos)
        masked = masked & ~fill
    return masked


def _stop_blocks(rows: DecodeState, spec: DecodeSpec, schedule: BlockByBlock, masked: Tensor) -> Tensor:
    """The same for a canvas that grows block by block, where masks before an end token are those of its block.

    A row that met an end token ends when no mask is before it (`end`, and `eager`, which has nothing more to save here), or
    when its block is finished and stored (`block`). What never existed is filled with EOS.
    """
    stop, table, generated = spec.decoder.stop, rows.table, rows.generated
    if stop == "off":
        return masked
    place = torch.arange(generated.shape[1], device=generated.device)
    is_end = _is_any(generated, spec.tokens.ends) & (place < rows.length[:, None])
    before = is_end.long().cumsum(1) == 0
    ends = is_end.any(1)
    if stop == "block":
        ends = ends & schedule.finished(table, masked) & ~schedule.to_store(table, masked)
    else:
        ends = ends & ~(masked & before).any(1)
    rows.alive = rows.alive & ~ends
    fill = masked & ends[:, None]
    generated.masked_fill_(fill, spec.tokens.eos)
    return masked & ~fill


def _is_any(ids: Tensor, tokens: Iterable[int]) -> Tensor:
    return reduce(torch.logical_or, [ids == token for token in tokens])
