"""Products of few rows with fp8 weights: the inputs split in parts, so that every multiprocessor reads weights.

A forward of some tens of tokens takes as long as reading its weights does, and the library's fp8 product is made for many
rows. Here each product is a sum of parts, computed side by side; the parts [split, rows, outputs] are what the operation
gives, and adding them is left to the caller, which does it in the kernel that comes next (a norm, a rotation). Nothing is
added in an order that depends on timing. Rows come as fp16, to which fp8 is widened exactly and in one instruction; bf16
rows lose nothing by it but what lies beyond 65280, which is cut off, and what is too small to matter.

On CUDA the parts come from a Triton kernel, elsewhere from the same sums in torch. Not covered: many rows, where the
arithmetic counts and the library is the right choice, and bf16 weights, for which a kernel like this one gained nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.weights import Project, Projection

MOST_ROWS = 64  # more are left to the library
SPLITS = (1, 2, 3, 4, 6, 8)
_PROGRAMS = (120, 420)  # that tilings worth trying have; an H200 has 132 multiprocessors
_CAPABILITY = (9, 0)  # the first GPUs with the copy engine
_COMPILED = (7, 0)  # the first that Triton serves
_FEWEST_INPUTS = 64  # of which a weight's inputs must be a multiple
_LARGEST = 65280.0  # the largest number of bf16 that fp16 has

# What was found best: (outputs, inputs, block of rows, split) -> tiling.
chosen: dict[tuple[int, int, int, int], Tiling] = {}


class Tiling(NamedTuple):
    """How a product is cut up: a program's outputs and inputs at a time, parts, warps, loads in flight. `described`
    reads through the copy engine."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    described: bool


# The first serves every shape.
TILINGS = (
    Tiling(128, 64, 1, 4, 5, False),
    Tiling(128, 64, 1, 4, 4, True),
    Tiling(128, 128, 1, 4, 3, True),
    Tiling(128, 128, 1, 8, 4, True),
    Tiling(256, 64, 1, 8, 4, True),
    Tiling(64, 128, 1, 4, 3, True),
    Tiling(64, 64, 1, 4, 5, False),
    Tiling(64, 64, 1, 4, 6, True),
)


def candidates(weight: Tensor) -> list[Tiling]:
    """The tilings worth trying for a weight [n, k]: those that occupy the whole device at once."""
    n, k = weight.shape
    found = []
    for tiling in TILINGS:
        for split in SPLITS:
            programs = split * -(-n // tiling.block_n)
            fits = _PROGRAMS[0] <= programs and (split == 1 or programs <= _PROGRAMS[1])
            if k % tiling.block_k == 0 and fits:
                found.append(tiling._replace(split=split))
    return found


def usual_split(weight: Tensor) -> int:
    """How many parts where nothing was tried: two programs of 128 outputs for every multiprocessor, or fewer."""
    tiles = -(-len(weight) // 128)
    return max(split for split in SPLITS if split == 1 or split * tiles <= 264)


def tiling_for(weight: Tensor, rows: int, split: int) -> Tiling:
    """What was found best for this product, else the usual."""
    key = (*weight.shape, row_block(rows), split)
    return chosen.get(key, TILINGS[0])._replace(split=split)


def row_block(rows: int) -> int:
    """Rows as the kernel is compiled for them: a power of two."""
    return max(16, 1 << (rows - 1).bit_length())


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


def why_not_split(by: Projection, dtype: torch.dtype) -> str | None:
    """Why this projection of rows in `dtype` is left to the library; None where it need not be."""
    weight = by.weight
    if by.scale is None:
        return "its weights are not fp8"
    if weight.device.type != "cuda":
        return None  # in torch, for tests
    if not has_kernels(weight.device):
        return "it needs Triton and a GPU of Hopper's generation or later"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its rows are {dtype}"
    if weight.shape[1] % _FEWEST_INPUTS or not weight.is_contiguous():
        return f"it has {weight.shape[1]} inputs"
    return None


def fed_dtype(dtype: torch.dtype) -> torch.dtype:
    """What rows of this dtype become for a product in parts."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def as_fed(x: Tensor) -> Tensor:
    """x as a product in parts takes it."""
    if x.dtype != torch.bfloat16:
        return x
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float16)


def split_parts(split: int) -> Callable[..., Tensor]:
    """The operation that gives a product's parts: of rows as fed, weight, scale, and the dtype of a single part."""
    return _OPERATIONS[split]


@cache  # one function for each: what was compiled for it serves all engines
def project_to_parts(split: int, dtype: torch.dtype) -> Project:
    """A projection that leaves its parts, and its bias, to be added: [split, n, out]."""
    operation = split_parts(split)

    def project_parts(x: Tensor, by: Projection) -> Tensor:
        return operation(as_fed(x), by.weight, by.scale, dtype)

    return project_parts


@cache
def split_project(split: int, dtype: torch.dtype) -> Project:
    """A projection as so many parts, with its result in `dtype`."""
    operation = split_parts(split)

    def project_split(x: Tensor, by: Projection) -> Tensor:
        parts = operation(as_fed(x), by.weight, by.scale, dtype)
        out = parts[0] if len(parts) == 1 else parts.sum(0)
        return (out if by.bias is None else out + by.bias).to(dtype)

    return project_split


def product_parts(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, tiling: Tiling) -> Tensor:
    """x [m, k] as fed times weight [n, k] and its scale [n] on a GPU, as parts [split, m, n]: fp32, or `dtype` for one."""
    from tad.decoding.engine.product_kernel import launch

    out = new_parts(x, weight, tiling.split, dtype)
    launch(x if x.stride(1) == 1 else x.contiguous(), weight, scale, out, tiling)
    return out


def new_parts(x: Tensor, weight: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(split, x.shape[0], weight.shape[0], dtype=dtype if split == 1 else torch.float32)


def _parts_in_torch(x: Tensor, weight: Tensor, scale: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    inputs = x.shape[1]
    bounds = [inputs * part // split for part in range(split + 1)]
    parts = torch.stack(
        [F.linear(x[:, low:high].float(), weight[:, low:high].float()) for low, high in pairwise(bounds)]
    )
    return (parts * scale).to(dtype if split == 1 else torch.float32)


def _register(split: int) -> Callable[..., Tensor]:
    """One operation per number of parts: compiled code must know the number, and takes it from the operation's name."""

    def compute(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if not x.is_cuda:
            return _parts_in_torch(x, weight, scale, split, dtype)
        return product_parts(x, weight, scale, dtype, tiling_for(weight, len(x), split))

    def describe(x: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return new_parts(x, weight, split, dtype)

    operation = torch.library.custom_op(
        f"tad::product_in_{split}",
        compute,
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor scale, ScalarType dtype) -> Tensor",
    )
    operation.register_fake(describe)
    return operation


_OPERATIONS = {split: _register(split) for split in SPLITS}
