"""Split-K GEMM for few rows: K is split across CTAs so that every SM streams weights.

A forward of some tens of tokens takes as long as reading its weights does, and the library's GEMMs are made for many
rows. The operation gives the partials [split, rows, outputs]; reducing them is left to the caller, which does it in the
kernel that comes next (RMSNorm, RoPE). Nothing is added in an order that depends on timing. To fp8 and int8 weights rows
come as fp16, to which both are widened exactly; bf16 rows lose nothing by it but what lies beyond `FP16_LIMIT`, which is
clamped, and what is too small to matter. To weights in their own dtype rows come as they are.

On CUDA the partials come from a Triton kernel, elsewhere from the same sums in torch. Not covered: many rows, where the
arithmetic counts and the library is the right choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.tiling import FP16_LIMIT, KernelConfig
from tad.decoding.engine.weights import Project, Projection

MAX_ROWS = 64  # more are left to the library
SPLITS = (1, 2, 3, 4, 6, 8)
_PROGRAMS = (120, 420)  # that configs worth trying have; an H200 has 132 SMs
_CAPABILITY = (9, 0)  # the first GPUs with TMA
_COMPILED = (7, 0)  # the first that Triton serves
_FEWEST_INPUTS = 64  # of which a weight's inputs must be a multiple

# What was found best: (dtype of weights, outputs, inputs, block of rows, split) -> config.
chosen: dict[tuple[torch.dtype, int, int, int, int], KernelConfig] = {}


# The first serves every shape.
CONFIGS = (
    KernelConfig(128, 64, 1, 4, 5, False),
    KernelConfig(128, 64, 1, 4, 4, True),
    KernelConfig(128, 128, 1, 4, 3, True),
    KernelConfig(128, 128, 1, 8, 4, True),
    KernelConfig(256, 64, 1, 8, 4, True),
    KernelConfig(64, 128, 1, 4, 3, True),
    KernelConfig(64, 64, 1, 4, 5, False),
    KernelConfig(64, 64, 1, 4, 6, True),
)

# For weights of two bytes.
HALF_CONFIGS = (
    KernelConfig(64, 128, 1, 4, 3, True),
    KernelConfig(64, 128, 1, 4, 4, True),
    KernelConfig(64, 256, 1, 4, 3, True),
    KernelConfig(128, 64, 1, 4, 4, True),
)


def candidates(weight: Tensor) -> list[KernelConfig]:
    """The configs worth trying for a weight [n, k]: those that occupy the whole device at once."""
    n, k = weight.shape
    found = []
    for config in CONFIGS if weight.element_size() == 1 else HALF_CONFIGS:
        for split in SPLITS:
            programs = split * -(-n // config.block_n)
            fits = _PROGRAMS[0] <= programs and (split == 1 or programs <= _PROGRAMS[1])
            if k % config.block_k == 0 and fits:
                found.append(config._replace(split=split))
    return found


def usual_split(weight: Tensor) -> int:
    """How many splits where nothing was tried: two programs of 128 outputs for every SM, or fewer."""
    tiles = -(-len(weight) // 128)
    return max(split for split in SPLITS if split == 1 or split * tiles <= 264)


def config_for(weight: Tensor, rows: int, split: int) -> KernelConfig:
    """What was found best for this GEMM, else the usual."""
    n, k = weight.shape
    key = (weight.dtype, n, k, row_block(rows), split)
    return chosen.get(key, CONFIGS[0])._replace(split=split)


def row_block(rows: int) -> int:
    """Rows as configs are tuned for them: a power of two, of which fewer than 32 take what is found for 32."""
    return max(32, 1 << (rows - 1).bit_length())


def has_kernels(device: torch.device) -> bool:
    """Whether kernels of our own run there."""
    return (
        can_compile(device)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= _CAPABILITY
    )


def can_compile(device: torch.device) -> bool:
    """Whether `torch.compile` has what it needs there, Triton and a GPU that it serves."""
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= _COMPILED
    )


def takes_heads(dim: int) -> bool:
    """Whether our kernels serve heads of this size: powers of two whose keys a multiprocessor holds several times."""
    return dim in (16, 32, 64, 128)


def takes_split_k(by: Projection, dtype: torch.dtype) -> bool:
    """Whether this projection of rows in `dtype` may be a split-K GEMM."""
    weight = by.weight
    if weight.device.type != "cuda":
        return by.scale is not None  # in torch, where there is no kernel
    half = dtype in (torch.bfloat16, torch.float16)
    return (
        has_kernels(weight.device)
        and half
        and (by.scale is not None or weight.dtype == dtype)
        and weight.shape[1] % _FEWEST_INPUTS == 0
        and weight.is_contiguous()
    )


def input_dtype(dtype: torch.dtype, by: Projection) -> torch.dtype:
    """What rows of this dtype become for a split-K GEMM."""
    return torch.float16 if dtype == torch.bfloat16 and by.scale is not None else dtype


def as_input(x: Tensor, by: Projection) -> Tensor:
    """x as a split-K GEMM takes it."""
    return to_fp16(x) if input_dtype(x.dtype, by) != x.dtype else x


def to_fp16(x: Tensor) -> Tensor:
    """x clamped to what fp16 has."""
    return x.clamp(-FP16_LIMIT, FP16_LIMIT).to(torch.float16)


def split_k_op(split: int) -> Callable[..., Tensor]:
    """The operation that gives a GEMM's partials: of rows as input, weight, scale, and the dtype of a single partial."""
    return _OPERATIONS[split]


@cache  # one function for each: what was compiled for it serves all engines
def project_to_partials(split: int, dtype: torch.dtype) -> Project:
    """A projection that leaves its partials, and its bias, to be added: [split, n, out]."""
    operation = split_k_op(split)

    def project_partials(x: Tensor, by: Projection) -> Tensor:
        return operation(as_input(x, by), by.weight, by.scale, dtype)

    return project_partials


@cache
def split_k_project(split: int, dtype: torch.dtype) -> Project:
    """A projection by so many splits of K, with its result in `dtype`."""
    operation = split_k_op(split)

    def project_split(x: Tensor, by: Projection) -> Tensor:
        partials = operation(as_input(x, by), by.weight, by.scale, dtype)
        out = partials[0] if len(partials) == 1 else partials.sum(0)
        return (out if by.bias is None else out + by.bias).to(dtype)

    return project_split


def gemm_partials(
    x: Tensor, weight: Tensor, scale: Tensor | None, dtype: torch.dtype, config: KernelConfig
) -> Tensor:
    """x [m, k] as input times weight [n, k] and its scale [n], if any, on a GPU, as partials [split, m, n]: fp32, or `dtype`
    for one."""
    from tad.decoding.engine.kernels import launch_gemm

    out = new_partials(x, weight, config.split, dtype)
    launch_gemm(x if x.stride(1) == 1 else x.contiguous(), weight, scale, out, config)
    return out


def new_partials(x: Tensor, weight: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(split, x.shape[0], weight.shape[0], dtype=dtype if split == 1 else torch.float32)


def _partials_in_torch(
    x: Tensor, weight: Tensor, scale: Tensor | None, split: int, dtype: torch.dtype
) -> Tensor:
    inputs = x.shape[1]
    bounds = [inputs * number // split for number in range(split + 1)]
    partials = torch.stack(
        [F.linear(x[:, low:high].float(), weight[:, low:high].float()) for low, high in pairwise(bounds)]
    )
    scaled = partials if scale is None else partials * scale
    return scaled.to(dtype if split == 1 else torch.float32)


def _register(split: int) -> Callable[..., Tensor]:
    """One operation per number of splits: compiled code must know the number, and takes it from the operation's name."""

    def compute(x: Tensor, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        if not x.is_cuda:
            return _partials_in_torch(x, weight, scale, split, dtype)
        return gemm_partials(x, weight, scale, dtype, config_for(weight, len(x), split))

    def describe(x: Tensor, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return new_partials(x, weight, split, dtype)

    operation = torch.library.custom_op(
        f"tad::split_k_gemm_{split}",
        compute,
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor? scale, ScalarType dtype) -> Tensor",
    )
    operation.register_fake(describe)
    return operation


_OPERATIONS = {split: _register(split) for split in SPLITS}
