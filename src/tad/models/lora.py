"""Low-rank adapters by role: all projections of every layer, whatever the family calls them; never the head.

The adapters are PEFT's own, in PEFT's own format. Attaching one replaces layers of the model in place, so `LM.model`
stays the plain model (with adapters inside) and `LM.peft` is the handle that trains, disables and saves them.

An adapter may be a stranger's. Its header is held to the model first: lora_A and lora_B of the model's projections and nothing
else. PEFT then gets a configuration made here, of what the header shows and a few checked fields of the file.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tad.errors import TadError
from tad.models.family import FAMILIES, Family
from tad.models.source import locate
from tad.models.stored import Stored, check_files, read_header, read_json
from tad.models.transformer import MaskedDiffusionModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_MASK = "base_model.model.mask_embedding"
# Fields that say where an adapter comes from or which modules it has, which its weights say better.
_IGNORED = {"base_model_name_or_path", "revision", "task_type", "peft_type", "peft_version", "inference_mode", "auto_mapping",
            "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}  # fmt: skip


# Fields that PEFT is told: types and bounds of numbers (a rank is at most that of the weights), flags, numbers by pattern.
_NUMBERS: dict[str, tuple[tuple[type, ...], int, float]] = {
    "r": ((int,), 1, math.inf),
    "lora_alpha": ((int, float), 0, 1e6),
    "lora_dropout": ((int, float), 0, 1.0),
}
_FLAGS = ("use_rslora", "init_lora_weights")
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}


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
    """Put fresh adapters into the model, trainable, the rest frozen; returns the PEFT handle. Alpha defaults to the rank."""
    from peft import LoraConfig, get_peft_model

    if rank < 1:
        raise TadError(f"LoRA rank should be at least 1, is {rank}")
    config = LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=lora_targets(model),
        bias="none",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


class Adapter(NamedTuple):
    """An adapter that fits its model: where it is, what PEFT is told, and its size."""

    folder: Path
    config: Any  # LoraConfig
    parameters: int


def verify_adapter(
    source: str | Path, model: MaskedDiffusionModel, family: Family, gated: bool = False
) -> Adapter:
    """Hold an adapter, of a directory or the hub, to a model (which may be without memory) before PEFT touches either.

    A `gated` one acts on masks only; it is part of a converted model, and also has the embedding of its mask.
    """
    folder = locate(source)
    if not gated and (folder / "conversion.json").is_file():
        raise TadError(f"{folder}: is a converted model; give it as the model, without --adapter")
    if not (folder / CONFIG).is_file():
        raise TadError(f"{folder / CONFIG}: missing; this directory is not a PEFT adapter")
    check_files(folder)
    values = read_json(folder / CONFIG)
    if values.get("peft_type") != "LORA":
        raise TadError(
            f"{folder / CONFIG}: peft_type {values.get('peft_type')!r} is not supported; only LORA is"
        )
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = " (pickled weights are not read)" if (folder / "adapter_model.bin").exists() else ""
        raise TadError(f"{weights}: missing{pickled}")
    stored = read_header(weights)
    if gated:
        mask = stored.pop(_MASK, None)
        if mask is None or mask.shape != (model.shape.width,):
            raise TadError(f"{weights}: {_MASK} of {model.shape.width} numbers is missing; convert again")
    known = {
        f"{model.names.layers}.{layer.index}.{path}": layer.part(path).weight.shape
        for layer, path in model.projections()
    }
    ranks = _check_weights(weights, stored, known, family)
    _check_targets(folder, values, set(ranks), set(known))
    size = sum(math.prod(tensor.shape) for tensor in stored.values())
    config = _make_config(folder / CONFIG, values, ranks)
    config.target_modules = lora_targets(model) if len(ranks) == len(known) else set(ranks)
    return Adapter(folder, config, size)


def _check_weights(
    weights: Path, stored: dict[str, Stored], known: dict[str, Any], family: Family
) -> dict[str, int]:
    """The rank of every adapted projection, by its path in the model; `known` are the shapes of all projections."""
    ranks: dict[str, dict[str, int]] = {}
    for key, tensor in stored.items():
        found = _KEY.fullmatch(key)
        if found is None:
            raise TadError(
                f"{weights}: {key} is not a lora_A or lora_B weight; an adapter holds nothing else"
            )
        path, side = found["path"], found["side"]
        if path not in known:
            raise TadError(
                f"{weights}: adapts {path}, which is no projection of this model's layers{_whose(path, family)}"
            )
        rows, columns = known[path]
        fits = len(tensor.shape) == 2 and tensor.shape[side == "A"] == (columns if side == "A" else rows)
        if not fits:
            raise TadError(
                f"{weights}: {key} has shape {list(tensor.shape)}, the model's {path} is {[rows, columns]};"
                " this adapter belongs to a model of another size"
            )
        ranks.setdefault(path, {})[side] = tensor.shape[side == "B"]
    for path, sides in ranks.items():
        if sides.get("A") != sides.get("B"):
            raise TadError(f"{weights}: has no weights for {path} of one rank on both sides (lora_A, lora_B)")
    if not ranks:
        raise TadError(f"{weights}: holds no LoRA weights")
    return {path: sides["A"] for path, sides in ranks.items()}


def _check_targets(folder: Path, values: dict[str, Any], adapted: set[str], paths: set[str]) -> None:
    """The projections that the configuration names must be those that have weights, else something got lost."""
    targets = values.get("target_modules")
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        named = {path for path in paths if any(f".{path}".endswith(f".{target}") for target in targets)}
    elif targets == "all-linear":
        named = paths
    elif isinstance(targets, str):
        pattern = _compile(targets, folder / CONFIG, "target_modules")
        named = {path for path in paths if pattern.fullmatch(path)}
    else:
        raise TadError(f"{folder / CONFIG}: target_modules should be a list of names or a pattern")
    for path in sorted(adapted - named):
        raise TadError(
            f"{folder / CONFIG}: target_modules leaves out {path}, which {WEIGHTS} has weights for"
        )
    if values.get("layers_to_transform") is None:
        for path in sorted(named - adapted):
            raise TadError(f"{folder / WEIGHTS}: has no weights for {path}, which {CONFIG} names")


def _compile(pattern: str, where: Path, field: str) -> re.Pattern[str]:
    """A pattern of a stranger, as long as matching it cannot take long: few repetitions, none of groups."""
    simple = len(pattern) < 10_000 and not re.search(r"[)\]][*+?{]|\(\?", pattern)
    if not simple or sum(pattern.count(sign) for sign in "*+{") > 3:
        raise TadError(f"{where}: {field} has a pattern that is not simple enough: {pattern[:60]!r}")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise TadError(f"{where}: {field} has a pattern that cannot be read: {pattern[:60]!r}") from None


def _make_config(where: Path, values: dict[str, Any], ranks: dict[str, int]) -> Any:
    """PEFT's configuration, of the fields that matter: each a number within bounds, or a flag. Others must say nothing."""
    from peft import LoraConfig

    usual = LoraConfig().to_dict()
    given = {name: values.get(name, usual[name]) for name in (*_NUMBERS, *_FLAGS)}
    given |= {name: values.get(name) or {} for name in _PATTERNS}
    numbers = [(name, name, given[name]) for name in _NUMBERS]
    for name, field in _PATTERNS.items():
        if not isinstance(given[name], dict):
            raise TadError(f"{where}: {name} should be an object")
        for pattern, value in given[name].items():
            _compile(pattern, where, name)
            numbers.append((name, field, value))
    largest = max(ranks.values())
    for name, field, value in numbers:
        kinds, least, most = _NUMBERS[field]
        most = largest if field == "r" else most
        if type(value) not in kinds or not least <= value <= most:
            raise TadError(f"{where}: {name} should be a number from {least} to {most:g}, is {value!r:.40}")
    for name in _FLAGS:
        if type(given[name]) is not bool:
            raise TadError(f"{where}: {name} should be true or false, is {given[name]!r:.40}")
    if not given["rank_pattern"] and set(ranks.values()) != {given["r"]}:
        raise TadError(f"{where}: r is {given['r']}, the weights have rank {largest}")
    for name in values.keys() - given.keys() - _IGNORED:
        if values[name] not in (usual.get(name), None, False, [], {}):
            raise TadError(f"{where}: {name} is not supported")
    return LoraConfig(**given)


def load_adapter(model: MaskedDiffusionModel, adapter: Adapter) -> Any:
    """Put the weights of a verified adapter into the model; returns the PEFT handle (inference mode)."""
    from peft import PeftModel

    folder, config, _ = adapter
    try:
        return PeftModel.from_pretrained(
            model, str(folder), config=config, autocast_adapter_dtype=False
        ).eval()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        # Its patterns do not give the ranks that the weights have.
        first = str(error).strip().splitlines()[0]
        raise TadError(f"{folder / CONFIG}: PEFT does not load this adapter: {first}") from None


Factors = dict[str, tuple[Tensor, Tensor]]
"""Path of a projection -> A [rank, in] and B [out, rank]; the adapter's scale is in B."""


def read_factors(adapter: Adapter) -> Factors:
    """What a verified adapter adds to the weights, in fp32."""
    from peft.utils.other import get_pattern_key

    folder, config, _ = adapter
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / WEIGHTS).items():
        found = _KEY.fullmatch(key)
        assert found is not None
        sides.setdefault(found["path"], {})[found["side"]] = tensor.float()
    factors = {}
    for path, pair in sides.items():
        rank, alphas = len(pair["A"]), config.alpha_pattern
        alpha = alphas.get(get_pattern_key(alphas, path), config.lora_alpha)
        factors[path] = (pair["A"], pair["B"] * (alpha / (math.sqrt(rank) if config.use_rslora else rank)))
    return factors


def add_factors(model: MaskedDiffusionModel, factors: Factors) -> None:
    """Add B A to the weights. In fp64, so that the sums round alike on every machine and have one fingerprint."""
    for path, (a, b) in factors.items():
        weight = model.get_parameter(f"{path}.weight")
        where = "cpu" if weight.device.type == "mps" else weight.device  # which has no fp64
        update = b.to(where, torch.float64) @ a.to(where, torch.float64)
        # In place, since the engine may have views of it.
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            weight.copy_(weight.to(where, torch.float64) + update)


def stack_factors(first: Factors, second: Factors) -> Factors:
    """One adapter that adds what both add: factors beside each other, of one rank everywhere (zeros fill up)."""
    ranks = [max(len(a) for a, _ in part.values()) for part in (first, second)]
    found: Factors = {}
    for path in {**first, **second}:
        own_a, own_b = first.get(path) or second[path]
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for part, rank in zip((first, second), ranks, strict=True):
            a, b = part.get(path, (own_a[:0], own_b[:, :0]))
            fill = rank - len(a)
            sides[0].append(torch.nn.functional.pad(a.cpu(), (0, 0, 0, fill)))
            sides[1].append(torch.nn.functional.pad(b.cpu(), (0, fill)))
        found[path] = (torch.cat(sides[0]).contiguous(), torch.cat(sides[1], dim=1).contiguous())
    return found


def _whose(path: str, family: Family) -> str:
    """'; it is an adapter for dream, this is llada' where the path is another family's."""
    for other in FAMILIES.values():
        layers = other.names.layers
        if layers != family.names.layers and path.startswith(f"{layers}."):
            return f"; it is an adapter for {other.name}, the model is {family.name}"
    return ""
