"""Low-rank adapters by role: all projections of every layer, whatever the family calls them; never the head.

The adapters are PEFT's own, in PEFT's own format. Attaching one replaces layers of the model in place, so `LM.model`
stays the plain model (with adapters inside) and `LM.peft` is the handle that trains, disables and saves them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.models.checkpoint import Stored, locate, read_header, read_json
from tad.models.family import FAMILIES, Family
from tad.models.transformer import MaskedDiffusionModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def lora_config(
    model: MaskedDiffusionModel, rank: int = 128, alpha: float | None = None, dropout: float = 0.0
) -> Any:
    """PEFT's configuration for this model; alpha defaults to the rank (a scale of one)."""
    from peft import LoraConfig

    if rank < 1:
        raise TadError(f"LoRA rank should be at least 1, is {rank}")
    return LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=lora_targets(model),
        bias="none",
    )


def lora_targets(model: MaskedDiffusionModel) -> str:
    """A pattern for the projections of every layer, and not for LLaDA's head, also called ff_out."""
    layers = re.escape(model.names.layers.rpartition(".")[2])
    parts = "|".join(re.escape(path) for path in dict.fromkeys(path for _, path in model.projections()))
    return rf".*\.{layers}\.\d+\.({parts})"


def attach(
    model: MaskedDiffusionModel,
    rank: int = 128,
    alpha: float | None = None,
    dropout: float = 0.0,
) -> Any:
    """Put fresh adapters into the model, trainable, the rest frozen; returns the PEFT handle."""
    from peft import get_peft_model

    return get_peft_model(model, lora_config(model, rank, alpha, dropout), autocast_adapter_dtype=False)


def locate_adapter(adapter: str | Path) -> Path:
    """The directory of an adapter: as given, or from the hub."""
    folder = locate(adapter)
    if not (folder / CONFIG).is_file():
        raise TadError(f"{folder / CONFIG}: missing; this directory is not a PEFT adapter")
    return folder


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """An adapter's configuration and the header of its weights."""
    values = read_json(folder / CONFIG)
    if values.get("peft_type") != "LORA":
        raise TadError(
            f"{folder / CONFIG}: peft_type {values.get('peft_type')!r} is not supported; only LORA is"
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = " (pickled weights are not read)" if (folder / "adapter_model.bin").exists() else ""
        raise TadError(f"{weights}: missing{pickled}")
    return values, read_header(weights)


def verify_adapter(folder: Path, model: MaskedDiffusionModel, family: Family) -> dict[str, Any]:
    """Hold an adapter to a model before PEFT touches it; returns the adapter's configuration."""
    values, stored = read_adapter(folder)
    modules = dict(model.named_modules())
    for key, tensor in stored.items():
        path, _, part = key.removeprefix(_PREFIX).partition(".lora_")
        if not part:
            continue
        if path not in modules:
            raise TadError(
                f"{folder / WEIGHTS}: adapts {path}, which this model does not have{_whose(path, family)}"
            )
        weight = getattr(modules[path], "weight", None)
        if weight is None or len(tensor.shape) != 2 or part not in ("A.weight", "B.weight"):
            continue
        rows, columns = weight.shape
        have, want = (tensor.shape[1], columns) if part.startswith("A") else (tensor.shape[0], rows)
        if have != want:
            raise TadError(
                f"{folder / WEIGHTS}: {key} has shape {list(tensor.shape)}, the model's {path} is {list(weight.shape)};"
                " this adapter belongs to a model of another size"
            )
    if not any(".lora_" in key for key in stored):
        raise TadError(f"{folder / WEIGHTS}: holds no LoRA weights")
    return values


def load_adapter(model: MaskedDiffusionModel, family: Family, adapter: str | Path) -> Any:
    """Read an adapter from disk or hub and put it into the model; returns the PEFT handle (inference mode)."""
    from peft import PeftModel

    folder = locate_adapter(adapter)
    verify_adapter(folder, model, family)
    try:
        handle = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).eval()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        # The configuration is not that of the weights.
        first = str(error).strip().splitlines()[0]
        raise TadError(f"{folder / CONFIG}: PEFT does not load this adapter: {first}") from None
    _check_loaded(folder, handle)
    return handle


def _check_loaded(folder: Path, handle: Any) -> None:
    """PEFT leaves out weights that `target_modules` does not reach, and leaves fresh ones where none are stored."""
    parts = [name.partition(".lora_") for name, _ in handle.named_parameters()]
    wanted = {
        (path.removeprefix(_PREFIX), part.replace(f".{handle.active_adapter}", "").removesuffix(".weight"))
        for path, _, part in parts
        if part
    }
    keys = (key.removeprefix(_PREFIX).partition(".lora_") for key in read_header(folder / WEIGHTS))
    stored = {(path, part.removesuffix(".weight")) for path, _, part in keys if part}
    for path, _ in sorted(stored - wanted):
        raise TadError(
            f"{folder / CONFIG}: target_modules leaves out {path}, which {WEIGHTS} has weights for"
        )
    for path, _ in sorted(wanted - stored):
        raise TadError(f"{folder / WEIGHTS}: has no weights for {path}, which {CONFIG} names")


def _whose(path: str, family: Family) -> str:
    """'; it is an adapter for dream, this is llada' where the path is another family's."""
    for other in FAMILIES.values():
        if other is not family and path.startswith(f"{other.names.layers}."):
            return f"; it is an adapter for {other.name}, the model is {family.name}"
    return ""
