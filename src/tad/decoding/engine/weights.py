"""A layer's weights as a step reads them: projections that share their input fused to one matrix.

Query, key and value are one GEMM, gate and up another: fewer launches, each large enough to use the whole device. The
modules' own parameters become views of the fused matrix, so nothing is held twice, and the model works, saves and trains
as before. An adapter that is to be switched on and off without merging it is added to a copy of the weights it adapts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tad.models import MaskedDiffusionModel
from tad.models.layers import Attention, NormedAttention, SwiGLU
from tad.models.quantize import FP8, Fp8Linear, Int8Linear, QuantizedLinear, fp8_linear, int8_linear


class UnfitError(Exception):
    """Why a model's weights cannot be read jointly."""


class Projection(NamedTuple):
    """A matrix [out, in], plain, or e4m3 or int8 with a scale [out]."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None


Project = Callable[[Tensor, Projection], Tensor]  # x [n, in] to [n, out]


class LayerWeights(NamedTuple):
    attn_norm: Tensor
    qkv: Projection
    head_norms: list[Tensor] | None  # of query and key heads, [head_dim] each, before RoPE
    attn_out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


def project(x: Tensor, by: Projection) -> Tensor:
    """x [n, in] -> [n, out], by the library."""
    if by.scale is None:
        return F.linear(x, by.weight, by.bias)
    linear = fp8_linear if by.weight.dtype == FP8 else int8_linear
    return linear(x, by.weight, by.scale, by.bias)


def rows_of(by: Projection, low: int, high: int) -> Projection:
    """The part that gives outputs low to high."""
    weight, scale, bias = by
    cut = slice(low, high)
    return Projection(weight[cut], None if scale is None else scale[cut], None if bias is None else bias[cut])


def read_weights(model: MaskedDiffusionModel, adapter: bool | None = None) -> list[LayerWeights]:
    """The weights of every layer, fused in place. Raises `UnfitError` where modules are not plain, fp8 or int8 linear maps.

    With an `adapter` that is on, the weights it adapts are copies with the adapter added; off, they are the base's.
    """
    names, found = model.names, []
    with torch.inference_mode(False), torch.no_grad():
        for layer in model.layers():
            parts = {path: layer.get_submodule(path) for path in layer.projections}
            attn_norm, mlp_norm = _norms(layer, names.attn_norm, names.mlp_norm)
            attention = layer.attention_op
            normed = isinstance(attention, NormedAttention)
            found.append(
                LayerWeights(
                    attn_norm,
                    _fuse([parts[path] for path in (names.query, names.key, names.value)], adapter),
                    _norms(layer, attention.query_norm, attention.key_norm) if normed else None,
                    _fuse([parts[names.attn_out]], adapter),
                    mlp_norm,
                    _fuse([parts[path] for path in (names.gate, names.up)], adapter),
                    _fuse([parts[names.down]], adapter),
                )
            )
            if model.device.type == "cuda":
                torch.cuda.empty_cache()  # the separate matrices leave holes that the joint ones do not fit
    return found


def _norms(layer: nn.Module, *paths: str) -> list[Tensor]:
    return [cast(Tensor, layer.get_submodule(path).weight).detach() for path in paths]


def why_unfit(model: MaskedDiffusionModel, adapter: bool | None = None) -> str | None:
    """Why `read_weights` would refuse this model, without touching it; None where it would not."""
    if model.shape.experts is not None:
        return "its layers have experts"
    if model.gated_token is not None and adapter is not False:
        return "its adapter acts on masks only"
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        return "its weights are spread over several devices"
    try:
        for layer, path in model.projections():
            if (
                type(layer.attention_op) not in (Attention, NormedAttention)
                or type(layer.mlp_op) is not SwiGLU
            ):
                return "its layers are of a kind the engine does not know"
            _linear(layer.get_submodule(path), adapter)
    except UnfitError as reason:
        return str(reason)
    return None


def fingerprint(model: MaskedDiffusionModel, adapter: bool | None = None) -> tuple[int, ...]:
    """Changes when a weight moves or a module is replaced: what was captured before reads the wrong memory then.

    With an adapter that is on also when a weight is changed in place, since copies do not follow.
    """
    weights = [weight for layer in model.layers() for weight in (*layer.parameters(), *layer.buffers())]
    changes = [weight._version for weight in weights if not weight.is_inference()] if adapter else []
    return (*(weight.data_ptr() for weight in weights), *changes, id(model.__dict__.get("head")))


def _linear(module: nn.Module, adapter: bool | None) -> nn.Linear | QuantizedLinear:
    """The linear map itself; below an adapter, where one may be attached."""
    base = getattr(module, "base_layer", None)
    if base is not None and adapter is None:
        raise UnfitError("an adapter is attached, merge it first")
    found = module if base is None else base
    if type(found) not in (nn.Linear, Fp8Linear, Int8Linear) or (
        base is not None and type(found) is not nn.Linear
    ):
        raise UnfitError(f"a projection is a {type(found).__name__}, not a plain linear map")
    return cast("nn.Linear | QuantizedLinear", found)


def _fuse(modules: Sequence[nn.Module], adapter: bool | None) -> Projection:
    linear = [_linear(module, adapter) for module in modules]
    scales = [module.scale for module in linear if isinstance(module, QuantizedLinear)]
    biases = [module.bias for module in linear if module.bias is not None]
    if len(scales) not in (0, len(linear)) or len(biases) not in (0, len(linear)):
        raise UnfitError("projections of one input differ in kind")
    weight = _joint([module.weight for module in linear])
    deltas = [_delta(module) for module in modules] if adapter else []
    if any(delta is not None for delta in deltas):
        weight = weight.clone()
        low = 0
        for module, delta in zip(linear, deltas, strict=True):
            if delta is not None:
                weight[low : low + len(module.weight)] += delta.to(weight.dtype)
            low += len(module.weight)
    return Projection(weight, _joint(scales) if scales else None, _joint(biases) if biases else None)


def _delta(module: nn.Module) -> Tensor | None:
    """What PEFT's active adapters add to a weight [out, in]; None where the module has none."""
    if not hasattr(module, "base_layer"):
        return None
    adapted = cast(Any, module)
    deltas = [adapted.get_delta_weight(name) for name in adapted.active_adapters if name in adapted.lora_A]
    return None if not deltas else torch.stack(deltas).sum(0)


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
        # A weight made in inference mode has no version counter, and stays without one when its data is replaced: data
        # that claims one would fail at the next view of the weight. So the joint matrix is of the weights' own kind.
        with torch.inference_mode(first.is_inference()):
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
