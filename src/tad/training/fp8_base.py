"""Frozen projections under adapters, with the forward product in fp8 and the gradient through the weight itself.

Forward, in the teacher's pass and the student's, is `fp8_linear`; the gradient with respect to the input is the plain
linear map's, with the weight in its own dtype. Both copies stay in memory: the fp8 one costs half of a bf16 weight once
more. It is held in buffers that are not saved, so checkpoints, adapters and fingerprints do not know of it.

Products of the adapters, the head and everything trained stay as they are. Not for sharded weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from tad.errors import TadError
from tad.models import MaskedDiffusionModel
from tad.models.quantize import check_device, check_shape, fp8_linear, to_fp8

SETTING = "fp8_base_forward"


class Fp8BaseLinear(nn.Linear):
    """A frozen linear map that multiplies in fp8; shares the weight and bias of the one it is made of."""

    fp8: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        fp8, scale = to_fp8(linear.weight.detach())
        self.register_buffer("fp8", fp8, persistent=False)
        self.register_buffer("scale", scale[:, 0].contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # As the plain map under autocast: whatever arrives is multiplied in the weight's dtype.
        out = cast(Tensor, _Fp8Forward.apply(x.to(self.weight.dtype), self.weight, self.fp8, self.scale))
        return out if self.bias is None else out + self.bias


class _Fp8Forward(torch.autograd.Function):
    """y = fp8(x) fp8(weight)^T; dx = dy weight. Keeps nothing for backward but the weight, which is there anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fp8: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return fp8_linear(x, fp8, scale, fast_sums=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None, None, None


@torch.no_grad()
def quantize_base(model: MaskedDiffusionModel) -> None:
    """Give the base of every adapted projection an fp8 forward, in place; all or none."""
    check_device(model.device, SETTING)
    places = list(_bases(model))
    for path, _, base in places:
        check_shape(base, path, SETTING)
    for _, adapted, base in places:
        adapted.base_layer = Fp8BaseLinear(base)


def restore_base(model: MaskedDiffusionModel) -> None:
    """Take the fp8 weights out again; the maps are plain as before. Does nothing to a plain model."""
    for _, adapted, base in _bases(model):
        if isinstance(base, Fp8BaseLinear):
            plain = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
            plain.weight, plain.bias = base.weight, base.bias
            adapted.base_layer = plain.train(base.training)


def fp8_buffers(module: nn.Module) -> list[str]:
    """Names of the fp8 weights and scales inside a module. They are the same on every process: DDP has nothing to send."""
    return [
        f"{path}.{name}"
        for path, part in module.named_modules()
        if isinstance(part, Fp8BaseLinear)
        for name in ("fp8", "scale")
    ]


def _bases(model: MaskedDiffusionModel) -> Iterator[tuple[str, Any, nn.Linear]]:
    """(path, the adapted layer, the linear map under the adapter) of every projection."""
    for layer, path in model.projections():
        adapted: Any = layer.get_submodule(path)
        base = getattr(adapted, "base_layer", None)
        if not isinstance(base, nn.Linear):
            raise TadError(
                f"{SETTING}: {path} of layer {layer.index} carries no adapter; train adapters, or leave it out"
            )
        yield path, adapted, base
