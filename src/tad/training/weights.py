"""What is trained, on disk: an adapter in PEFT's layout, or a whole model's weights.

Sharded parameters are gathered first, so a checkpoint does not depend on how many processes wrote it. Saving keeps the
precision that was trained, so that a resumed run goes on bit for bit.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tad.errors import TadError
from tad.models import LM
from tad.models.checkpoint import SINGLE, Checkpoint
from tad.models.export import copy_companions
from tad.models.lora import WEIGHTS, Factors, stack_factors
from tad.training.objectives.module import plain_model

_PEFT = "base_model.model."
_NAME = ".default."  # PEFT's name of the one adapter inside the model, which its files leave out


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn, by their names in the plain model."""
    return {name: value for name, value in plain_model(model).named_parameters() if value.requires_grad}


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole copies on the CPU. Every process has to call this: sharded parameters need all of them."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
        for name, value in trained(model).items()
    }


def save_weights(state: dict[str, Tensor], folder: Path, adapter: Any = None) -> None:
    """Write gathered weights; with PEFT's configuration `adapter` they are an adapter directory."""
    folder.mkdir(parents=True, exist_ok=True)
    if adapter is None:
        save_file(state, folder / SINGLE, metadata={"format": "pt"})
        return
    state = {_PEFT + name.replace(_NAME, "."): value for name, value in state.items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    adapter.save_pretrained(str(folder))


def save_model(state: dict[str, Tensor], folder: Path, source: Path) -> None:
    """Write a whole model in the released layout: the config, dtype and tokenizer files of the one it started from."""
    checkpoint = Checkpoint.open(source)
    model = checkpoint.family.model_class(checkpoint.config).to(checkpoint.dtype)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    copy_companions(source, folder)


def save_stacked(state: dict[str, Tensor], folder: Path, adapter: Any, start: Factors) -> None:
    """Write gathered weights of an adapter over base + `start` as one adapter over the base."""
    scale = adapter.lora_alpha / adapter.r
    sides = {
        side: {
            name.partition(f".lora_{side}{_NAME}")[0]: value
            for name, value in state.items()
            if f".lora_{side}{_NAME}" in name
        }
        for side in "AB"
    }
    own = {path: (a.float(), sides["B"][path].float() * scale) for path, a in sides["A"].items()}
    stacked = stack_factors(start, own)
    both = copy.copy(adapter)
    both.r = both.lora_alpha = len(next(iter(stacked.values()))[0])
    named = {
        f"{path}.lora_{side}{_NAME}weight": factor
        for path, pair in stacked.items()
        for side, factor in zip("AB", pair, strict=True)
    }
    save_weights(named, folder, both)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Read weights written by `save_weights` into a model, sharded or not."""
    adapted = (folder / WEIGHTS).is_file()
    path = folder / (WEIGHTS if adapted else SINGLE)
    if not path.is_file():
        raise TadError(f"{path}: missing; this checkpoint cannot be resumed from")
    stored = load_file(path)
    for name, value in trained(model).items():
        key = _PEFT + name.replace(_NAME, ".") if adapted else name
        if key not in stored or stored[key].shape != value.shape:
            raise TadError(f"{path}: does not hold {key} as this model has it; it is of another run")
        found = stored[key].to(value.device, value.dtype)
        value.copy_(
            distribute_tensor(found, value.device_mesh, value.placements)
            if isinstance(value, DTensor)
            else found
        )


def detach(lm: LM) -> None:
    """Take the adapter out of a model again, leaving the base as it was loaded."""
    if lm.peft is not None:
        lm.model = lm.peft.unload()
        lm.peft = lm.adapter = None
