"""How decoding is timed, for the rows of `decode.py`: whole decodes that take turns, and one captured step of staged rows."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from machine import (
    ASSUMED_TPF,
    measure_copy_rate,
    measure_product_rate,
    random_lm,
    random_prompts,
    synchronise,
    time_behind,
)
from tad.decoding import GraphEngine, Request, Step, StepCallback, decode, get_decoder
from tad.decoding.decoders import Decoder
from tad.decoding.engine.graph import GraphForward
from tad.decoding.state import DecodeSpec, DecodeState, RowFacts
from tad.decoding.step import plan
from tad.models import LM
from tad.models.quantize import Kind, quantize
from tad.models.shapes import forward_cost

PROMPT, LENGTH = 128, 256
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A decoder, the rate at which its predictions are sure, and what runs it."""

    decoder: Decoder
    tpf: float
    engine: GraphEngine | Literal["plain"]
    lm: LM
    span: int = 64  # see `machine.AssumedTpf`


@dataclass
class Timing:
    """Of whole decodes of one way."""

    first: float  # seconds of the first one
    seconds: list[float] = field(default_factory=list)  # of those that count
    tokens: Counter[int] = field(default_factory=Counter)  # that each forward of one decode computes


class Bench:
    """The model, its engine, and how things are timed."""

    def __init__(self, device: torch.device, options: argparse.Namespace, layers: int | None = None) -> None:
        self.device, self.options, self.cuda = device, options, device.type == "cuda"
        self.prompt, self.length = (32, 64) if options.tiny else (PROMPT, LENGTH)
        self.label = f"{options.shape}{' (tiny)' if options.tiny else ''}"
        self.lm = random_lm(options.shape, device, options.tiny, layers)
        self.dtype = self.lm.dtype
        self._quantized: dict[Kind, tuple[LM, GraphEngine]] = {}
        self.copy_rate = measure_copy_rate(device)
        self.matmul_rate = measure_product_rate(device, self.dtype)
        self.engine = self.make_engine(self.lm)

    def make_engine(
        self, lm: LM, compiled: bool = True, fused: bool = True, kernels: bool | None = None
    ) -> GraphEngine:
        """The engine as it is used on CUDA, or without something of it."""
        engine = GraphEngine(lm.model, compiled and self.cuda, kernels=kernels)
        engine.fused = engine.fused and fused
        return engine

    def quantized(self, kind: Kind) -> tuple[LM, GraphEngine]:
        """A model with smaller weights, and its engine."""
        if kind not in self._quantized:
            lm = random_lm(self.options.shape, self.device, self.options.tiny)
            quantize(lm.model, kind)
            self._quantized[kind] = lm, self.make_engine(lm)
        return self._quantized[kind]

    def small_share(self, kind: Kind) -> float:
        """Bytes that a forward reads of the smaller weights, over those it reads of the others."""
        embedding = self.lm.model.embedding().weight.nbytes
        sizes = []
        for lm in (self.quantized(kind)[0], self.lm):
            parts = (*lm.model.parameters(), *lm.model.buffers())
            sizes.append(sum(part.nbytes for part in parts) - embedding)
        return sizes[0] / sizes[1]

    def prompts(self, count: int, length: int | None = None, seed: int = 0) -> list[list[int]]:
        return random_prompts(self.lm, count, length or self.prompt, seed)

    def decoder(self, name: str, **settings: Any) -> Decoder:
        return get_decoder(name, self.lm.family.name, stop="off", **settings)

    def floors(self, tokens: int, candidates: int = 0, scale: float = 1.0) -> tuple[float, float]:
        """Milliseconds to read the weights (`scale` of their bytes), and to do the arithmetic of `tokens`."""
        cost = forward_cost(self.lm.model.shape, self.prompt + self.length, self.dtype)
        body = cost.flops_per_token - cost.head_flops_per_token
        flops = tokens * body + candidates * cost.head_flops_per_token
        return 1e3 * scale * cost.weight_bytes / self.copy_rate, 1e3 * flops / self.matmul_rate

    def time_decode(
        self, count: int, decoder: Decoder, tpf: float, engine: Any = None, lm: LM | None = None
    ) -> Row:
        """A whole decode of `count` rows with everything on the host: the median of some runs after two first ones."""
        return self.time_decodes(count, [Way(decoder, tpf, engine or self.engine, lm or self.lm)])[0]

    def time_decodes(self, count: int, ways: Sequence[Way]) -> list[Row]:
        """The same of several ways, which take turns."""
        timings = [self.warm_up(count, way) for way in ways]
        for _ in range(self.options.repeats):
            for way, timing in zip(ways, timings, strict=True):
                synchronise(self.device)
                began = time.perf_counter()
                self.run_decode(count, way)
                synchronise(self.device)
                timing.seconds.append(time.perf_counter() - began)
        return [
            self.describe_decode(count, way.tpf, timing) for way, timing in zip(ways, timings, strict=True)
        ]

    def warm_up(self, count: int, way: Way) -> Timing:
        began = time.perf_counter()
        self.run_decode(count, way)
        timing = Timing(time.perf_counter() - began)

        def count_tokens(step: Step) -> None:
            timing.tokens[step.forward] += step.queries

        self.run_decode(count, way, count_tokens)  # sizes that came once are captured now
        return timing

    def run_decode(self, count: int, way: Way, on_step: StepCallback | None = None) -> None:
        ASSUMED_TPF.rate.fill_(way.tpf)
        ASSUMED_TPF.span.fill_(way.span)
        decode(way.lm, self.prompts(count), way.decoder, self.length, engine=way.engine, on_step=on_step)

    def describe_decode(self, count: int, tpf: float, timing: Timing) -> Row:
        seconds, tokens = timing.seconds, timing.tokens
        middle, forwards = statistics.median(seconds), len(tokens)
        floor = sum(max(self.floors(some)) for some in tokens.values()) * 1e-3
        return {
            "ms_per_forward": 1e3 * middle / forwards,
            "forwards_per_s": forwards / middle,
            "tokens_per_s": count * self.length / middle,
            "assumed_tpf": tpf,
            "tpf_reached": self.length / forwards,
            "computed_per_forward": sum(tokens.values()) / forwards,
            "of_floor": floor / middle,
            "first_call_s": timing.first,
            "spread": (max(seconds) - min(seconds)) / middle,
        }

    @torch.inference_mode()
    def stage(self, engine: GraphEngine, count: int, new: int) -> Staged:
        """Rows of which all but the last `new` positions are decoded and frozen, about to be stepped.

        The decoder reveals one token per forward here, so that the step can be repeated without coming to its end. Where
        blocks are the model's own, `new` positions are one block behind all the others.
        """
        block, length = min(32, new), self.length
        quiet = self.decoder("tad-cached", threshold=0.0, keep=None, refresh=10_000, block=block)
        if self.lm.model.shape.blocks is not None:
            block, length = new, length + new
            quiet = self.decoder("sdar", rule="confidence", threshold=2.0, block=block)
        prepared = quiet.bind(self.lm, length)
        forward = engine.acquire(DecodeSpec.of(self.lm, prepared, self.prompt, length), count)
        forward.close()  # nobody else asks meanwhile
        for tensor in (*forward.pool.keys, *forward.pool.values):
            tensor.normal_()
        spec, done = forward.spec, length - new
        requests = [Request(0, prompt, length, spec.decoder) for prompt in self.prompts(count)]
        fresh = DecodeState.of_rows(spec, requests, self.device)
        decoded = self.prompts(count, done, seed=1)
        fresh.generated[:, :done] = torch.tensor(decoded, device=self.device)
        table = fresh.table
        table.created.fill_(length // block)
        table.forwards.fill_(100)
        table.cached.fill_(done // block)
        table.finished_at[:, : done // block] = 1
        plan(fresh, spec)
        facts = [RowFacts(*row) for row in fresh.facts.tolist()]
        if any((fact.queries, fact.candidates) != (new, new) for fact in facts):
            raise AssertionError(f"staged rows compute and ask {facts[0]}, not {new}")
        rows = dict(enumerate(zip(requests, facts, strict=True)))
        return Staged(forward, fresh, rows)

    @torch.inference_mode()
    def time_step(self, count: int, new: int, engine: GraphEngine | None = None, scale: float = 1.0) -> Row:
        """One captured step of `count` rows with `new` positions each against a full cache."""
        staged = self.stage(engine or self.engine, count, new)
        staged.reset()
        began = time.perf_counter()
        staged.run()
        synchronise(self.device)
        first = time.perf_counter() - began
        staged.run()  # captures
        device_ms, host_ms = [], []
        for _ in range(3):
            staged.reset()
            device_ms.append(time_behind(staged.run, self.device))
            staged.reset()
            synchronise(self.device)
            began = time.perf_counter()
            for _ in range(10):  # as the scheduler goes: sizes, a launch, a read
                staged.run()
                staged.forward.state.facts.tolist()
            host_ms.append(1e2 * (time.perf_counter() - began))
        memory, compute = self.floors(count * new, count * new, scale)
        middle = statistics.median(device_ms)
        return {
            "ms": middle,
            "ms_with_host": statistics.median(host_ms),
            "of_floor": max(memory, compute) / middle,
            "floor_ms": max(memory, compute),
            "first_s": first,
            "spread": (max(device_ms) - min(device_ms)) / middle,
        }

    def new_positions(self) -> tuple[int, ...]:
        return (8, 16) if self.options.tiny else (32, 64)

    def row_counts(self) -> tuple[int, ...]:
        return (1, 3) if self.options.tiny else (1, 8, 32)


class Staged:
    """Rows that can be stepped again and again."""

    def __init__(
        self, forward: GraphForward, fresh: DecodeState, rows: dict[int, tuple[Request, RowFacts]]
    ) -> None:
        self.forward, self.fresh, self.rows = forward, fresh, rows

    def reset(self) -> None:
        self.forward.state.put(torch.arange(len(self.rows), device=self.forward.device), self.fresh)

    def run(self) -> None:
        self.forward.run(self.rows)
