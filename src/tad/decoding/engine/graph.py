"""The graph engine: what is built once for a model (fused weights, KV pools, CUDA graphs), and the forwards that use it.

A batch acquires a forward (its slots and a KV pool of its own) and gives it back when its last row has left; the next
batch of the same kind finds it again, with its graphs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tad.decoding.decoders import Decoder
from tad.decoding.engine.buckets import StepShape, prompt_bucket, slot_bucket
from tad.decoding.engine.cuda_graphs import CudaGraphCache
from tad.decoding.engine.gemm import can_compile
from tad.decoding.engine.kv_pool import KVPool
from tad.decoding.engine.layout import PackedQueries, pack_queries
from tad.decoding.engine.network import Network, compile_dynamic, compile_whole
from tad.decoding.engine.weights import fingerprint, why_unfit
from tad.decoding.prefixes import Held
from tad.decoding.sampler import Samples, sample
from tad.decoding.schedule import Verified
from tad.decoding.state import DecodeSpec, DecodeState, Request, RowFacts
from tad.decoding.step import Queries, decide, step
from tad.decoding.unmasking import Credit, TopKPerStep, on_device
from tad.models import MaskedDiffusionModel

MAX_GRAPHS = 256  # that are kept
MAX_FORWARDS = 16  # that are kept; their large buffers are shared
_SCORES = ("token", "confidence", "odds", "entropy", "margin")


def why_not(model: MaskedDiffusionModel, decoder: Decoder, adapter: bool | None = None) -> str | None:
    """Why the graph engine does not serve this model with this decoder; None where it does.

    `adapter` says that an adapter that is not merged is to be switched on or off; it then has fused weights of its own.
    """
    sampling, rule = decoder.sampling, decoder.rule
    if isinstance(decoder.schedule, Verified):
        return "decoder 'verified' has forwards of its own"
    if sampling.cfg:
        return "guidance runs every row twice"
    if isinstance(rule, Credit):
        return "rule 'credit' keeps a score for every token of every position"
    if isinstance(rule, TopKPerStep) and (sampling.top_p is not None or sampling.top_k is not None):
        return (
            "rule 'quota' on a filtered distribution has ties, which the published samplers break row by row"
        )
    return why_unfit(model, adapter)


_ENGINES: WeakKeyDictionary[MaskedDiffusionModel, dict[bool | None, GraphEngine]] = WeakKeyDictionary()
_MAKING = threading.Lock()


def engine_for(model: MaskedDiffusionModel, adapter: bool | None = None) -> GraphEngine:
    """The model's engine: made at the first call, and anew when weights were moved or replaced."""
    with _MAKING:
        known = _ENGINES.setdefault(model, {})
        found = known.get(adapter)
        if found is None or not found.fits(model):
            found = known[adapter] = GraphEngine(model, adapter=adapter)
        return found


class GraphEngine:
    """See the module. `compiled` defaults to what pays: on CUDA with Triton. There the decisions are compiled too, for each
    decoder anew, which takes some seconds at its first use; other thresholds and prompts then take none. `kernels`: see
    `Network`. `adapter`: an attached adapter is on (in merged weights of their own) or off."""

    def __init__(
        self,
        model: MaskedDiffusionModel,
        compiled: bool | None = None,
        kernels: bool | None = None,
        adapter: bool | None = None,
    ) -> None:
        cuda = model.device.type == "cuda"
        self.model, self.device, self.adapter = model, model.device, adapter
        self.compiled = can_compile(model.device) if compiled is None else compiled
        self.fused = self.compiled and cuda  # laying out and decisions are compiled
        with self.there():
            self.network = Network(model, self.compiled, kernels, adapter)
        self.graphs = CudaGraphCache(cuda, MAX_GRAPHS)
        self.pools: dict[bool, list[KVPool]] = {
            True: [],
            False: [],
        }  # by whether keys are stored between forwards
        self.forwards: OrderedDict[tuple[DecodeSpec, int, KVPool], GraphForward] = OrderedDict()
        self.lock = threading.RLock()  # graphs share memory: one step at a time
        self._in_use: set[KVPool] = set()
        self._made_for = fingerprint(model, adapter)

    def fits(self, model: MaskedDiffusionModel) -> bool:
        """Whether the model is still what this engine was made for."""
        return self._made_for == fingerprint(model, self.adapter)

    @property
    def nbytes(self) -> int:
        """Memory of all buffers that are kept, without the weights and the graphs' pool."""
        pools = [pool for some in self.pools.values() for pool in some]
        return sum(pool.nbytes for pool in pools) + sum(one.state.nbytes for one in self.forwards.values())

    def there(self) -> AbstractContextManager[Any]:
        """Kernels and captures go to the current device; this makes it the model's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def acquire(self, spec: DecodeSpec, slots: int, tenant: object = None) -> GraphForward:
        """Slots for rows of this spec, or a little larger ones, made or found again. What rows of the same tenant left in them may
        be shared by later ones; without a tenant nothing is."""
        spec, slots = replace(spec, prompt_len=prompt_bucket(spec.prompt_len)), slot_bucket(slots)
        with self.lock, self.there():
            pools = self.pools[spec.decoder.cache.stores]
            free = [pool for pool in pools if pool not in self._in_use]
            known = [pool for pool in free if (spec, slots, pool) in self.forwards]
            if not free:
                layers = self.model.shape.layers if spec.decoder.cache.stores else 1
                free = [KVPool(self.model, layers)]
                pools.append(free[0])
            pool = next((pool for pool in free if pool.tenant == (spec, tenant)), (known or free)[0])
            found = self._forward(spec, slots, pool)
            if pool.tenant != (spec, tenant) or tenant is None:
                pool.held.clear()
                pool.tenant = (spec, tenant)
            found.masked = False
            found.state.clear()
            self._in_use.add(found.pool)
            return found

    @torch.inference_mode()
    def grow(self, forward: GraphForward, slots: int) -> GraphForward:
        """The same rows with room for more. Slots follow each other in a pool, so that keys and values stay in place."""
        with self.lock, self.there():
            found = self._forward(forward.spec, slot_bucket(slots), forward.pool, keep=True)
            found.state.clear()
            found.state.put(torch.arange(forward.slots, device=self.device), forward.state)
            return found

    @torch.inference_mode()
    def release(self, forward: GraphForward, failed: bool) -> None:
        with self.lock:
            self._in_use.discard(forward.pool)
            if failed:
                forward.pool.clear()

    def _forward(self, spec: DecodeSpec, slots: int, pool: KVPool, keep: bool = False) -> GraphForward:
        if pool.reserve(slots * (spec.kv_len + 1), spec.keeps_outputs, keep):
            self._drop(lambda key: key[2] is pool)
        key = (spec, slots, pool)
        if key not in self.forwards:
            self.forwards[key] = GraphForward(self, spec, slots, pool)
        self.forwards.move_to_end(key)
        idle = [key for key in self.forwards if key[2] not in self._in_use]
        for old in idle[: max(0, len(self.forwards) - MAX_FORWARDS)]:
            if old != key:
                self._drop(lambda one, old=old: one == old)  # type: ignore[misc]
        return self.forwards[key]

    def _drop(self, matching: Callable[[tuple[DecodeSpec, int, KVPool]], bool]) -> None:
        """Forget forwards and what was captured of them."""
        for key in [key for key in self.forwards if matching(key)]:
            del self.forwards[key]
        self.graphs.drop(lambda key: matching(key[0]))


class GraphSizes(NamedTuple):
    """What a graph is captured for, beside its slots."""

    shape: StepShape
    masked: bool  # some query may not see some position: padding before or behind a row, or a later block


class GraphForward:
    """Slots of one spec. `compiled` engines fuse the sampler, `fused` ones also the many small kernels of laying out and
    deciding, which pays where a step is short and the same decoder is used for long."""

    def __init__(self, engine: GraphEngine, spec: DecodeSpec, slots: int, pool: KVPool) -> None:
        self.engine, self.spec, self.slots, self.pool = engine, spec, slots, pool
        self.device = engine.device
        self.state = DecodeState.empty(spec, slots, self.device)
        self.masked = False
        self.kv = pool.view(slots * (spec.kv_len + 1), spec.keeps_outputs)
        # Made here: a step itself must not bring anything from the host.
        self.rope = engine.network.rope_table(spec.kv_len)
        rule = on_device(spec.decoder.rule, self.device)
        self.pack = _packer(spec, engine.fused, engine.network)
        self._sample = _sampler(spec, engine.compiled)
        self._decide = _decider(spec, rule, engine.fused and rule.compiles)
        if engine.fused:
            torch._dynamo.maybe_mark_dynamic(self.state.canvas, 1)
            for tensor in self.state.tensors() if slots > 1 else ():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def run(self, rows: Mapping[int, tuple[Request, RowFacts]]) -> None:
        """One step of the rows, by slot, from its CUDA graph."""
        engine, spec = self.engine, self.spec
        sizes = self.sizes(rows)
        with engine.lock, engine.there():
            engine.graphs.run(((spec, self.slots, self.pool), sizes), partial(step, self.state, self, sizes))

    def sizes(self, rows: Mapping[int, tuple[Request, RowFacts]]) -> GraphSizes:
        spec = self.spec
        room = (spec.prompt_len, spec.length)
        uneven = any((len(request.prompt), request.length) != room for request, _ in rows.values())
        # With several slots it stays so: a batch would else end in graphs of its own for its longest rows.
        self.masked = spec.layout is not None or uneven or (self.masked and self.slots > 1)
        shape = StepShape.holding(
            [facts.queries for _, facts in rows.values()],
            [facts.candidates for _, facts in rows.values()],
            self.slots,
            spec.kv_len,
            spec.length,
            self.masked,
        )
        return GraphSizes(shape, self.masked)

    def grown(self, slots: int) -> GraphForward:
        return self.engine.grow(self, slots)

    def compact(self, used: list[int]) -> dict[int, int]:
        """Rows stay in their slots: nothing is computed for the others."""
        return {}

    @property
    def held(self) -> dict[int, Held]:
        return self.pool.held

    def copy_keys(self, source: Tensor, target: Tensor) -> None:
        """Keys and values from some slots and KV positions [n, 2] to others."""
        room = self.spec.kv_len + 1
        here, there = (places[:, 0] * room + places[:, 1] for places in (source, target))
        with self.engine.lock, self.engine.there():
            for part in (*self.kv.keys, *self.kv.values):
                part[there] = part[here]

    def close(self, failed: bool = False) -> None:
        self.engine.release(self, failed)

    # The parts of a step

    def outputs(self, rows: DecodeState, sizes: GraphSizes) -> tuple[Queries, Tensor]:
        packed = self.pack(rows, sizes)
        keeps = self.spec.keeps_outputs
        network = self.engine.network
        return packed.asked, network.outputs(rows.canvas, self.kv, packed, self.rope, sizes.shape, keeps)

    def sample(self, outputs: Tensor, rows: DecodeState, row: Tensor, position: Tensor) -> Samples:
        number = (rows.table.forwards + 1)[row]
        return Samples(*self._sample(self.engine.model.head(outputs), rows.seed[row], number, position))

    def decide(self, rows: DecodeState, samples: Samples, queries: Queries, sizes: GraphSizes) -> None:
        scores = tuple(getattr(samples, name) for name in _SCORES)
        self._decide(rows, scores, queries.position, queries.valid, queries.forced)


def _sampler(spec: DecodeSpec, compiled: bool) -> Callable[..., Any]:
    sampling, mask, ends = spec.decoder.sampling, spec.tokens.mask, spec.tokens.ends

    def draw(logits: Tensor, seed: Tensor, number: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        found = sample(logits, sampling, mask, ends, seed, number, position)
        return tuple(getattr(found, name) for name in _SCORES)

    # The noise of sampling is a hash whose 64-bit constants the compiler's back ends refuse; sampling is rare.
    return compile_dynamic(draw) if compiled and sampling.temperature == 0 else draw


def _packer(
    spec: DecodeSpec, fused: bool, network: Network
) -> Callable[[DecodeState, GraphSizes], PackedQueries]:
    def pack(
        rows: DecodeState, sizes: tuple[int, int, int, int], masked: bool, spanned: bool
    ) -> PackedQueries:
        return pack_queries(rows, spec, StepShape(*sizes), masked, spanned)

    ready = compile_whole(pack, dynamic=True) if fused else pack

    def call(rows: DecodeState, sizes: GraphSizes) -> PackedQueries:
        shape, masked = sizes
        packed: PackedQueries = ready(
            rows,
            (shape.tokens, shape.window, shape.candidates, shape.widest),
            masked,
            network.takes_spans(len(rows.canvas), shape.window, masked),
        )
        return packed

    return call


def _decider(spec: DecodeSpec, rule: Any, fused: bool) -> Callable[..., Any]:
    def choose(
        rows: DecodeState, scores: tuple[Tensor, ...], position: Tensor, valid: Tensor, forced: Tensor
    ) -> None:
        decide(rows, spec, rule, Samples(*scores), position, valid, forced)

    if not fused:
        return choose
    compiled = compile_whole(choose)

    def call(
        rows: DecodeState, scores: tuple[Tensor, ...], position: Tensor, valid: Tensor, forced: Tensor
    ) -> None:
        for tensor in (*scores, position, valid, forced):
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
            if len(tensor) > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(rows, scores, position, valid, forced)

    return call
