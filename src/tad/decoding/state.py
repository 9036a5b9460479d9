"""Decoding state: everything that a step reads and leaves behind, per slot, in address-stable buffers, as CUDA graphs require.

A slot holds a row from its first forward to its last, then the next row. Prompts end at KV position `prompt_len` and
generated parts begin there: a shorter prompt has padding before it, a shorter generated part has EOS behind it that
nobody sees. The host learns of the state through `facts`, a few numbers per slot. Keys and values are the forwards'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tad.decoding.canvas import left_pad
from tad.decoding.decoders import Decoder
from tad.decoding.schedule import BlockByBlock, TokenByToken
from tad.decoding.table import BlockTable
from tad.decoding.unmasking import Credit
from tad.models import LM, BlockLayout, SpecialTokens


@dataclass(frozen=True)
class Request:
    """A row to decode. `name` is how steps and results call it.

    `scorer_prompt` is a second prompt for the same generated part, whose predictions the strategy may look at; `given`
    are tokens to write instead of sampled ones.
    """

    name: int
    prompt: Sequence[int]
    length: int  # positions to generate
    decoder: Decoder
    seed: int = 0
    adapter: bool = True  # False: the base model
    scorer_prompt: Sequence[int] | None = None
    given: Sequence[int] | None = None


@dataclass(frozen=True)
class DecodeSpec:
    """What the rows of a state have in common: the decoder and all that it needs to know of model and canvas."""

    decoder: Decoder
    tokens: SpecialTokens
    logit_shift: int
    vocab: int
    prompt_len: int  # KV positions for prompts
    length: int  # positions to generate
    scored: bool = False
    given: bool = False
    blocks: BlockLayout | None = None  # the model's own; None: full attention

    @classmethod
    def of(
        cls,
        lm: LM,
        decoder: Decoder,
        prompt_len: int,
        length: int,
        scored: bool = False,
        given: bool = False,
    ) -> DecodeSpec:
        """For rows of this model whose decoders are bound to it (`Decoder.bind`) and that generate up to `length` positions; block by block, a last block has room behind them."""
        blocks = lm.model.shape.blocks
        if isinstance(decoder.schedule, BlockByBlock):
            length += decoder.schedule.block or 0
        shift, vocab = lm.family.logit_shift, lm.model.shape.vocab
        return cls(decoder, lm.tokens, shift, vocab, prompt_len, length, scored, given, blocks)

    @property
    def kv_len(self) -> int:
        return self.prompt_len + self.length

    @property
    def absolute_grid(self) -> bool:
        """Whether blocks lie on a grid that begins with the row's first token."""
        return self.blocks is not None and self.blocks.grid == "absolute"

    @property
    def layout(self) -> BlockLayout | None:
        """Who sees whom: the schedule's blocks where it makes attention block-causal, else the model's own."""
        schedule = self.decoder.schedule
        if not schedule.block_causal or schedule.block is None:
            return self.blocks
        causal = self.blocks is not None and self.blocks.causal
        return BlockLayout(schedule.block, "absolute" if self.absolute_grid else "answer", causal)

    @property
    def shared_block(self) -> int | None:
        """Positions per block where the keys of a row's finished blocks depend on its tokens so far and on nothing else, so that
        rows which begin alike can share them; None where they depend on more."""
        schedule = self.decoder.schedule
        exact = isinstance(schedule, BlockByBlock) and self.decoder.cache.stores and self.absolute_grid
        return schedule.block if exact and not (self.scored or self.given) else None

    def own_length(self, request: Request) -> int:
        """Positions that a row generates: block by block, its last block is whole, and what is too much is cut at the end.

        A token that the block before predicts, where logits are shifted, needs no block of its own.
        """
        schedule = self.decoder.schedule
        if not isinstance(schedule, BlockByBlock) or schedule.block is None:
            return request.length
        end = len(request.prompt) + request.length
        over = end % schedule.block
        if over <= self.logit_shift:
            return request.length
        return min(request.length + schedule.block - over, self.length)

    @property
    def keeps_outputs(self) -> bool:
        """Whether a candidate may need the output of a position outside the query range: it is kept from an earlier forward."""
        alone = isinstance(
            self.decoder.schedule, TokenByToken
        )  # the token before the candidate is always fed
        return self.logit_shift > 0 and self.decoder.cache.stores and not alone


class RowFacts(NamedTuple):
    """What the host reads of a row after each step: how it stands, and what its next forward will do."""

    alive: int
    start: int  # of the query range
    queries: int  # KV positions in it
    gap_start: int  # first position left out, and how many are
    gap: int
    candidates: int
    forwards: int  # so far
    spent: int  # of them in the current block
    created: int  # blocks that exist
    broken: int  # the last samples were not numbers

    @property
    def end(self) -> int:
        return self.start + self.queries + self.gap


@dataclass
class DecodeState:
    """Per-slot tensors: [slots], or [slots, length] over the generated part."""

    canvas: Tensor  # [slots, kv_len]
    pad: Tensor  # positions before the prompt
    length: Tensor  # positions of the row's own generated part
    seed: Tensor
    alive: Tensor  # bool: the row has masks left
    broken: Tensor  # bool
    steps: Tensor
    confidence: Tensor
    candidates: Tensor  # bool, of the next forward
    forced: Tensor  # groups that have to make progress in it
    known: Tensor  # positions at the prompt's beginning whose keys and values were copied from another row
    start: Tensor  # first KV position of its query range
    queries: Tensor  # number of positions in it, 0 for slots without a living row
    gap: Tensor  # [slots, 2] first position left out among them, and how many are
    opening: Tensor  # bool: it opens a block
    revealed: Tensor  # tokens revealed by the last forward, -1 elsewhere
    revealed_confidence: Tensor
    facts: Tensor  # [slots, len(RowFacts)]
    table: BlockTable
    credit: Tensor | None = None  # [slots, length, vocab]
    given: Tensor | None = None  # tokens to write
    scorer_prompt: Tensor | None = None  # [slots, prompt_len]
    scorer_pad: Tensor | None = None
    scorer_confidence: Tensor | None = None

    @classmethod
    def of_rows(cls, spec: DecodeSpec, requests: Sequence[Request], device: torch.device) -> DecodeState:
        """Rows of masks behind their prompts, before their first forward is planned."""
        tokens, length = spec.tokens, spec.length
        prompts = [request.prompt for request in requests]
        canvas, pad = left_pad(prompts, length, tokens, spec.prompt_len)
        own = [spec.own_length(request) for request in requests]
        for row, positions in enumerate(own):
            canvas[row, spec.prompt_len + positions :] = tokens.eos
        rows, block = len(requests), spec.decoder.schedule.block or length
        offset = None
        if spec.absolute_grid:
            offset = torch.tensor([len(prompt) % block for prompt in prompts], device=device)
        table = BlockTable.start(rows, length, block, device, offset)
        if isinstance(
            spec.decoder.schedule, BlockByBlock
        ):  # a prompt without a whole block leaves nothing to store
            table.cached += torch.tensor([len(prompt) < block for prompt in prompts], device=device)
        flat = torch.zeros(rows, dtype=torch.int64, device=device)
        wide = torch.zeros(rows, length, dtype=torch.int64, device=device)
        made = cls(
            canvas=canvas.to(device),
            pad=pad.to(device),
            length=torch.tensor(own, device=device),
            seed=torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device),
            alive=flat == 0,
            broken=flat > 0,
            steps=wide.clone(),
            confidence=wide.float(),
            candidates=wide > 0,
            forced=wide.clone(),
            known=flat.clone(),
            start=flat.clone(),
            queries=flat.clone(),
            gap=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            opening=flat > 0,
            revealed=wide - 1,
            revealed_confidence=wide.float(),
            facts=torch.zeros(rows, len(RowFacts._fields), dtype=torch.int64, device=device),
            table=table,
        )
        if isinstance(spec.decoder.rule, Credit):
            made.credit = torch.zeros(rows, length, spec.vocab, device=device)
        if spec.given:
            made.given = torch.tensor(
                [[*(request.given or ())[:length], *[tokens.eos] * length][:length] for request in requests],
                device=device,
            )
        if spec.scored:
            made.scorer_confidence = wide.float()
            if not spec.given:
                prompts = [request.scorer_prompt or () for request in requests]
                canvas, pad = left_pad(prompts, 0, tokens, spec.prompt_len)
                made.scorer_prompt, made.scorer_pad = canvas.to(device), pad.to(device)
        return made

    @classmethod
    def empty(cls, spec: DecodeSpec, slots: int, device: torch.device) -> DecodeState:
        """Slots without rows; their positions count as real, so that attention over them is defined."""
        filler = Request(-1, [spec.tokens.eos] * spec.prompt_len, spec.length, spec.decoder)
        made = cls.of_rows(spec, [filler] * slots, device)
        made.alive.zero_()
        return made

    @property
    def prompt_len(self) -> int:
        """KV positions for prompts, by the tensors' sizes: compiled code serves every size, and every number as its own case."""
        return self.canvas.shape[1] - self.steps.shape[1]

    def open_block(self, spec: DecodeSpec) -> Tensor | None:
        """KV positions of the block that sees itself in both directions, [slots, 2], the second behind it: none where a block is
        stored. None where no model has such a block, because its context is not token-causal or it fills no masks."""
        if spec.layout is None or not spec.layout.drafts:
            return None
        table = self.table
        end = self.prompt_len + table.grid_start(table.created)
        start = self.prompt_len + table.start_of(table.created - 1)
        return torch.stack((torch.where(table.storing, end, start), end), dim=1)

    @property
    def generated(self) -> Tensor:
        """[slots, length] view of the canvas."""
        return self.canvas[:, self.prompt_len :]

    def tensors(self) -> list[Tensor]:
        records: tuple[object, ...] = (self, self.table)
        values = (getattr(record, field.name) for record in records for field in fields(record))  # type: ignore[arg-type]
        return [value for value in values if isinstance(value, Tensor)]

    def first(self, rows: int) -> DecodeState:
        """Views of the first so many slots."""
        if rows == len(self.canvas):
            return self

        def cut(record: object) -> dict[str, Tensor]:
            values = {field.name: getattr(record, field.name) for field in fields(record)}  # type: ignore[arg-type]
            return {name: value[:rows] for name, value in values.items() if isinstance(value, Tensor)}

        table = replace(self.table, **cut(self.table))
        return replace(self, **cut(self), table=table)

    def working(self) -> DecodeState:
        """The same tensors in a record of its own, whose fields can be assigned."""
        return replace(self, table=replace(self.table))

    def keep(self, working: DecodeState) -> None:
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

    def put(self, index: Tensor, rows: DecodeState) -> None:
        """Rows into the slots at `index`."""
        for own, new in zip(self.tensors(), rows.tensors(), strict=True):
            own.index_copy_(0, index, new)

    def clear(self, slots: Sequence[int] | None = None) -> None:
        """No row in these slots; in any by default."""
        for tensor in (
            self.alive,
            self.queries,
            self.gap,
            self.facts,
            self.candidates,
            self.pad,
            self.known,
        ):
            if slots is None:
                tensor.zero_()
            else:
                tensor[slots] = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())
