"""Fused add + RMSNorm: what happens between a projection that goes back to the residual and the next one.

For few rows, reducing a GEMM's split-K partials, adding the residual and the rms_norm are one kernel that holds a row in
registers; compiled code reads the partials twice, for the mean square and for the result. The results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.gemm import as_input, input_dtype, split_k_op, to_fp16
from tad.decoding.engine.weights import Projection, project

# Residual x [n, width], what is projected onto it, by what, the weight and the eps of the rms_norm, whether no further
# projection reads that rms_norm: the new residual, and its rms_norm, in the dtype that the next projection takes.
ProjectAddNorm = Callable[[Tensor, Tensor, Projection, Tensor, float, bool], tuple[Tensor, Tensor]]


def add(x: Tensor, y: Tensor) -> Tensor:
    # Rounded as x + y is. Written as that, the compiler would fuse it into the GEMM that made y, which costs
    # a copy of x; this way it goes into the rms_norm that follows.
    return (x.float() + y.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.rms_norm(x, (x.shape[-1],), None, eps).to(x.dtype)


def project_add_norm(
    x: Tensor, inputs: Tensor, by: Projection, weight: Tensor, eps: float, last: bool
) -> tuple[Tensor, Tensor]:
    """Any projection."""
    x = add(x, project(inputs, by))
    return x, rms_norm(x, weight, eps)


@cache
def split_k_add_norm(split: int) -> ProjectAddNorm:
    """A projection without bias, by so many splits of K."""
    partials_of = split_k_op(split)

    def project(
        x: Tensor, inputs: Tensor, by: Projection, weight: Tensor, eps: float, last: bool
    ) -> tuple[Tensor, Tensor]:
        partials = partials_of(as_input(inputs, by), by.weight, by.scale, x.dtype)
        dtype = x.dtype if last else input_dtype(x.dtype, by)
        summed, normed = add_norm(x, partials, weight, eps, dtype)
        return summed, normed

    return project


def _add_norm(
    x: Tensor, partials: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not x.is_cuda:
        x = add(x, partials.sum(0).to(x.dtype))
        normed = rms_norm(x, weight, eps)
        return x, normed.clone() if dtype == x.dtype else to_fp16(normed)
    from tad.decoding.engine.kernels import launch_add_norm

    summed, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    launch_add_norm(x, partials, weight, eps, summed, normed)
    return summed, normed


def _add_norm_shape(
    x: Tensor, partials: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=dtype)


add_norm = torch.library.custom_op(
    "tad::add_norm",
    _add_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor partials, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
)
add_norm.register_fake(_add_norm_shape)
