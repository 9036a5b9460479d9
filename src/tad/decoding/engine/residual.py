"""What happens between a projection that goes back to the residual and the next one: the sum, and its norm.

For few rows whose product comes in parts, adding the parts, the residual and the norm are one kernel that holds a row in
registers; compiled code reads the parts twice, for the mean square and for the result. The results are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tad.decoding.engine.products import as_fed, fed_dtype, split_parts
from tad.decoding.engine.weights import Projection, project

# Residual x [n, width], what is projected onto it, by what, the weight and the eps of the norm, whether no further
# projection reads that norm: the new residual, and its norm, in the dtype that the next projection is fed.
Join = Callable[[Tensor, Tensor, Projection, Tensor, float, bool], tuple[Tensor, Tensor]]


def add(x: Tensor, y: Tensor) -> Tensor:
    # Rounded as x + y is. Written as that, the compiler would join it to the product that made y, which costs
    # a copy of x; this way it goes into the norm that follows.
    return (x.float() + y.float()).to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.rms_norm(x, (x.shape[-1],), None, eps).to(x.dtype)


def join_by_library(
    x: Tensor, inputs: Tensor, by: Projection, weight: Tensor, eps: float, last: bool
) -> tuple[Tensor, Tensor]:
    """Any projection."""
    x = add(x, project(inputs, by))
    return x, norm(x, weight, eps)


@cache
def join_in_parts(split: int) -> Join:
    """A projection without bias, in so many parts."""
    parts_of = split_parts(split)

    def join(
        x: Tensor, inputs: Tensor, by: Projection, weight: Tensor, eps: float, last: bool
    ) -> tuple[Tensor, Tensor]:
        parts = parts_of(as_fed(inputs), by.weight, by.scale, x.dtype)
        summed, normed = sum_and_norm(x, parts, weight, eps, x.dtype if last else fed_dtype(x.dtype))
        return summed, normed

    return join


def _sum_and_norm(
    x: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not x.is_cuda:
        x = add(x, parts.sum(0).to(x.dtype))
        normed = norm(x, weight, eps)
        return x, normed.clone() if dtype == x.dtype else as_fed(normed)
    from tad.decoding.engine.residual_kernel import launch

    summed, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    launch(x, parts, weight, eps, summed, normed)
    return summed, normed


def _describe(
    x: Tensor, parts: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=dtype)


sum_and_norm = torch.library.custom_op(
    "tad::sum_and_norm",
    _sum_and_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor parts, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
)
sum_and_norm.register_fake(_describe)
