"""What the rows of bench/decode.py stand on: the model of a shape, its engine, a paced decoding, and how things are timed.

Measures nothing by itself; rows register here by name and are run by bench/decode.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tad.decoding.engine.step as engine_step
import tad.decoding.loop as plain_loop
from machine import measure_copy_rate, measure_product_rate, synchronise, tiny_config
from tad.decoding import Engine, Step, decode, get_decoder
from tad.decoding.decoders import Decoder
from tad.decoding.engine.buckets import StepShape
from tad.decoding.engine.slots import Method, Slots
from tad.decoding.engine.step import Stepper, plan
from tad.decoding.engine.weights import LayerWeights, read_weights
from tad.decoding.proposal import Proposal, propose
from tad.models import LM, SpecialTokens
from tad.models.quantize import quantize_fp8
from tad.models.shapes import build, family_of_config, forward_cost, shape_config

PROMPT, LENGTH = 128, 256
TPF = 8.5


class Pace:
    """The hook: proposals are as sure as they must be for `tpf` tokens per forward, roughly left to right.

    A position's turn comes at forward turn / tpf. Turns are shuffled within 64 positions, so that neighbouring blocks fill
    side by side as they do with trained models. The rate is a tensor: recorded steps read it when they run.
    """

    rate: Tensor

    def propose(self, logits: Tensor, *rest: Any) -> Any:
        found = propose(logits, *rest)
        step, position = rest[-2:]
        turn = position - position % 64 + position % 64 * 37 % 64
        sure = turn.float() < step.float() * self.rate
        return Proposal(
            token=found.token,
            confidence=torch.where(sure, 0.999, found.confidence),
            odds=torch.where(sure, 999.0, found.odds),
            entropy=torch.where(sure, 0.001, found.entropy),
            margin=found.margin,
        )

    @contextmanager
    def at(self, device: torch.device) -> Iterator[None]:
        self.rate = torch.full((), TPF, device=device)
        engine_step.propose = plain_loop.propose = self.propose  # type: ignore[assignment]
        try:
            yield
        finally:
            engine_step.propose = plain_loop.propose = propose

    @contextmanager
    def off(self) -> Iterator[None]:
        """Predictions as they are."""
        engine_step.propose = plain_loop.propose = propose
        try:
            yield
        finally:
            engine_step.propose = plain_loop.propose = self.propose  # type: ignore[assignment]


PACE = Pace()


# Of an engine.
FLAGS = (
    "unfused",
    "packed",
    "autotune",
    "compiled",
    "uncompiled",
    "library-products",
    "library-attention",
)
Row = dict[str, Any]
ROWS: dict[str, Callable[[Bench], Row]] = {}


def row(name: str) -> Callable[[Callable[[Bench], Row]], Callable[[Bench], Row]]:
    """Register a measurement; the order of the file is the order of the run."""

    def keep(function: Callable[[Bench], Row]) -> Callable[[Bench], Row]:
        ROWS[name] = function
        return function

    return keep


class Bench:
    """The model, its engine, and how things are timed."""

    def __init__(self, device: torch.device, options: argparse.Namespace, layers: int | None = None) -> None:
        self.device, self.options, self.cuda = device, options, device.type == "cuda"
        self.dtype = torch.float32 if options.tiny else torch.bfloat16
        self.prompt, self.length = (32, 64) if options.tiny else (PROMPT, LENGTH)
        self.label = f"{options.shape}{' (tiny)' if options.tiny else ''}"
        self.lm = self.make_lm(layers)
        self.embedding_bytes = self.lm.model.embedding().weight.nbytes
        self._small: tuple[LM, list[LayerWeights]] | None = None
        self._quantized: tuple[LM, Engine] | None = None
        self.copy_rate = measure_copy_rate(device)
        self.matmul_rate = measure_product_rate(device, self.dtype)
        self.engine = self.make_engine(self.lm, *filter(None, options.engine_options.split(",")))

    def make_lm(self, layers: int | None = None, quantize: bool = False) -> LM:
        config = tiny_config(self.options.shape) if self.options.tiny else shape_config(self.options.shape)
        if layers:
            setattr(config, "n_layers" if hasattr(config, "n_layers") else "num_hidden_layers", layers)
        model = build(config, self.device, self.dtype)
        if quantize:
            quantize_fp8(model)
        tokens = SpecialTokens(mask=config.mask_token_id, eos=config.eos_token_id, pad=config.pad_token_id)
        return LM(model, family_of_config(config), tokens, source=self.options.shape)

    def make_engine(self, lm: LM, *flags: str) -> Engine:
        unknown = set(flags) - set(FLAGS)
        if unknown:
            raise SystemExit(f"no engine option {', '.join(unknown)}; there are {', '.join(FLAGS)}")
        return Engine(
            lm.model,
            compiled="compiled" in flags or (self.cuda and "uncompiled" not in flags),
            bucketed=True,
            fused=False if "unfused" in flags else None,
            packed="packed" in flags and self.cuda,
            mode="max-autotune-no-cudagraphs" if "autotune" in flags else None,
            products="torch" if "library-products" in flags else "auto",
            attention="torch" if "library-attention" in flags else "auto",
        )

    def quantized_lm(self) -> tuple[LM, list[LayerWeights]]:
        """The same weights in fp8."""
        if self._small is None:
            with torch.inference_mode(
                False
            ):  # engines join the weights in place, which inference tensors refuse
                lm = self.make_lm(quantize=True)
                self._small = lm, read_weights(lm.model)
        return self._small

    def quantized(self) -> tuple[LM, Engine]:
        """The same weights in fp8, and their engine."""
        if self._quantized is None:
            lm = self.quantized_lm()[0]
            self._quantized = lm, self.make_engine(lm, *filter(None, self.options.engine_options.split(",")))
        return self._quantized

    def fp8_share(self) -> float:
        """Bytes that a forward reads of the weights in fp8, over those it reads of the others."""
        sizes = []
        for lm in (self.quantized_lm()[0], self.lm):
            parts = (*lm.model.parameters(), *lm.model.buffers())
            sizes.append(sum(part.nbytes for part in parts) - self.embedding_bytes)
        return sizes[0] / sizes[1]

    def noise(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.device).to(self.dtype)

    def canvases(self, count: int) -> list[Tensor]:
        """[1, columns] each: a prompt, a mask, and then more and more of the rest decoded."""
        found = []
        for number in range(count):
            ids = torch.tensor(self.prompts(1, self.prompt + self.length, seed=number))
            hidden = (
                torch.rand(self.length, generator=torch.Generator().manual_seed(number)) >= number / count
            )
            hidden[0] = True
            ids[0, self.prompt :][hidden] = self.lm.tokens.mask
            found.append(ids.to(self.device))
        return found

    def prompts(self, count: int, length: int | None = None, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        highest = min(self.lm.tokens.mask, self.lm.tokens.eos)
        return torch.randint(0, highest, (count, length or self.prompt), generator=generator).tolist()

    def decoder(self, name: str, **settings: Any) -> Decoder:
        return get_decoder(name, self.lm.family.name, stop="off", **settings)

    def floors(self, fed: int, rows_asked: int = 0, scale: float = 1.0) -> tuple[float, float]:
        """Milliseconds to read the weights (`scale` of their bytes), and to do the arithmetic of `fed` tokens."""
        cost = forward_cost(self.lm.model.shape, self.prompt + self.length, self.dtype)
        body = cost.flops_per_token - cost.head_flops_per_token
        flops = fed * body + rows_asked * cost.head_flops_per_token
        return 1e3 * scale * cost.weight_bytes / self.copy_rate, 1e3 * flops / self.matmul_rate

    def time_decode(
        self,
        count: int,
        decoder: Decoder,
        tpf: float,
        engine: Any = None,
        prompt: int | None = None,
        lm: LM | None = None,
    ) -> Row:
        """A whole decode of `count` rows with everything on the host: the median of some runs after a first one."""
        PACE.rate.fill_(tpf)
        prompts, seconds = self.prompts(count, prompt), []
        engine = self.engine if engine is None else engine
        call = partial(decode, lm or self.lm, prompts, decoder, self.length, engine=engine)
        began = time.perf_counter()
        call()
        first = time.perf_counter() - began
        for _ in range(self.options.repeats):
            synchronise(self.device)
            began = time.perf_counter()
            rows = call()
            synchronise(self.device)
            seconds.append(time.perf_counter() - began)
        fed: dict[int, int] = {}

        def count_fed(step: Step) -> None:
            fed[step.forward] = fed.get(step.forward, 0) + step.fed

        call(on_step=count_fed)
        middle, forwards = statistics.median(seconds), max(found.forwards for found in rows)
        floor = sum(max(self.floors(tokens)) for tokens in fed.values()) * 1e-3
        return {
            "ms_per_forward": 1e3 * middle / forwards,
            "forwards_per_s": forwards / middle,
            "tokens_per_s": count * self.length / middle,
            "assumed_tpf": tpf,
            "tpf_reached": self.length / forwards,
            "fed_per_forward": sum(fed.values()) / forwards,
            "of_floor": floor / middle,
            "first_call_s": first,
            "spread": (max(seconds) - min(seconds)) / middle,
        }

    def stage(
        self, engine: Engine, count: int, new: int
    ) -> tuple[Stepper, tuple[Any, ...], Slots, StepShape]:
        """Rows of which all but the last `new` positions are decoded and frozen, about to be stepped.

        The decoder reveals one token per forward here, so that the step can be repeated without coming to its end.
        """
        lm, block = self.lm, min(32, new)
        quiet = self.decoder("tad-cached", threshold=0.0, keep_best=False, refresh=10_000, block=block)
        method = Method(
            quiet.prepared(self.length, lm.family.logit_shift),
            lm.tokens,
            lm.family.logit_shift,
            self.prompt,
            self.length,
        )
        stepper = engine._stepper(method, count)
        arena = engine.arenas[True]
        for tensor in (*arena.keys, *arena.values):
            tensor.normal_()
        fresh = Slots.start_rows(method, self.prompts(count), [0] * count, self.device)
        done = self.length - new
        fresh.canvas[:, self.prompt : self.prompt + done] = torch.tensor(
            self.prompts(count, done, seed=1), device=self.device
        )
        table = fresh.table
        table.created.fill_(table.blocks)
        table.forwards.fill_(100)
        table.cached.fill_(done // block)
        table.finished_at[:, : done // block] = 1
        plan(fresh, method)
        facts = fresh.facts.tolist()
        if any(fact[1:3] != [new, new] for fact in facts):
            raise AssertionError(f"staged rows feed and ask {facts[0][1:3]}, not {new}")
        stepper.slots.put(torch.arange(count, device=self.device), fresh)
        shape = StepShape.exact([new] * count, [new] * count, alone=count == 1)
        shape = shape.rounded(count, method.columns, self.length)
        return stepper, (method, count, False, shape), fresh, shape

    @torch.inference_mode()
    def time_step(self, count: int, new: int, engine: Engine | None = None, scale: float = 1.0) -> Row:
        """One recorded step of `count` rows with `new` positions each against a full cache."""
        engine = engine or self.engine
        stepper, key, fresh, shape = self.stage(engine, count, new)
        step = partial(stepper.step, shape, False)
        began = time.perf_counter()
        engine.recorder.run(key, step)
        synchronise(self.device)
        first = time.perf_counter() - began
        index, device_ms, loop_ms = torch.arange(count, device=self.device), [], []
        for _ in range(3):
            stepper.slots.put(index, fresh)
            device_ms.append(self.timed(partial(engine.recorder.run, key, step), 10))
            stepper.slots.put(index, fresh)
            synchronise(self.device)
            began = time.perf_counter()
            for _ in range(10):  # as the engine's loop goes: sizes, a launch, a read
                wanted = StepShape.exact([new] * count, [new] * count, alone=count == 1)
                wanted.rounded(count, self.prompt + self.length, self.length)
                engine.recorder.run(key, step)
                stepper.slots.facts.tolist()
            loop_ms.append(1e2 * (time.perf_counter() - began))
        memory, compute = self.floors(count * new, count * new, scale)
        middle = statistics.median(device_ms)
        return {
            "ms": middle,
            "ms_with_host": statistics.median(loop_ms),
            "of_floor": max(memory, compute) / middle,
            "floor_ms": max(memory, compute),
            "first_s": first,
            "spread": (max(device_ms) - min(device_ms)) / middle,
        }

    def timed(self, call: Callable[[], Any], repeats: int) -> float:
        """Milliseconds of one call among several behind each other: CUDA events on a GPU."""
        call()
        synchronise(self.device)
        if not self.cuda:
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            return 1e3 * (time.perf_counter() - began) / repeats
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def replayed(self, call: Callable[[], Any], repeats: int = 10) -> float:
        """Milliseconds of what `call` launches, recorded and replayed, so that the host does not count."""
        if not self.cuda:
            return self.timed(call, 1)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.timed(graph.replay, repeats)

    def new_positions(self) -> tuple[int, ...]:
        return (8, 16) if self.options.tiny else (32, 64)
