"""FP8 weights for decoding: the projections of every layer in e4m3, one scale per output channel.

Activations are scaled per row when they arrive. On a GPU the product is `torch._scaled_mm`; elsewhere the same values
are multiplied in fp32, so that the rounding can be studied and tested without one. Embedding, norms and head keep their
dtype: the head decides tokens, and is a small part of the weights. Quantized models decode; they do not train (what does
is a frozen model with fp8 beside its own weights: `tad.training.fp8_base`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tad.errors import TadError
from tad.models.layers import place
from tad.models.transformer import MaskedDiffusionModel

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_CAPABILITY = (8, 9)  # the first GPUs whose matrix units take fp8
_MULTIPLE = 16  # of both sides of a weight, wanted by the fp8 product


def to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [n, m] as e4m3 and the fp32 scale of each row [n, 1]: values ~ fp8 * scale."""
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LARGEST
    return (wide / scale).clamp(-_LARGEST, _LARGEST).to(FP8), scale


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, fast_sums: bool = False
) -> Tensor:
    """x [..., in] times weight [out, in] (e4m3) with its scale [out] (fp32), in x's dtype.

    `fast_sums` lets a GPU add in its matrix units alone, with fewer bits than fp32 but more than the factors have.
    """
    rows, row_scale = to_fp8(x.reshape(-1, x.shape[-1]))
    if x.is_cuda:
        out = torch._scaled_mm(
            rows,
            weight.t(),
            scale_a=row_scale,
            scale_b=scale[None],
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_sums,
        )
    else:
        out = F.linear(rows.float(), weight.float()) * row_scale * scale
    out = out.to(x.dtype).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


class Fp8Linear(nn.Module):
    """A linear map with fp8 weights; takes the place of the `nn.Linear` it is made of."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = to_fp8(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale[:, 0].contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.scale, self.bias)


def check_device(device: torch.device, setting: str) -> None:
    """Refuse devices that cannot multiply fp8, in the name of the setting that asked for it; a CPU simulates it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise TadError(f"{setting}: {torch.cuda.get_device_name(device)} has no fp8 units; leave it out")
    if device.type not in ("cuda", "cpu"):
        raise TadError(
            f"{setting}: runs on CUDA devices (and simulated on a CPU), not on {device.type}; leave it out"
        )


def check_shape(linear: nn.Linear, path: str, setting: str) -> None:
    """Refuse weights of a shape that the fp8 product does not take."""
    if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
        raise TadError(
            f"{setting}: {path} is {linear.out_features} x {linear.in_features}; both must be multiples of {_MULTIPLE}"
        )


@torch.no_grad()
def quantize_fp8(model: MaskedDiffusionModel) -> None:
    """Replace the projections of every layer, in place. Refuses adapters (merge them first) and unfit devices."""
    setting = "quantize 'fp8'"
    check_device(model.device, setting)
    for layer, path in model.projections():
        linear = cast(nn.Linear, layer.get_submodule(path))
        if type(linear) is not nn.Linear:
            raise TadError(
                f"{setting}: {path} of layer {layer.index} is a {type(linear).__name__}; merge the adapter first"
            )
        check_shape(linear, path, setting)
        place(layer, path, Fp8Linear(linear))
