"""A checkpoint directory: whether it is whole, and what it says about itself.

Everything here reads JSON files and safetensors headers, never the weights, so that a bad directory is refused in a
second and in one line. A directory may be a stranger's: numbers are bounded and held to the headers before a network is
built, and of config.json only the family's own fields reach a library. Loading the weights is `tad.models.lm`'s business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tad.errors import TadError
from tad.models.conversion import FILE as CONVERSION
from tad.models.conversion import Conversion, is_conversion, read_conversion
from tad.models.family import Family, family_of
from tad.models.source import BUNDLED, locate
from tad.models.stored import (
    HEADER_DTYPES,
    Stored,
    check_files,
    first_line,
    parse_dtype,
    read_header,
    read_json,
)
from tad.models.transformer import MaskedDiffusionModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Fields of config.json that libraries act on, besides those of transformers' own config class. They stay in the file.
_DROPPED = {
    "attn_implementation",
    "experts_implementation",
    "auto_map",
    "use_kernels",
    "kernel_config",
    "device_map",
}
_KEPT = {"architectures", "rope_parameters", "dtype", "torch_dtype"}


def _own_fields(values: Mapping[str, Any], config_class: type[Any]) -> dict[str, Any]:
    """Of config.json, the fields that the family names and those no library knows."""
    from transformers import PreTrainedConfig

    classes = config_class.__mro__[: config_class.__mro__.index(PreTrainedConfig)]
    named = _KEPT.union(*(one.__annotations__ for one in classes))
    known = {*PreTrainedConfig.__annotations__, *dir(PreTrainedConfig), *_DROPPED}
    return {
        name: value
        for name, value in values.items()
        if name in named or not (name in known or name.startswith("_"))
    }


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose config.json has been read. `verify` checks the rest."""

    folder: Path
    values: dict[str, Any]  # config.json as it stands
    family: Family
    config: Any
    conversion: Conversion | None = None  # of a converted model: what it adds to this, its parent

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config.json; nothing else is looked at yet. Of a converted model the parent is opened, with its block size."""
        if is_conversion(folder):
            return cls._open_parent(read_conversion(folder))
        path = folder / "config.json"
        if not path.exists() and (folder / "adapter_config.json").exists():
            base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
            model = base if isinstance(base, str) and base.isprintable() and len(base) < 200 else "MODEL"
            name = folder.name if folder.parent == BUNDLED else folder
            raise TadError(
                f"{folder}: is an adapter, not a model; give its base and this as the adapter: {model} --adapter {name}"
            )
        check_files(folder)
        values = read_json(path)
        family = family_of(values.get("model_type"), str(path))
        if values.get("quantization_config") is not None:
            raise TadError(f"{path}: quantization_config is not supported; give the unquantized checkpoint")
        for name in ("dtype", "torch_dtype"):
            if not isinstance(values.get(name), str | None):
                raise TadError(f"{path}: {name} should be a name such as bfloat16")
        try:
            config = family.config_class.from_dict(_own_fields(values, family.config_class))
            config.shape  # noqa: B018 (checks its numbers)
        except TadError as error:
            raise TadError(f"{folder}/{error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TadError(f"{path}: {first_line(error)}") from None
        return cls(folder, values, family, config)

    @classmethod
    def _open_parent(cls, conversion: Conversion) -> Checkpoint:
        where = conversion.folder / CONVERSION
        try:
            found = locate(conversion.parent)
            parent = None if is_conversion(found) else cls.open(found)
        except TadError as error:
            raise TadError(
                f"{where}: its parent cannot be opened; if it has moved, correct 'parent' there ({error})"
            ) from None
        if parent is None or parent.family.name != conversion.family:
            raise TadError(f"{where}: its parent {conversion.parent} is not a {conversion.family} checkpoint")
        conversion.check_parent(parent.shards)
        return replace(
            parent.with_blocks(conversion.block_size, conversion.mask_token_id), conversion=conversion
        )

    def with_blocks(self, block: int, mask: int) -> Checkpoint:
        """An autoregressive checkpoint as a model that fills blocks of masks."""
        values = {**self.values, "block_size": block, "mask_token_id": mask}
        config = type(self.config).from_dict(
            {**self.config.to_dict(), "block_size": block, "mask_token_id": mask}
        )
        if mask >= config.shape.vocab:
            raise TadError(f"{self.folder}: mask token {mask} is outside of its {config.shape.vocab} rows")
        return replace(self, values=values, config=config)

    def optional(self, name: str) -> dict[str, Any]:
        """A JSON file of the directory, or nothing where it is absent."""
        path = self.folder / name
        return read_json(path) if path.exists() else {}

    @cached_property
    def shards(self) -> list[Path]:
        """The safetensors files, all present: of a whole file and an index the whole file, as transformers loads it."""
        single = self.folder / SINGLE
        if single.is_file():
            return [single]
        index = self.folder / INDEX
        if index.exists():
            names = self._weight_map().values()
            files = [self.folder / name for name in dict.fromkeys(sorted(names))]
            for file in files:
                if not file.is_file():
                    raise TadError(f"{file}: missing, though {INDEX} names it; copy or download it")
            return files
        if list(self.folder.glob("*.bin")) or list(self.folder.glob("*.pt")):
            raise TadError(f"{self.folder}: only pickled weights here; convert them to safetensors first")
        raise TadError(f"{self.folder}: no weights here (expected {SINGLE} or {INDEX})")

    def _weight_map(self) -> dict[str, str]:
        names = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
            for name in names.values()
        ):
            raise TadError(
                f"{self.folder / INDEX}: weight_map should map tensor names to .safetensors files next to it"
            )
        return names

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every stored tensor by name."""
        found: dict[str, Stored] = {}
        for file in self.shards:
            for name, stored in read_header(file).items():
                if name in found:
                    raise TadError(f"{file}: has {name}, which {found[name].file.name} has too")
                found[name] = stored
        if (self.folder / INDEX).exists() and not (self.folder / SINGLE).is_file():
            for name, file_name in self._weight_map().items():
                if name not in found or found[name].file.name != file_name:
                    raise TadError(f"{self.folder / INDEX}: says {name} is in {file_name}, but it is not")
        return found

    def on_meta(self) -> MaskedDiffusionModel:
        """The network the config implies, without memory."""
        with torch.device("meta"):
            return self.family.model_class(self.config)

    def verify(self) -> None:
        """Hold the stored tensors to the config: same names, same shapes."""
        stored, names = self.tensors, self.family.names
        start, layers = f"{names.layers}.", self.config.shape.layers
        found = len({name.removeprefix(start).split(".")[0] for name in stored if name.startswith(start)})
        if found != layers:  # checked before a network of that many is built, as are experts
            raise TadError(f"{self.folder / 'config.json'}: has {layers} layers, the weights have {found}")
        experts = self.config.shape.experts
        if experts is not None and experts.num_experts * (layers - experts.first_k_dense_replace) > len(
            stored
        ):
            raise TadError(
                f"{self.folder / 'config.json'}: has {experts.num_experts} experts, more than the weights have"
            )
        wanted = {name: tuple(value.shape) for name, value in self.on_meta().state_dict().items()}
        for name, shape in wanted.items():
            if name not in stored:
                raise TadError(f"{self.folder}: {name} is missing from the weights (config.json implies it)")
            if stored[name].shape != shape:
                raise TadError(
                    f"{stored[name].file}: {name} has shape {list(stored[name].shape)}, config.json implies {list(shape)}"
                )
        for name in stored.keys() - wanted.keys():
            if name == f"{self.family.names.head}.weight" and self._head_repeats_embedding(stored):
                continue
            raise TadError(f"{stored[name].file}: {name} is not part of the network config.json describes")

    def _head_repeats_embedding(self, stored: Mapping[str, Stored]) -> bool:
        """Some tied checkpoints also store the head; that is fine as long as it is the embedding."""

        def read(name: str) -> torch.Tensor:
            with safe_open(stored[name].file, "pt") as file:
                return file.get_tensor(name)

        names = self.family.names
        return torch.equal(read(f"{names.head}.weight"), read(f"{names.embed}.weight"))

    @property
    def declared_dtype(self) -> torch.dtype | None:
        """What config.json says, under its new name or its old one."""
        declared = self.values.get("dtype") or self.values.get("torch_dtype")
        return parse_dtype(str(declared)) if declared else None

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's own: what config.json says, else what most of its numbers are stored in."""
        declared = self.declared_dtype
        if declared is not None:
            return declared
        sizes = Counter[str]()
        for stored in self.tensors.values():
            sizes[stored.dtype] += math.prod(stored.shape)
        return HEADER_DTYPES[sizes.most_common(1)[0][0]]
