"""What the benches share: the machine in words, its rates, waiting for it, toy sizes of the released shapes."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from tad.models.shapes import SHAPES


def describe_machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    packages = {package: version(package) for package in ("torch", "transformers", "peft")}
    return {"device": name, **packages, "python": platform.python_version()}


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
    return 2 * source.nbytes / clock(partial(target.copy_, source), device)


def measure_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / clock(partial(torch.mm, a, b), device)


def clock(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call among ten behind each other, after three."""
    for _ in range(3):
        call()
    synchronise(device)
    began = time.perf_counter()
    for _ in range(10):
        call()
    synchronise(device)
    return (time.perf_counter() - began) / 10


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
