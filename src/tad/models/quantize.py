"""Smaller weights for decoding: the projections of every layer in fp8, int8 or int4.

fp8 is e4m3 with one scale per output channel, and activations are rounded to it too, with a scale per row. On a GPU the
product is `torch._scaled_mm`; elsewhere the same values are multiplied in fp32, so that the rounding can be studied and
tested without one.

int8 and int4 are weights only, for any device: they are widened to the activations' dtype before the product, which costs
little beside a forward of a hundred tokens. int8 has one scale per output channel; int4 has two weights in a byte, and a
scale and an offset per group of 32 inputs.

Embedding, norms and head keep their dtype: the head decides tokens, and is a small part of the weights. So do routed experts.
Quantized models decode; they do not train (what does is a frozen model with fp8 beside its own weights:
`tad.training.fp8_base`).
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tad.errors import TadError
from tad.models.layers import place
from tad.models.transformer import MaskedDiffusionModel

_LOG = logging.getLogger(__name__)
Kind = Literal["fp8", "int8", "int4"]
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_CAPABILITY = (8, 9)  # the first GPUs whose matrix units take fp8
_MULTIPLE = 16  # of both sides of a weight, wanted by the fp8 product
GROUP = 32  # inputs that share a scale and an offset in int4


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


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] (int8) with its scale [out] (fp32), in x's dtype."""
    out = F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
    return out if bias is None else out + bias


class QuantizedLinear(nn.Module):
    """A linear map with smaller weights; takes the place of the `nn.Linear` it is made of."""

    weight: nn.Parameter
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = self.quantize(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The stored weights and scales of a weight [out, in]."""
        raise NotImplementedError


class Fp8Linear(QuantizedLinear):
    """e4m3 with a scale [out]."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        small, scale = to_fp8(weight)
        return small, scale[:, 0].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.scale, self.bias)


class Int8Linear(QuantizedLinear):
    """int8 with a scale [out], applied after the GEMM: the widened weights are exact in every dtype."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide = weight.float()
        scale = wide.abs().amax(-1).clamp(min=1e-12) / 127
        return (wide / scale[:, None]).round().to(torch.int8), scale

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scale, self.bias)


class Int4Linear(QuantizedLinear):
    """Two weights in a byte [out, groups, 16]; scale and offset [out, groups, 2] in the weight's own dtype."""

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.float().unflatten(-1, (-1, GROUP))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-12).to(weight.dtype)
        low = low.to(weight.dtype)
        codes = ((groups - low.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
        first, second = codes.chunk(2, dim=-1)
        return first | second << 4, torch.cat((scale, low), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        widen = _compile_once(widen_int4) if x.is_cuda and find_spec("triton") else widen_int4
        return F.linear(x, widen(self.weight, self.scale).to(x.dtype), self.bias)


def widen_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """[out, in] in the dtype of `scale`, of what `Int4Linear` holds."""
    codes = torch.cat((packed & 15, packed >> 4), dim=-1).to(scale.dtype)
    size, low = scale.split(1, dim=-1)
    return torch.addcmul(low, codes, size).flatten(1)


@cache
def _compile_once(function: Any) -> Any:
    """One kernel instead of five that each write the weight."""
    return torch.compile(function, dynamic=True)


KINDS: dict[Kind, type[QuantizedLinear]] = {"fp8": Fp8Linear, "int8": Int8Linear, "int4": Int4Linear}


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
def quantize(model: MaskedDiffusionModel, kind: Kind, device: torch.device | None = None) -> None:
    """Replace the projections of every layer, in place, and move the model to `device` if one is given.

    A weight is rounded where it goes, one at a time: the device never holds more than one as it was. Refuses adapters (merge
    them first) and unfit devices and shapes.
    """
    setting, device = f"quantize '{kind}'", device or model.device
    if kind == "fp8":
        check_device(device, setting)
        _LOG.warning(
            "%s: cost nano-llada 2.2 points of accuracy (standard error 0.9); int8 is as small and cost 0.0 (0.6)",
            setting,
        )
    for layer, path in model.projections():
        linear = cast(nn.Linear, layer.get_submodule(path))
        if type(linear) is not nn.Linear:
            raise TadError(
                f"{setting}: {path} of layer {layer.index} is a {type(linear).__name__}; merge the adapter first"
            )
        if kind == "fp8":
            check_shape(linear, path, setting)
        if kind == "int4" and linear.in_features % GROUP:
            raise TadError(
                f"{setting}: {path} has {linear.in_features} inputs, not a multiple of {GROUP}; use int8"
            )
        place(layer, path, KINDS[kind](linear.to(device)))
    model.to(device)
