"""A layer's weights as a step reads them: projections that share their input as one matrix.

Query, key and value are one product, gate and up another: fewer launches, each large enough to use the whole device.
The modules' own parameters become views of the joint matrix, so nothing is held twice, and the model works, saves and
trains as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tad.models import MaskedDiffusionModel
from tad.models.quantize import Fp8Linear, fp8_linear
from tad.models.transformer import Attention, SwiGLU


class UnfitError(Exception):
    """Why a model's weights cannot be read jointly."""


class Projection(NamedTuple):
    """A matrix [out, in], plain or e4m3 with a scale [out]."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None


Project = Callable[[Tensor, Projection], Tensor]  # x [n, in] to [n, out]


class LayerWeights(NamedTuple):
    attn_norm: Tensor
    qkv: Projection
    attn_out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


def project(x: Tensor, by: Projection) -> Tensor:
    """x [n, in] -> [n, out], by the library."""
    if by.scale is None:
        return F.linear(x, by.weight, by.bias)
    return fp8_linear(x, by.weight, by.scale, by.bias)


def rows_of(by: Projection, low: int, high: int) -> Projection:
    """The part that gives outputs low to high."""
    weight, scale, bias = by
    cut = slice(low, high)
    return Projection(weight[cut], None if scale is None else scale[cut], None if bias is None else bias[cut])


def read_weights(model: MaskedDiffusionModel) -> list[LayerWeights]:
    """The weights of every layer, joined in place. Raises `UnfitError` where modules are not plain or fp8 linear maps."""
    names, found = model.names, []
    with torch.inference_mode(False), torch.no_grad():
        for layer in model.layers():
            parts = {path: _linear(layer.get_submodule(path), path) for path in layer.projections}
            norms = [
                cast(Tensor, layer.get_submodule(path).weight) for path in (names.attn_norm, names.mlp_norm)
            ]
            found.append(
                LayerWeights(
                    norms[0].detach(),
                    _join([parts[path] for path in (names.query, names.key, names.value)]),
                    _join([parts[names.attn_out]]),
                    norms[1].detach(),
                    _join([parts[path] for path in (names.gate, names.up)]),
                    _join([parts[names.down]]),
                )
            )
            if model.device.type == "cuda":
                torch.cuda.empty_cache()  # the separate matrices leave holes that the joint ones do not fit
    return found


def why_unfit(model: MaskedDiffusionModel) -> str | None:
    """Why `read_weights` would refuse this model, without touching it; None where it would not."""
    if model.shape.blocks is not None:
        return "its attention is block-causal whatever the schedule"
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        return "its weights are spread over several devices"
    try:
        for layer, path in model.projections():
            if type(layer.attention_op) is not Attention or type(layer.mlp_op) is not SwiGLU:
                return "its layers are of a kind the engine does not know"
            _linear(layer.get_submodule(path), path)
    except UnfitError as reason:
        return str(reason)
    return None


def fingerprint(model: MaskedDiffusionModel) -> tuple[int, ...]:
    """Changes when a weight moves or a module is replaced: what was captured before reads the wrong memory then."""
    return tuple(
        weight.data_ptr() for layer in model.layers() for weight in (*layer.parameters(), *layer.buffers())
    )


def _linear(module: nn.Module, path: str) -> nn.Linear | Fp8Linear:
    if type(module) not in (nn.Linear, Fp8Linear):
        raise UnfitError(f"{path} is a {type(module).__name__}: an adapter is attached, merge it first")
    return cast("nn.Linear | Fp8Linear", module)


def _join(modules: Sequence[nn.Linear | Fp8Linear]) -> Projection:
    scales = [module.scale for module in modules if isinstance(module, Fp8Linear)]
    biases = [module.bias for module in modules if module.bias is not None]
    if len(scales) not in (0, len(modules)) or len(biases) not in (0, len(modules)):
        raise UnfitError("projections of one input differ in kind")
    return Projection(
        _joint([module.weight for module in modules]),
        _joint(scales) if scales else None,
        _joint(biases) if biases else None,
    )


def _joint(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of which the parts are views, along the first dimension; made so where they are not."""
    first = parts[0]
    if len(parts) == 1:
        return first.detach()
    rows = sum(len(part) for part in parts)
    shape = (rows, *first.shape[1:])
    if not _follow(parts):
        if any(part.untyped_storage().nbytes() != part.nbytes for part in parts):
            raise UnfitError("its weights are parts of larger buffers (a sharded or flattened model)")
        joint = torch.cat([part.detach() for part in parts])
        low = 0
        for part in parts:
            part.data = joint[low : low + len(part)]
            low += len(part)
        return joint
    return first.detach().as_strided(shape, first.stride())


def _follow(parts: Sequence[Tensor]) -> bool:
    """Whether the parts already lie behind each other in one storage."""
    place = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != place or not part.is_contiguous():
            return False
        place += part.nbytes
    return len({part.untyped_storage().data_ptr() for part in parts}) == 1
