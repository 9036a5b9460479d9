"""What the benches share: the machine in words, its rates, waiting for it, its kernels, models of random weights at released
shapes, decoders in words, tables."""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tad.decoding import Decoder, get_decoder, plain, sampler
from tad.decoding.engine import graph
from tad.decoding.sampler import Samples
from tad.models import LM, SpecialTokens, family_of
from tad.models.shapes import SHAPES, build, shape_config


def describe_machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    packages = {package: version(package) for package in ("torch", "transformers", "peft")}
    return {"device": name, **packages, "python": platform.python_version()}


def describe(results: dict[str, Any]) -> str:
    """The machine of a bench's results, in a line."""
    return ", ".join(f"{key} {value}" for key, value in results["machine"].items())


def write_markdown(head: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line and a table."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join([head, "", *("| " + " | ".join(cells) + " |" for cells in lines)])


def save_json(path: Path | None, results: dict[str, Any]) -> None:
    """Keep a bench's results where `--out` says."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_copy_rate(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written."""
    count = 2**29 if device.type == "cuda" else 2**22
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    return 2e3 * source.nbytes / time_behind(partial(target.copy_, source), device)


def measure_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2e3 * side**3 / time_behind(partial(torch.mm, a, b), device)


def time_behind(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Milliseconds of one call among several behind each other, after one: CUDA events on a GPU."""
    call()
    synchronise(device)
    if device.type != "cuda":
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
    return float(start.elapsed_time(end) / repeats)


def tiny_config(name: str) -> Any:
    """The configuration of a shape's family at toy size."""
    config_class, values = SHAPES[name]
    tokens = {"mask_token_id": 316, "eos_token_id": 317, "pad_token_id": 317, "vocab_size": 320}
    small = (
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 128, "embedding_size": 320}
        if "mlp_hidden_size" in values
        else {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
        }
    )
    return config_class(**{**values, **small, **tokens})


def random_lm(shape: str, device: torch.device, tiny: bool = False, layers: int | None = None) -> LM:
    """A model of a released shape with random weights, made on the device: bf16, or fp32 at toy size. No tokenizer."""
    config = tiny_config(shape) if tiny else shape_config(shape)
    if layers:
        setattr(config, "n_layers" if hasattr(config, "n_layers") else "num_hidden_layers", layers)
    model = build(config, device, torch.float32 if tiny else torch.bfloat16)
    tokens = SpecialTokens(mask=config.mask_token_id, eos=config.eos_token_id, pad=config.pad_token_id)
    return LM(model, family_of(config.model_type), tokens, source=shape)


def random_prompts(lm: LM, count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    highest = min(lm.tokens.mask, lm.tokens.eos)
    return torch.randint(0, highest, (count, length), generator=generator).tolist()


class AssumedTpf:
    """A hook for random weights, whose predictions are flat and would reveal one token per forward: samples are as sure as
    they must be for `rate` tokens per forward, roughly left to right. The work is the same; a token rate measured with it
    says nothing of quality.

    A position's turn comes at forward turn / rate. Turns are shuffled within `span` positions, 64 by default, so that
    neighbouring blocks fill side by side as they do with trained models. Both are tensors: captured steps read them when
    they run.
    """

    rate: torch.Tensor
    span: torch.Tensor  # no multiple of 37, so that the shuffle is one

    def sample(self, logits: torch.Tensor, *rest: Any) -> Samples:
        found = sampler.sample(logits, *rest)
        step, position = rest[-2:]
        inside = position % self.span
        turn = position - inside + inside * 37 % self.span
        sure = turn.float() < step.float() * self.rate
        return Samples(
            token=found.token,
            confidence=torch.where(sure, 0.999, found.confidence),
            odds=torch.where(sure, 999.0, found.odds),
            entropy=torch.where(sure, 0.001, found.entropy),
            margin=found.margin,
        )

    @contextmanager
    def at(self, device: torch.device, rate: float) -> Iterator[None]:
        self.rate, self.span = torch.full((), rate, device=device), torch.full((), 64, device=device)
        graph.sample = plain.sample = self.sample  # type: ignore[attr-defined]
        try:
            yield
        finally:
            graph.sample = plain.sample = sampler.sample  # type: ignore[attr-defined]


ASSUMED_TPF = AssumedTpf()


def read_decoder(words: str, family: str) -> Decoder:
    """NAME,KEY=VALUE,... as a decoder that decodes every position."""
    name, *settings = words.split(",")
    pairs = [setting.split("=", 1) for setting in settings]
    return get_decoder(name, family, stop="off", **{key: yaml.safe_load(value) for key, value in pairs})


def measure_kernels(step: Callable[[], Any], device: torch.device, steps: int = 2) -> list[dict[str, Any]]:
    """Milliseconds and calls per step of every kernel, most expensive first."""
    cuda = device.type == "cuda"
    synchronise(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as record:
        for _ in range(steps):
            step()
        synchronise(device)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    found = []
    for event in record.key_averages():
        # Annotations span kernels that are counted by themselves.
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            found.append({"ms": spent / 1e3 / steps, "calls": event.count / steps, "kernel": event.key})
    return sorted(found, key=lambda row: -row["ms"])


def print_kernels(name: str, kernels: list[dict[str, Any]], s_per_step: float, rows: int = 25) -> None:
    """The most expensive ones, and how much of a step the device was busy."""
    total = sum(row["ms"] for row in kernels)
    print(f"\n{name}: {total:.2f} ms of kernels in a step of {s_per_step * 1e3:.2f} ms")
    print(f"{'ms/step':>9} {'share':>6} {'calls':>7}  kernel")
    for row in kernels[:rows]:
        print(f"{row['ms']:9.3f} {row['ms'] / total:6.1%} {row['calls']:7.1f}  {row['kernel'][:150]}")
    print(flush=True)
