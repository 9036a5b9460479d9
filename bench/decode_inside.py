"""Rows of bench/decode.py that look inside: parts of a step, variants of the engine, memory, first calls."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode_bench import PACE, TPF, Bench, Row, row
from decode_tokens import predict
from machine import free_memory, synchronise
from tad.decoding import decode
from tad.decoding.engine import why_not
from tad.decoding.engine.network import _attend, _attend_few, attend_packed


@row("parts")
@torch.inference_mode()
def measure_parts(bench: Bench) -> Row:
    """Where the time of a cached step goes: each part recorded by itself, weights read from memory as in a step."""
    new, engine = bench.new_positions()[-1], bench.engine
    stepper, key, fresh, shape = bench.stage(engine, 1, new)
    rows, network = stepper.slots.working(), engine.network
    sizes = (shape.tokens, shape.window, shape.candidates, shape.widest, False)
    at = stepper.prepare(rows, *sizes)
    found: dict[str, float] = {}

    def products(kind: str, x: Tensor) -> None:
        for layer in network.layers:
            F.linear(x, getattr(layer, kind).weight)

    for kind in ("qkv", "attn_out", "gate_up", "down"):
        inputs = getattr(network.layers[0], kind).weight.shape[1]
        for tokens in (new, bench.prompt + bench.length):
            found[f"{kind} x{tokens}"] = bench.replayed(partial(products, kind, bench.noise(tokens, inputs)))
    shapes, lent = network.shape, stepper.lent
    query = bench.noise(shape.tokens, shapes.heads, shapes.head_dim)
    hidden = bench.noise(shape.candidates, shapes.width)
    columns = bench.prompt + bench.length

    def attend() -> None:
        for number in range(shapes.layers):
            if network.attends_few:
                _attend_few(query, *lent.layer(number), columns, bench.dtype)
            else:
                _attend(query, *lent.layer(number), at.every, shape.window, 1, columns, shapes)

    found["attention"] = bench.replayed(attend)
    logits = network.model.head(hidden)
    zeros = torch.zeros(shape.candidates, dtype=torch.int64, device=bench.device)
    found["head"] = bench.replayed(lambda: network.model.head(hidden))
    found["scores"] = bench.replayed(lambda: stepper.score(logits, zeros, zeros, zeros))
    found["prepare"] = bench.replayed(lambda: stepper.prepare(rows, *sizes))
    scores = tuple(part[None] for part in stepper.score(logits, zeros, zeros, zeros))

    def decide() -> None:
        working = stepper.slots.working()
        stepper.decide(working, scores, at.candidate, at.valid, at.must)
        stepper.slots.keep(working)

    found["decide"] = bench.replayed(decide)
    stepper.slots.put(torch.arange(1, device=bench.device), fresh)
    step = partial(engine.recorder.run, key, partial(stepper.step, shape, False))
    step()
    found["whole step"] = bench.timed(step, 10)
    found["launch on the host"] = time_launch(bench, step)
    found["call of decode on the host"] = time_fixed_cost(bench)
    return {"ms_by_part": found, "kernels": profile(bench, step)}


def time_launch(bench: Bench, call: Callable[[], Any]) -> float:
    """Milliseconds until a launch returns, with nothing in the device's queue."""
    times = []
    for _ in range(10):
        synchronise(bench.device)
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    synchronise(bench.device)
    return statistics.median(times)


def time_fixed_cost(bench: Bench) -> float:
    """Milliseconds of seeing that the engine serves and still fits: once per call of decode."""
    began = time.perf_counter()
    for _ in range(5):
        why_not(bench.lm.model, bench.decoder("tad"))
        bench.engine.fits(bench.lm.model)
    return 1e3 * (time.perf_counter() - began) / 5


def profile(bench: Bench, call: Callable[[], Any]) -> list[Row]:
    """Kernels of one call, the longest first."""
    if not bench.cuda:
        return []
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    rows = [{"kernel": one.key[:90], "count": one.count, "us": one.self_device_time_total} for one in kernels]
    total = {
        "kernel": "all",
        "count": sum(one["count"] for one in rows),
        "us": sum(one["us"] for one in rows),
    }
    return [total, *rows[:25]]


@row("packed")
def measure_packed(bench: Bench) -> Row:
    """Attention over packed rows; with prompts that do not fill their columns, and next to the usual attention there."""
    odd = bench.prompt - 27
    found = measure_variant(bench, "packed")
    engine, decoder = bench.make_engine(bench.lm, "packed"), bench.decoder("tad-cached")
    for label, chosen in (("usual", bench.engine), ("packed", engine)):
        found[f"{label}_padded_ms"] = bench.time_decode(1, decoder, TPF, chosen, odd)["ms_per_forward"]
        found[f"{label}_batch_ms"] = bench.time_decode(8, decoder, TPF, chosen, odd)["ms_per_forward"]
    canvas = bench.canvases(1)[0]
    usual, packed = (predict(one, bench.lm, canvas)[1] for one in (bench.engine, engine))
    found["relative_difference"] = ((packed - usual).norm() / usual.norm()).item()
    return found


@row("autotune")
def measure_autotune(bench: Bench) -> Row:
    """Products chosen by trial for the size of a cached step."""
    return measure_variant(bench, "autotune")


@row("uncompiled")
def measure_uncompiled(bench: Bench) -> Row:
    """Recorded, not compiled."""
    return measure_variant(bench, "uncompiled")


def measure_variant(bench: Bench, flag: str) -> Row:
    engine = bench.make_engine(bench.lm, flag)
    began = time.perf_counter()
    steps = {str(new): bench.time_step(1, new, engine) for new in bench.new_positions()}
    opening = time.perf_counter() - began
    whole = bench.time_decode(1, bench.decoder("tad-cached"), TPF, engine)
    worst = max(steps.values(), key=lambda one: one["ms"])
    return {**worst, "by_new_positions": steps, "decode": whole, "opening_s": opening}


@row("fp8")
def measure_fp8(bench: Bench) -> Row:
    """A cached step with the projections in fp8."""
    lm, engine = bench.quantized()
    share = bench.fp8_share()
    steps = {str(new): bench.time_step(1, new, engine, share) for new in bench.new_positions()}
    worst = max(steps.values(), key=lambda one: one["ms"])
    whole = bench.time_decode(1, bench.decoder("tad-cached"), TPF, engine, lm=lm)
    return {**worst, "by_new_positions": steps, "decode": whole, "bytes_of_bf16": share}


@row("others")
def measure_others(bench: Bench) -> Row:
    """Further decoders with a cache, one row, engine and loop."""
    found = {}
    for name in ("fast-dllm-dual", "fast-dllm-prefix", "d3llm-cached"):
        ours = bench.time_decode(1, bench.decoder(name), TPF)
        plain = bench.time_decode(1, bench.decoder(name), TPF, engine="plain")
        found[name] = {**ours, "plain_ms": plain["ms_per_forward"]}
    return {"ways": found}


@row("memory")
def measure_memory(bench: Bench) -> Row:
    """What an engine adds to the weights and its buffers at one row, and what two hundred generations add to that."""
    free_memory(bench.device)
    engine, decoder = bench.make_engine(bench.lm), bench.decoder("tad-cached")
    before = reserved(bench)
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for name in ("tad", "tad-cached"):
        decode(bench.lm, bench.prompts(1), bench.decoder(name), bench.length, engine=engine)
    peak = torch.cuda.max_memory_reserved() if bench.cuda else 0
    found = {"buffers_gb": engine.nbytes / 1e9, "overhead_gb": (peak - before - engine.nbytes) / 1e9}
    block = 8 if bench.options.tiny else 32
    short = replace(decoder, schedule=replace(decoder.schedule, block=block))
    for number in range(200):
        if number == 20:
            held = (reserved(bench), engine.nbytes, engine.recorder.made)
        length = bench.prompt - 32 * (number % 3) // 2
        decode(bench.lm, bench.prompts(1 + number % 2, length, seed=number), short, block, engine=engine)
    found["growth_gb"] = (reserved(bench) - held[0]) / 1e9
    found["buffer_growth_gb"] = (engine.nbytes - held[1]) / 1e9
    found["recorded_after_twenty"] = engine.recorder.made - held[2]
    return found


def reserved(bench: Bench) -> int:
    if not bench.cuda:
        return 0
    free_memory(bench.device)
    return torch.cuda.memory_reserved()


@row("lengths")
def measure_lengths(bench: Bench) -> Row:
    """Graphs that fifty random prompt lengths need."""
    engine, decoder = bench.make_engine(bench.lm), bench.decoder("tad-cached", block=bench.new_positions()[0])
    generator = torch.Generator().manual_seed(0)
    longest = 3 * bench.prompt
    lengths = torch.randint(16, longest, (50,), generator=generator).tolist()
    began = time.perf_counter()
    for length in lengths:
        decode(bench.lm, bench.prompts(1, length), decoder, 2 * bench.new_positions()[0], engine=engine)
    return {
        "graphs": engine.recorder.made,
        "lengths": len(set(lengths)),
        "all_s": time.perf_counter() - began,
    }


@row("attention")
@torch.inference_mode()
def measure_attention(bench: Bench) -> Row:
    """All layers' attention of a cached step by kernel, with and without a mask."""
    shape, new = bench.lm.model.shape, bench.new_positions()[-1]
    columns = bench.prompt + bench.length
    query = bench.noise(new, shape.heads, shape.head_dim)
    pairs = [
        [bench.noise(columns, shape.kv_heads, shape.head_dim) for _ in range(2)] for _ in range(shape.layers)
    ]
    bias = torch.zeros(1, 1, 1, columns, device=bench.device, dtype=bench.dtype)
    bias[..., : columns // 10] = float("-inf")
    groups = shape.heads // shape.kv_heads

    def usual(mask: Tensor | None) -> None:
        for keys, values in pairs:
            key, value = (
                part[None].transpose(1, 2).repeat_interleave(groups, 1) if groups > 1 else part[None].transpose(1, 2)
                for part in (keys, values)
            )  # fmt: skip
            F.scaled_dot_product_attention(query[None].transpose(1, 2), key, value, attn_mask=mask)

    found: Row = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for label, mask in (("", None), (" masked", bias)):
            name = f"{backend.name.split('_')[0].lower()}{label}"
            try:
                with sdpa_kernel(backend):
                    found[name] = bench.replayed(partial(usual, mask))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]
    found["chosen"], found["chosen masked"] = (bench.replayed(partial(usual, mask)) for mask in (None, bias))
    bounds = torch.tensor([0, new], dtype=torch.int32, device=bench.device)
    starts = torch.tensor([columns // 10, columns], dtype=torch.int32, device=bench.device)
    counts = starts[1:] - starts[:1]

    def packed() -> None:
        for keys, values in pairs:
            attend_packed(query, keys, values, bounds, starts, counts, new, columns)

    if bench.cuda:
        found["packed, part of the keys"] = bench.replayed(packed)
        found |= measure_own_attention(bench, pairs, columns)
    return {"ms_by_way": found}


def measure_own_attention(bench: Bench, pairs: list[list[Tensor]], columns: int) -> Row:
    """Our kernel, cut in several ways, and the library's, for some numbers of queries."""
    from tad.decoding.engine.attention_kernel import FEW, MANY, OTHERS, attend_few

    found: Row = {}
    shape = bench.lm.model.shape

    def library(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        asked, key, value = (part[None].transpose(1, 2) for part in (query, keys, values))
        out = F.scaled_dot_product_attention(asked, key, value, enable_gqa=shape.heads > shape.kv_heads)
        return out[0].transpose(0, 1).flatten(1)

    def theirs(query: Tensor) -> None:
        for keys, values in pairs:
            library(query, keys, values)

    for new in (*bench.new_positions(), 2 * bench.new_positions()[-1], 4 * bench.new_positions()[-1]):
        query = bench.noise(new, shape.heads, shape.head_dim)
        wanted = library(query, *pairs[0]).float()
        found[f"library x{new}"] = bench.replayed(partial(theirs, query))

        def own(query: Tensor, cut: Any) -> None:
            for keys, values in pairs:
                attend_few(query, keys, values, columns, bench.dtype, cut)

        for cut in (FEW, MANY, *OTHERS):
            name = f"own {' '.join(map(str, cut))} x{new}"
            try:
                out = attend_few(query, *pairs[0], columns, bench.dtype, cut).float()
                apart = ((out - wanted).norm() / wanted.norm()).item()
                ms = bench.replayed(partial(own, query, cut))
                found[name] = ms if apart < 0.02 else f"wrong by {apart:.2g}"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]
    return found


@row("first-call")
def measure_first_call(bench: Bench) -> Row:
    """Seconds of the first decode in a new process, two layers of the shape: with an empty compile cache, then a full one."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        command = [sys.executable, str(Path(__file__).with_name("decode.py")), "--first-call"]
        command += ["--shape", bench.options.shape, *(["--tiny"] if bench.options.tiny else [])]
        for label in ("empty", "full"):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            found[f"{label}_cache"] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def time_first_call(options: argparse.Namespace, device: torch.device) -> Row:
    """What the row above runs in a process of its own."""
    with PACE.at(device):
        bench = Bench(device, options, layers=2)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            decode(bench.lm, bench.prompts(1), bench.decoder("tad-cached"), bench.length, engine=bench.engine)
            synchronise(device)
            seconds.append(time.perf_counter() - began)
        recorded = bench.engine.recorder
        return {
            "first_s": seconds[0],
            "second_s": seconds[1],
            "of_which_steps_s": recorded.seconds,
            "graphs": recorded.made,
        }
