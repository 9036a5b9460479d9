"""What the kernels and those that choose how to launch them both know: how a kernel is cut up, and the numbers it takes."""

from __future__ import annotations

from typing import NamedTuple

FP16_LIMIT = 65280.0  # the largest number of bf16 that fp16 has; kernels clamp to it too


class KernelConfig(NamedTuple):
    """How the kernel is cut up: a program's outputs and inputs at a time, splits of K, warps, pipeline stages. `tma` loads
    through tensor descriptors."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    tma: bool
