"""Adapters that act on masks only: a model whose forwards without masks are its parent's, bit for bit.

The gate is computed in the model's forward, from the ids that it is fed, and handed from layer to layer; what an adapter adds
is put to zero where no mask stands. The mask has an embedding of its own, beside the parent's table. There is nothing to merge:
weights that acted everywhere would be another model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tad.errors import TadError
from tad.models import lora
from tad.models.layers import Layer
from tad.models.transformer import MaskedDiffusionModel


def gate(model: MaskedDiffusionModel, mask: int) -> None:
    """Let the adapters inside a model act on masks only, and give the mask an embedding of its own (at first the mean of
    all), which is trained with them."""
    model.gated_token = mask
    with torch.no_grad():
        mean = model.embedding().weight.float().mean(0)
    model.mask_embedding = nn.Parameter(mean, requires_grad=True)
    for layer, path in model.projections():
        every = path in (
            model.names.key,
            model.names.value,
        )  # made of all positions, also where few outputs are wanted
        adapted = cast(Any, layer.part(path))
        if hasattr(adapted, "lora_B"):
            for factor in adapted.lora_B.values():
                factor.register_forward_hook(_Gate(layer, every))
            adapted.forward = partial(_pass_over, layer, adapted, adapted.forward)


class _Gate:
    """A hook on the second factor of an adapter: what it adds is nothing where no mask is."""

    def __init__(self, layer: Layer, every: bool) -> None:
        self.layer, self.every = layer, every

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        masks = self.layer.masks if self.every else self.layer.asked_masks
        assert masks is not None
        return torch.where(masks.to(output.device)[..., None], output, 0)


def _pass_over(layer: Layer, adapted: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An adapted projection; in a forward that is known to have no masks, the parent's own."""
    return cast(Tensor, adapted.base_layer(x)) if layer.masks is None else forward(x)


def attach_gated(model: MaskedDiffusionModel, adapter: lora.Adapter, mask: int) -> Any:
    """Put a verified gated adapter, with its mask's embedding, into a model; returns the PEFT handle (inference mode)."""
    from peft import get_peft_model

    handle = get_peft_model(model, adapter.config, autocast_adapter_dtype=False)
    gate(model, mask)
    stored = load_file(adapter.folder / lora.WEIGHTS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            key = "base_model.model." + name.replace(".default.", ".")
            if key in stored:
                weight.data = stored[key].to(
                    weight.device, torch.float32 if name == "mask_embedding" else weight.dtype
                )
            elif "lora_" in name:
                raise TadError(f"{adapter.folder / lora.WEIGHTS}: has no {key}, which {lora.CONFIG} implies")
    return handle.requires_grad_(False).eval()


def go_on(model: MaskedDiffusionModel) -> None:
    """Let the adapter of a converted model learn further."""
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name or name == "mask_embedding")
