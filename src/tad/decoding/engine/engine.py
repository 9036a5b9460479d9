"""The host's side: rows into slots, one launch and one small read per forward, results out.

An engine belongs to a model and keeps what it has built for it: joint weights, buffers, recorded steps. Rows wait in a
queue; a slot whose row is finished takes the next one, so that the device stays busy to the end.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tad.decoding.decoders import Decoder
from tad.decoding.engine.buckets import StepShape, prompt_bucket, slot_bucket
from tad.decoding.engine.capture import Recorder
from tad.decoding.engine.network import Network
from tad.decoding.engine.products import can_compile
from tad.decoding.engine.slots import Arena, Method, Slots
from tad.decoding.engine.step import Stepper, plan
from tad.decoding.engine.weights import fingerprint, why_unfit
from tad.decoding.result import Decoded, Step, StepCallback
from tad.decoding.rule import Credit, Quota
from tad.errors import TadError
from tad.models import MaskedDiffusionModel, SpecialTokens

MAX_STEPS = 128  # recorded steps that are kept
MAX_SETS = 16  # sets of slots that are kept; their large buffers are shared
_ALIVE, _FED, _CANDIDATES, _FORWARDS, _CREATED = range(5)  # columns of `Slots.facts`


def why_not(model: MaskedDiffusionModel, decoder: Decoder) -> str | None:
    """Why the engine does not serve this model with this decoder; None where it does."""
    sampling, rule = decoder.sampling, decoder.rule
    if sampling.cfg:
        return "guidance runs every row twice"
    if isinstance(rule, Credit):
        return "rule 'credit' keeps a score for every token of every position"
    if isinstance(rule, Quota) and (sampling.top_p is not None or sampling.top_k is not None):
        return (
            "rule 'quota' on a filtered distribution has ties, which the published samplers break row by row"
        )
    return why_unfit(model)


_ENGINES: WeakKeyDictionary[MaskedDiffusionModel, Engine] = WeakKeyDictionary()
_MAKING = threading.Lock()


def engine_for(model: MaskedDiffusionModel) -> Engine:
    """The model's engine: made at the first call, and anew when weights were moved or replaced."""
    with _MAKING:
        found = _ENGINES.get(model)
        if found is None or not found.fits(model):
            found = _ENGINES[model] = Engine(model)
        return found


@dataclass
class Tenant:
    """A row in its slot, as the host knows it."""

    row: int
    joined: float
    fed: int
    candidates: int
    created: int


class Engine:
    """See the module. `compiled`, `capture` and `fused` default to what pays: all on CUDA (without Triton only
    `capture`), none elsewhere. `fused` compiles the decisions too, for each decoder anew, which takes some seconds at its
    first use; other thresholds and prompts then take none. `bucketed` rounds sizes up to a few,
    by default where steps are recorded. `packed` is attention over rows as they are packed, for half precision on CUDA: no
    padding, and no mask where prompts differ in length. `mode` is `torch.compile`'s for the layers. `products` and
    `attention` say whose kernels serve few rows (`tad.decoding.engine.network`): our own for fp8 weights, which are tuned
    when the engine is made, leave activations unrounded; that for attention serves one row whose prompt fills its columns."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        compiled: bool | None = None,
        capture: bool | None = None,
        fused: bool | None = None,
        bucketed: bool | None = None,
        packed: bool = False,
        mode: str | None = None,
        products: str = "auto",
        attention: str = "auto",
    ) -> None:
        cuda = model.device.type == "cuda"
        self.device = model.device
        self.compiled = can_compile(model.device) if compiled is None else compiled
        self.fused = self.compiled and cuda if fused is None else fused
        self.packed = packed
        with self._there():
            self.network = Network(model, self.compiled, mode, products, attention)
        self.recorder = Recorder(cuda if capture is None else capture and cuda, MAX_STEPS)
        # One layer's buffers are enough where nothing is stored from forward to forward.
        self.bucketed = self.recorder.capture if bucketed is None else bucketed
        self.arenas = {True: Arena(model, model.shape.layers), False: Arena(model, 1)}
        self.sets: OrderedDict[tuple[Any, ...], Stepper] = OrderedDict()
        self._made_for = self._signature(model)
        self._decoding = threading.Lock()  # buffers and recorded steps are one caller's at a time

    def fits(self, model: MaskedDiffusionModel) -> bool:
        """Whether the model is still what this engine was made for."""
        return self._made_for == self._signature(model)

    @property
    def nbytes(self) -> int:
        """Memory of all buffers that are kept, without the weights and the recorder's pool."""
        return sum(part.nbytes for part in self.arenas.values()) + sum(
            stepper.slots.nbytes for stepper in self.sets.values()
        )

    def _there(self) -> AbstractContextManager[Any]:
        """Kernels and recordings go to the current device; this makes it the model's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        decoder: Decoder,
        length: int,
        tokens: SpecialTokens,
        shift: int,
        seeds: Sequence[int],
        slots: int | None = None,
        on_step: StepCallback | None = None,
    ) -> list[Decoded]:
        """Decode all prompts, `slots` at a time. Arguments are taken as checked, and the decoder as one it serves."""
        if not prompts:
            return []
        with self._decoding, self._there():
            wide, count = max(len(prompt) for prompt in prompts), min(slots or len(prompts), len(prompts))
            if self.bucketed:
                wide, count = prompt_bucket(wide), slot_bucket(count)
            method = Method(decoder.prepared(length, shift), tokens, shift, wide, length)
            masked = any(len(prompt) != wide for prompt in prompts)
            stepper = self._stepper(method, count)
            stepper.slots.clear()
            waiting, tenants = deque(range(len(prompts))), dict[int, Tenant]()
            results: dict[int, Decoded] = {}
            while waiting or tenants:
                free = [slot for slot in range(count) if slot not in tenants][: len(waiting)]
                if free:
                    rows = [waiting.popleft() for _ in free]
                    self._admit(stepper, free, rows, prompts, seeds, tenants)
                shape = StepShape.exact(
                    [tenant.fed for tenant in tenants.values()],
                    [tenant.candidates for tenant in tenants.values()],
                    alone=count == 1,
                )
                if self.bucketed:
                    shape = shape.rounded(count, method.columns, length)
                elif self.compiled:
                    shape = shape.plural(length)
                self.recorder.run((method, count, masked, shape), partial(stepper.step, shape, masked))
                facts = stepper.slots.facts.tolist()  # the one read of this step
                if any(facts[slot][_FORWARDS] > 2 * length for slot in tenants):
                    # Every forward reveals something, unless there is nothing to compare.
                    raise TadError(
                        "the model's outputs are not numbers (nan); load it with dtype bf16 or fp32"
                    )
                if on_step is not None:
                    _report(stepper.slots, facts, tenants, on_step)
                ended = [slot for slot in tenants if not facts[slot][_ALIVE]]
                if ended:
                    results |= _collect(stepper.slots, ended, tenants, tokens)
                for slot, tenant in tenants.items():
                    _update(tenant, facts[slot])
            return [results[row] for row in range(len(prompts))]

    def _admit(
        self,
        stepper: Stepper,
        free: list[int],
        rows: list[int],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        tenants: dict[int, Tenant],
    ) -> None:
        """Put rows into free slots and plan their first forward; the other slots' plans stay as they are."""
        now = time.perf_counter()
        fresh = Slots.start_rows(
            stepper.method, [prompts[row] for row in rows], [seeds[row] for row in rows], self.device
        )
        plan(fresh, stepper.method)
        stepper.slots.put(torch.tensor(free, device=self.device), fresh)
        for slot, row, facts in zip(free, rows, fresh.facts.tolist(), strict=True):
            tenants[slot] = Tenant(row, now, 0, 0, 0)
            _update(tenants[slot], facts)

    def _stepper(self, method: Method, count: int) -> Stepper:
        """Slots for this method, made or found again."""
        stores, positions = method.decoder.cache.stores, count * (method.columns + 1)
        arena = self.arenas[stores]
        if arena.reserve(positions, method.keeps_outputs):
            self._drop(lambda key: key[0].decoder.cache.stores == stores)
        key = (method, count)
        if key not in self.sets:
            lent = arena.lend(positions, method.keeps_outputs)
            slots = Slots.empty(method, count, self.device)
            self.sets[key] = Stepper(
                self.network, method, slots, lent, self.compiled, self.fused, self.packed
            )
        self.sets.move_to_end(key)
        while len(self.sets) > MAX_SETS:
            oldest, _ = self.sets.popitem(last=False)
            self.recorder.forget(partial(_is_of_set, oldest))
        return self.sets[key]

    def _drop(self, matching: Any) -> None:
        """Forget everything recorded on buffers that have moved."""
        for key in [key for key in self.sets if matching(key)]:
            del self.sets[key]
        self.recorder.forget(matching)

    @staticmethod
    def _signature(model: MaskedDiffusionModel) -> tuple[Any, ...]:
        return (*fingerprint(model), id(model.__dict__.get("head")))


def _is_of_set(owner: tuple[Any, ...], step: tuple[Any, ...]) -> bool:
    """Whether a recorded step belongs to this set of slots."""
    return step[:2] == owner


def _update(tenant: Tenant, facts: list[int]) -> None:
    tenant.fed, tenant.candidates, tenant.created = facts[_FED], facts[_CANDIDATES], facts[_CREATED]


def _collect(
    slots: Slots, ended: list[int], tenants: dict[int, Tenant], tokens: SpecialTokens
) -> dict[int, Decoded]:
    """Finished rows by number; their slots are free."""
    now = time.perf_counter()
    index = torch.tensor(ended, device=slots.canvas.device)
    generated = slots.canvas[:, -slots.steps.shape[1] :]
    columns = (generated, slots.steps, slots.confidence, slots.table.forwards)
    found = {}
    for slot, ids, steps, confidence, forwards in zip(
        ended, *(part.index_select(0, index).tolist() for part in columns), strict=True
    ):
        tenant = tenants.pop(slot)
        found[tenant.row] = Decoded(ids, steps, confidence, forwards, now - tenant.joined, tokens.ends)
    return found


def _report(slots: Slots, facts: list[list[int]], tenants: dict[int, Tenant], on_step: StepCallback) -> None:
    """Hand out what the last forward revealed."""
    shown, confidence = slots.shown.tolist(), slots.shown_confidence.tolist()
    for slot, tenant in tenants.items():
        positions = [place for place, token in enumerate(shown[slot]) if token >= 0]
        tokens, sure = ([part[slot][place] for place in positions] for part in (shown, confidence))
        forward = facts[slot][_FORWARDS]
        on_step(Step(tenant.row, forward, positions, tokens, sure, tenant.fed, tenant.created))
