"""Products of few rows with large weights: the inputs split in parts, so that every multiprocessor reads weights.

A forward of some tens of tokens takes as long as reading its weights does. The library's kernels leave part of the device
idle for some shapes, and its fp8 product is made for many rows. Here each product is a sum of parts, computed side by
side; the parts [split, rows, outputs] are what the operation gives, and adding them is left to the caller, which does it
in the kernel that comes next (a norm, a rotation). Nothing is added in an order that depends on timing.

On CUDA the parts come from a Triton kernel, elsewhere from the same sums in torch. Not covered: many rows, where the
arithmetic counts and the library is the right choice.
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
_CAPABILITY = (9, 0)  # the first GPUs with the copy engine and products of pairs in bf16
_FEWEST_INPUTS = 64  # of which a weight's inputs must be a multiple

# Bytes of the weights read next that a product asks for when its own are read: they travel while the small kernels in
# between run. A question of the device's cache, and so one number for all engines.
read_ahead = 0
# What was found best: (outputs, inputs, fp8, block of rows, split) -> tiling.
chosen: dict[tuple[int, int, bool, int, int], Tiling] = {}


class Tiling(NamedTuple):
    """How a product is cut up: a program's outputs and inputs at a time, parts, warps, loads in flight. `turned` has
    the weights as the left factor of the matrix units; `described` reads through the copy engine."""

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    turned: bool
    described: bool


# The first of each serves every shape.
TILINGS = {
    False: (
        Tiling(128, 64, 1, 4, 4, False, False),
        Tiling(128, 64, 1, 4, 4, False, True),
        Tiling(128, 64, 1, 4, 3, False, True),
        Tiling(128, 64, 1, 4, 4, True, True),
        Tiling(64, 128, 1, 4, 3, False, True),
        Tiling(64, 128, 1, 4, 4, True, True),
        Tiling(64, 64, 1, 4, 5, True, False),
        Tiling(64, 64, 1, 4, 6, False, True),
    ),
    # fp8. Weights on the left: only that factor can come from registers, where they are widened.
    True: (
        Tiling(128, 64, 1, 4, 5, True, False),
        Tiling(128, 64, 1, 4, 4, True, True),
        Tiling(128, 128, 1, 4, 3, True, True),
        Tiling(128, 128, 1, 8, 4, True, True),
        Tiling(256, 64, 1, 8, 4, True, True),
        Tiling(64, 128, 1, 4, 3, True, True),
        Tiling(64, 64, 1, 4, 5, True, False),
        Tiling(64, 64, 1, 4, 6, True, True),
    ),
}


def candidates(weight: Tensor) -> list[Tiling]:
    """The tilings worth trying for a weight [n, k]: those that occupy the whole device at once."""
    n, k = weight.shape
    found = []
    for tiling in TILINGS[is_fp8(weight)]:
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
    key = (*weight.shape, is_fp8(weight), row_block(rows), split)
    return chosen.get(key, TILINGS[is_fp8(weight)][0])._replace(split=split)


def row_block(rows: int) -> int:
    """Rows as the kernel is compiled for them: a power of two."""
    return max(16, 1 << (rows - 1).bit_length())


def is_fp8(weight: Tensor) -> bool:
    return weight.dtype == torch.float8_e4m3fn


def why_not_split(by: Projection, x_dtype: torch.dtype) -> str | None:
    """Why the kernel does not serve this projection; None where it does."""
    weight = by.weight
    if weight.device.type != "cuda":
        return None  # in torch, for tests
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(weight.device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(weight.device)} is older than Hopper"
    if x_dtype not in (torch.bfloat16, torch.float16) or weight.dtype not in (x_dtype, torch.float8_e4m3fn):
        return f"{weight.dtype} weights"
    if weight.shape[1] % _FEWEST_INPUTS or not weight.is_contiguous():
        return f"{weight.shape[1]} inputs"
    return None


def split_parts(split: int) -> Callable[..., Tensor]:
    """The operation that gives a product's parts: of x, weight, scale and the weights read next."""
    return _OPERATIONS[split]


@cache
def project_to_parts(split: int) -> Project:
    """A projection that leaves its parts, and its bias, to be added: [split, n, out]."""
    operation = split_parts(split)

    def project_parts(x: Tensor, by: Projection, ahead: Tensor | None) -> Tensor:
        return operation(x, by.weight, by.scale, ahead)

    return project_parts


@cache  # one function per number: what was compiled for it serves all engines
def split_project(split: int) -> Project:
    """A projection as so many parts."""
    operation = split_parts(split)

    def project_split(x: Tensor, by: Projection, ahead: Tensor | None) -> Tensor:
        parts = operation(x, by.weight, by.scale, ahead)
        out = parts[0] if len(parts) == 1 else parts.sum(0)
        return (out if by.bias is None else out + by.bias).to(x.dtype)

    return project_split


def product_parts(
    x: Tensor, weight: Tensor, scale: Tensor | None, ahead: Tensor | None, tiling: Tiling
) -> Tensor:
    """x [m, k] times weight [n, k] and its scale [n] on a GPU, as parts [split, m, n]: fp32, or x's dtype for one."""
    from tad.decoding.engine.product_kernel import launch

    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(tiling.split, len(x), len(weight), dtype=_part_dtype(x, tiling.split), device=x.device)
    launch(x, weight, scale, ahead, read_ahead, out, tiling)
    return out


def _part_dtype(x: Tensor, split: int) -> torch.dtype:
    return x.dtype if split == 1 else torch.float32


def _parts_in_torch(x: Tensor, weight: Tensor, scale: Tensor | None, split: int) -> Tensor:
    inputs = x.shape[1]
    bounds = [inputs * part // split for part in range(split + 1)]
    parts = torch.stack(
        [F.linear(x[:, low:high].float(), weight[:, low:high].float()) for low, high in pairwise(bounds)]
    )
    return (parts if scale is None else parts * scale).to(_part_dtype(x, split))


def _register(split: int) -> Callable[..., Tensor]:
    """One operation per number of parts: compiled code must know the number, and takes it from the operation's name."""

    def compute(x: Tensor, weight: Tensor, scale: Tensor | None, ahead: Tensor | None) -> Tensor:
        if not x.is_cuda:
            return _parts_in_torch(x, weight, scale, split)
        return product_parts(x, weight, scale, ahead, tiling_for(weight, len(x), split))

    def describe(x: Tensor, weight: Tensor, scale: Tensor | None, ahead: Tensor | None) -> Tensor:
        return x.new_empty(split, x.shape[0], weight.shape[0], dtype=x.dtype if split == 1 else torch.float32)

    operation = torch.library.custom_op(
        f"tad::product_in_{split}",
        compute,
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor? scale, Tensor? ahead) -> Tensor",
    )
    operation.register_fake(describe)
    return operation


_OPERATIONS = {split: _register(split) for split in SPLITS}
