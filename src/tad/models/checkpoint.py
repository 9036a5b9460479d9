"""A checkpoint directory: where it is, whether it is whole, and what it says about itself.

Everything here reads JSON files and safetensors headers, never the weights, so that a bad directory is refused in a
second and in one line. Loading the weights is `tad.models.lm`'s business.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tad.errors import TadError
from tad.models.family import Family, family_of
from tad.models.transformer import MaskedDiffusionModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}
HEADER_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Stored:
    """One tensor as a safetensors header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


BUNDLED = Path(__file__).parents[1] / "bundled"


def bundled_models() -> list[str]:
    """The small models that come with this package."""
    return sorted(path.name for path in BUNDLED.glob("*") if (path / "config.json").is_file())


def bundled_adapters() -> list[str]:
    """The students of those models that come with this package."""
    return sorted(path.name for path in BUNDLED.glob("*") if (path / "adapter_config.json").is_file())


def locate(source: str | Path, revision: str | None = None, weights: bool = True, code: bool = False) -> Path:
    """The directory of a checkpoint or an adapter: as given, bundled with this package, or downloaded from the Hugging Face hub.

    Pickled weights are never fetched. `code` also fetches the repository's Python files, which an export copies and
    nothing here runs.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise TadError(f"{source}: is a file; give the directory that holds config.json")
    name = str(source)
    bundled = [*bundled_models(), *bundled_adapters()]
    if name in bundled:
        return BUNDLED / name
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TadError(f"{source}: no such directory (bundled: {', '.join(bundled)})")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*TEXT_FILES, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        raise TadError(f"{source}: no such directory, and the Hugging Face hub cannot be reached") from None
    except HFValidationError:
        raise TadError(f"{source}: no such directory, and not a hub id of the form owner/name") from None
    except HfHubHTTPError as error:
        at = f" at revision '{revision}'" if revision else ""
        raise TadError(
            f"{source}{at}: no such directory, and the hub answered: {_first_line(error)}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that must be there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TadError(f"{path}: missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TadError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise TadError(f"{path}: should hold a JSON object, holds a {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file; the file must be as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise TadError(f"{path}: is truncated or not a safetensors file; copy or download it again")
        try:
            entries = json.loads(file.read(length))
            tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            stored = {
                name: Stored(path, entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise TadError(
                f"{path}: its safetensors header cannot be read; copy or download it again"
            ) from None
    if 8 + length + end != size:
        raise TadError(
            f"{path}: is truncated ({size} bytes, its header says {8 + length + end}); copy or download it again"
        )
    return stored


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating dtype by name (bf16, fp16, fp32, or torch's own names) or as it is."""
    if isinstance(dtype, torch.dtype):
        if dtype in DTYPES.values():
            return dtype
        raise TadError(f"dtype {dtype} is not supported; use bfloat16, float16 or float32")
    found = DTYPES.get(str(dtype).removeprefix("torch.").lower())
    if found is None:
        raise TadError(f"dtype '{dtype}' is not supported; use bfloat16, float16 or float32")
    return found


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose config.json has been read. `verify` checks the rest."""

    folder: Path
    values: dict[str, Any]  # config.json as it stands
    family: Family
    config: Any

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config.json; nothing else is looked at yet."""
        path = folder / "config.json"
        if not path.exists() and (folder / "adapter_config.json").exists():
            raise TadError(
                f"{folder}: is an adapter, not a model; load its base model and pass this as the adapter"
            )
        values = read_json(path)
        family = family_of(values.get("model_type"), str(path))
        try:
            config = family.config_class.from_dict(dict(values))
            shape = config.shape
        except TadError as error:
            raise TadError(f"{folder}: {error}") from None
        except (TypeError, ValueError) as error:
            raise TadError(f"{path}: {_first_line(error)}") from None
        for field in ("width", "layers", "heads", "kv_heads", "head_dim", "mlp", "vocab", "context"):
            value = getattr(shape, field)
            if not isinstance(value, int) or value < 1:
                raise TadError(f"{path}: {field} should be a positive integer, is {value!r}")
        if shape.heads % shape.kv_heads or shape.head_dim % 2:
            raise TadError(
                f"{path}: {shape.heads} heads of {shape.head_dim} and {shape.kv_heads} key heads do not fit together"
            )
        return cls(folder, values, family, config)

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
            isinstance(name, str) and Path(name).name == name for name in names.values()
        ):
            raise TadError(f"{self.folder / INDEX}: weight_map should map tensor names to files next to it")
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
        wanted = {name: tuple(value.shape) for name, value in self.on_meta().state_dict().items()}
        stored = self.tensors
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
        from safetensors import safe_open

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
        sizes: dict[str, int] = {}
        for stored in self.tensors.values():
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + _count(stored.shape)
        most = max(sizes, key=lambda name: sizes[name])
        if most not in HEADER_DTYPES:
            raise TadError(
                f"{self.folder}: weights are stored as {most}; only BF16, F16 and F32 are supported"
            )
        return HEADER_DTYPES[most]


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
