"""Where a step's time on the device goes: kernels by name, from PyTorch's profiler. Without a GPU: operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from machine import synchronise


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
