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

from tad.decoding.engine.products import split_parts
from tad.decoding.engine.weights import Project, Projection, project

# Residual x [n, width], what is projected onto it, by what, the weights read next, the weight and the eps of the norm:
# the new residual, and its norm.
Join = Callable[[Tensor, Tensor, Projection, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


def add(x: Tensor, y: Tensor) -> Tensor:
    # Rounded as x + y is. Written as that, the compiler would join it to the product that made y, which costs
    # a copy of x; this way it goes into the norm that follows.
    return (x.float() + y.float()).to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.rms_norm(x, (x.shape[-1],), None, eps).to(x.dtype)


@cache
def join_by(project: Project) -> Join:
    """Any projection."""

    def join(
        x: Tensor, inputs: Tensor, by: Projection, ahead: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = add(x, project(inputs, by, ahead))
        return x, norm(x, weight, eps)

    return join


@cache
def join_in_parts(split: int) -> Join:
    """A projection without bias, in so many parts."""
    parts_of = split_parts(split)

    def join(
        x: Tensor, inputs: Tensor, by: Projection, ahead: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        summed, normed = sum_and_norm(x, parts_of(inputs, by.weight, by.scale, ahead), weight, eps)
        return summed, normed

    return join


LIBRARY_JOIN = join_by(project)


def _sum_and_norm(x: Tensor, parts: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not x.is_cuda:
        x = add(x, parts.sum(0).to(x.dtype))
        return x, norm(x, weight, eps)
    from tad.decoding.engine.residual_kernel import launch

    summed, normed = torch.empty_like(x), torch.empty_like(x)
    launch(x, parts, weight, eps, summed, normed)
    return summed, normed


def _describe(x: Tensor, parts: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


sum_and_norm = torch.library.custom_op(
    "tad::sum_and_norm",
    _sum_and_norm,
    mutates_args=(),
    schema="(Tensor x, Tensor parts, Tensor weight, float eps) -> (Tensor, Tensor)",
)
sum_and_norm.register_fake(_describe)
