"""The scheduler: rows join, are stepped one forward at a time, and leave finished or on demand.

Rows that agree in everything a forward depends on (decoder, adapter on or off, about the room for prompt and answer) share a
batch; batches take turns, one forward each. Rows do not see each other: a row gives the same tokens and the same number of
forwards alone or in any company. The host reads one small tensor per forward; callbacks read what was revealed too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from tad.decoding.decoders import Decoder
from tad.decoding.engine import GraphEngine, engine_for, why_not
from tad.decoding.engine.buckets import doubled
from tad.decoding.engine.graph import GraphForward
from tad.decoding.plain import PlainForward
from tad.decoding.prefixes import Held, final_text, find_prefix
from tad.decoding.result import Decoded, Step, StepCallback
from tad.decoding.schedule import BlockByBlock, Verified
from tad.decoding.state import DecodeSpec, DecodeState, Request, RowFacts
from tad.decoding.step import plan
from tad.decoding.unmasking import TopKPerStep
from tad.decoding.verified import VerifiedBatch
from tad.errors import TadError
from tad.models import LM, MaskedDiffusionModel

EngineChoice = Literal["auto", "plain", "graph"]
ENGINE_VARIABLE = "TAD_ENGINE"  # decides where no engine is asked for
DEFAULT_ENGINE: EngineChoice = "auto"

# The least room of a batch whose rows are not known beforehand; more is a power of two of it.
_PROMPT_LEN, _LENGTH = 128, 256


Forward = PlainForward | GraphForward  # state, keys and values of some slots, and what steps them


@dataclass
class _Row:
    request: Request
    joined: float  # on the performance counter
    facts: RowFacts


class Batch:
    """Rows of one spec in the slots of one forward."""

    def __init__(self, forward: Forward, on_step: StepCallback | None = None) -> None:
        self.forward, self.on_step = forward, on_step
        self.rows: dict[int, _Row] = {}  # by slot

    def __len__(self) -> int:
        return len(self.rows)

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> None:
        """Put rows into free slots and plan their first forward; other rows stay as they are."""
        needed = len(self.rows) + len(requests)
        if needed > self.forward.slots:
            self.forward = self.forward.grown(max(needed, _more_slots(needed)))
        forward, now = self.forward, time.perf_counter()
        free = [slot for slot in range(forward.slots) if slot not in self.rows][: len(requests)]
        fresh = DecodeState.of_rows(forward.spec, requests, forward.device)
        self._take_prefixes(requests, free, fresh)
        plan(fresh, forward.spec)
        forward.state.put(torch.tensor(free, device=forward.device), fresh)
        for slot, request, facts in zip(free, requests, fresh.facts.tolist(), strict=True):
            self.rows[slot] = _Row(request, now, RowFacts(*facts))

    @torch.inference_mode()
    def step(self) -> dict[int, Decoded]:
        """One forward of every row; the finished ones leave and are returned by name."""
        state = self.forward.state
        self.forward.run({slot: (row.request, row.facts) for slot, row in self.rows.items()})
        facts = state.facts[: max(self.rows) + 1].tolist()  # the one read of this step
        before = {slot: row.facts for slot, row in self.rows.items()}
        for slot, row in self.rows.items():
            row.facts = RowFacts(*facts[slot])
        if any(row.facts.broken for row in self.rows.values()):
            raise TadError("the model's outputs are not numbers (nan); load it with dtype bf16 or fp32")
        if self.on_step is not None:
            self._report(before, self.on_step)
        finished = [slot for slot, row in self.rows.items() if not row.facts.alive]
        done = self._collect(finished) if finished else {}
        self._hold_texts(before, done)
        self._leave(finished)
        return done

    def close(self, failed: bool = False) -> None:
        """Let go of the forward."""
        self.forward.close(failed)

    @torch.inference_mode()
    def drop(self, names: Collection[int]) -> None:
        """Let rows go before their end."""
        slots = [slot for slot, row in self.rows.items() if row.request.name in names]
        self.forward.state.clear(slots)
        self._leave(slots)

    def _take_prefixes(self, requests: Sequence[Request], slots: list[int], fresh: DecodeState) -> None:
        """Copy what the forward's slots hold of these rows' beginnings; `slots` are theirs from now on."""
        forward, block = self.forward, self.forward.spec.shared_block
        if block is None:
            return
        held = {slot: text for slot, text in forward.held.items() if slot < forward.slots}
        source, target = [], []
        for row, (slot, request) in enumerate(zip(slots, requests, strict=True)):
            donor, count = find_prefix(request.prompt, held, block)
            fresh.known[row] = count
            own = forward.spec.prompt_len - len(request.prompt)
            source += [(donor, held[donor].start + place) for place in range(count)]
            target += [(slot, own + place) for place in range(count)]
        for slot in slots:
            forward.held.pop(slot, None)
        if source:
            here, there = (torch.tensor(places, device=forward.device) for places in (source, target))
            forward.copy_keys(here, there)

    def _hold_texts(self, before: Mapping[int, RowFacts], done: Mapping[int, Decoded]) -> None:
        """Remember what is final after a step: of a row's prompt once it decodes its first block, of all when it ends."""
        forward, block = self.forward, self.forward.spec.shared_block
        if block is None:
            return
        for slot, row in self.rows.items():
            request, created = row.request, before[slot].created
            ended = done.get(request.name)
            if created and (ended is not None or slot not in forward.held):
                generated = [] if ended is None else ended.tokens
                text = final_text(request.prompt, generated, created, block)
                forward.held[slot] = Held(forward.spec.prompt_len - len(request.prompt), text)

    def _leave(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self.rows[slot]
        for source, target in self.forward.compact(sorted(self.rows)).items():
            self.rows[target] = self.rows.pop(source)

    def _collect(self, slots: list[int]) -> dict[int, Decoded]:
        state, spec, now = self.forward.state, self.forward.spec, time.perf_counter()
        index = torch.tensor(slots, device=self.forward.device)
        parts = [state.generated, state.steps, state.confidence]
        if state.scorer_confidence is not None:
            parts.append(state.scorer_confidence)
        done = {}
        for slot, *values in zip(
            slots, *(part.index_select(0, index).tolist() for part in parts), strict=True
        ):
            row = self.rows[slot]
            ids, steps, confidence, *scorer = (value[: row.request.length] for value in values)
            seconds = now - row.joined
            done[row.request.name] = Decoded(
                ids, steps, confidence, row.facts.forwards, seconds, spec.tokens.ends, *scorer
            )
        return done

    def _report(self, before: Mapping[int, RowFacts], on_step: StepCallback) -> None:
        """Hand out what the last forward revealed."""
        state, count = self.forward.state, max(self.rows) + 1
        revealed, confidence = state.revealed[:count].tolist(), state.revealed_confidence[:count].tolist()
        for slot, row in self.rows.items():
            shown = revealed[slot][: row.request.length]
            positions = [place for place, token in enumerate(shown) if token >= 0]
            tokens, sure = ([part[slot][place] for place in positions] for part in (revealed, confidence))
            asked = before[slot]
            on_step(
                Step(
                    row.request.name,
                    row.facts.forwards,
                    positions,
                    tokens,
                    sure,
                    asked.queries,
                    asked.created,
                )
            )


_Kind = tuple[DecodeSpec, bool]  # what the rows of one batch have in common; whether the adapter is on


class Scheduler:
    """`admit` requests, `step` while there are rows, `drop` what nobody wants any more. For one thread.

    `room` (KV positions for prompts, positions to generate) and `slots` are for callers that know all their rows
    beforehand; else requests share batches of a similar size, which grow as rows join. `engine`: see
    `tad.decoding.decode`. `scorer` is the model that scores tokens where requests ask for it. `merges`: an adapter that is
    not merged gets fused weights of its own beside the base's, so that the graph engine serves both.
    """

    def __init__(
        self,
        lm: LM,
        engine: EngineChoice | GraphEngine | None = None,
        on_step: StepCallback | None = None,
        room: tuple[int, int] | None = None,
        slots: int = 1,
        scorer: MaskedDiffusionModel | None = None,
        merges: bool = False,
    ) -> None:
        self.lm, self.on_step, self.room, self.slots, self.scorer = lm, on_step, room, slots, scorer
        self.engine = choose_engine(engine)
        self.merges = merges
        self.batches: dict[_Kind, Batch | VerifiedBatch] = {}  # in the order of their turns
        self._where: dict[int, _Kind] = {}  # by name of the row
        self._tenant = object()

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: int) -> bool:
        return name in self._where

    def run(
        self, requests: Sequence[Request], on_done: Callable[[int], None] | None = None
    ) -> dict[int, Decoded]:
        """Decode all requests, `slots` at a time: when one ends, the next one takes its place. `on_done` is told how many just
        have."""
        waiting, done = deque(requests), dict[int, Decoded]()
        try:
            while waiting or self._where:
                free = min(self.slots - len(self), len(waiting))
                if free:
                    self.admit([waiting.popleft() for _ in range(free)])
                found = self.step()
                done |= found
                if found and on_done is not None:
                    on_done(len(found))
        finally:
            self.close()
        return done

    def admit(self, requests: Sequence[Request]) -> None:
        """Let rows in. Where one cannot join, its whole batch is dropped, and the error is raised."""
        kinds = [self._kind(request) for request in requests]
        together: dict[_Kind, list[Request]] = {}
        rooms = {kind: _roomiest(kind, {*self.batches, *kinds}) for kind in set(kinds)}
        for request, kind in zip(requests, kinds, strict=True):
            together.setdefault(rooms[kind], []).append(request)
        for kind, some in together.items():
            with self._dropping(kind):
                if kind not in self.batches:
                    self.batches[kind] = self._open(kind, len(some))
                self.batches[kind].admit(some)
            self._where |= dict.fromkeys((request.name for request in some), kind)

    def step(self) -> dict[int, Decoded]:
        """One forward of the batch whose turn it is; finished rows by name. A batch whose forward fails is dropped."""
        if not self.batches:
            return {}
        kind = next(iter(self.batches))
        batch = self.batches[kind] = self.batches.pop(kind)  # to the end of the line
        with self._dropping(kind):
            done = batch.step()
        self._forget(kind, done)
        return done

    def drop(self, names: Collection[int]) -> None:
        """Let rows go before their end."""
        gone: dict[_Kind, list[int]] = {}
        for name in names:
            gone.setdefault(self._where[name], []).append(name)
        for kind, some in gone.items():
            with self._dropping(kind):
                self.batches[kind].drop(some)
            self._forget(kind, some)

    def close(self, failed: bool = False) -> None:
        """Drop everything."""
        for batch in self.batches.values():
            batch.close(failed)
        self.batches.clear()
        self._where.clear()

    def _forget(self, kind: _Kind, names: Iterable[int]) -> None:
        for name in names:
            del self._where[name]
        if not len(self.batches[kind]):
            self.batches.pop(kind).close()

    @contextmanager
    def _dropping(self, kind: _Kind) -> Iterator[None]:
        """Drops the batch where an exception passes."""
        try:
            yield
        except BaseException:
            batch = self.batches.pop(kind, None)
            if batch is not None:
                batch.close(failed=True)
            self._where = {name: where for name, where in self._where.items() if where != kind}
            raise

    def _kind(self, request: Request) -> _Kind:
        decoder, room = request.decoder.bind(self.lm, request.length), self.room
        if room is None:
            longest = max(len(request.prompt), len(request.scorer_prompt or ()))
            length = request.length
            if mixes_lengths(decoder):
                block = decoder.schedule.block or 1
                length = -(-doubled(length, _LENGTH) // block) * block
            room = doubled(longest, _PROMPT_LEN), length
        scored = request.scorer_prompt is not None
        spec = DecodeSpec.of(self.lm, decoder, *room, scored, request.given is not None)
        return spec, request.adapter

    def _open(self, kind: _Kind, rows: int) -> Batch | VerifiedBatch:
        lm, (spec, adapter) = self.lm, kind
        slots = self.slots if self.room is not None else _more_slots(rows)
        engine = self._engine(kind)
        context = lm.base if lm.peft is not None and not adapter else nullcontext
        if isinstance(spec.decoder.schedule, Verified):
            return VerifiedBatch(lm.model, spec, self.on_step, context)
        forward: Forward
        if engine is None:
            forward = PlainForward(lm.model, spec, slots, self.scorer, context)
        else:
            forward = engine.acquire(spec, slots, self._tenant)
        return Batch(forward, self.on_step)

    def _engine(self, kind: _Kind) -> GraphEngine | None:
        """The graph engine to use; None for the plain forward."""
        engine, lm, (spec, on) = self.engine, self.lm, kind
        if engine == "plain" or (engine == "auto" and lm.device.type != "cuda"):
            return None
        adapter = None if lm.peft is None or not self.merges else on
        reason = why_not(lm.model, spec.decoder, adapter)
        if reason is None and (spec.scored or spec.given):
            reason = "tokens that a second prompt scores, or that are given, are for the plain forward"
        if reason is None:
            return engine if isinstance(engine, GraphEngine) else engine_for(lm.model, adapter)
        if engine == "auto":
            return None
        raise TadError(f"the graph engine does not serve this: {reason}; use engine='plain'")


def choose_engine(engine: EngineChoice | GraphEngine | None) -> EngineChoice | GraphEngine:
    """The engine that was asked for, else the environment's, else the default."""
    if isinstance(engine, GraphEngine):
        return engine
    found = engine or os.environ.get(ENGINE_VARIABLE) or DEFAULT_ENGINE
    if found not in ("auto", "plain", "graph"):
        raise TadError(f"engine is one of auto, plain, graph, not {found!r}")
    return cast(EngineChoice, found)


def _roomiest(own: _Kind, others: Iterable[_Kind]) -> _Kind:
    """The kind with most room that rows of this kind can join: up to twice their own, since keys need memory for all of it.

    Rows of similar sizes are then in one batch, and no forward waits for another batch's turn.
    """
    spec, adapter = own
    longest = 2 * spec.length if mixes_lengths(spec.decoder) else spec.length
    found = own
    for kind in others:
        prompt_len, length = kind[0].prompt_len, kind[0].length
        fits = spec.prompt_len <= prompt_len <= 2 * spec.prompt_len and spec.length <= length <= longest
        alike = (replace(spec, prompt_len=prompt_len, length=length), adapter) == kind
        if fits and alike and kind[0].kv_len > found[0].kv_len:
            found = kind
    return found


def mixes_lengths(decoder: Decoder) -> bool:
    """Whether rows of different generated lengths can share a batch: not where the decoder depends on the length."""
    if isinstance(decoder.schedule, BlockByBlock | Verified):
        return True
    return decoder.schedule.block is not None and not isinstance(decoder.rule, TopKPerStep)


def _more_slots(rows: int) -> int:
    """Slots of a batch that may grow: few sizes, since a CUDA graph serves one."""
    return 1 if rows == 1 else doubled(rows, 4)
