"""Files of a checkpoint or an adapter that may be a stranger's: JSON and safetensors headers, never the weights.

Files must be plain and of a sensible size; what cannot be read is refused in one line that names the file.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from tad.errors import TadError

TEXT_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
_LARGEST_TEXT = 64 * 2**20  # bytes of a JSON, vocabulary or template file; released ones have at most half
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
HEADER_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Stored:
    """One tensor as a safetensors header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def first_line(error: Exception) -> str:
    """What a library says went wrong, short and on one line."""
    return " ".join(str(error).split())[:300]


def check_files(folder: Path) -> None:
    """Refuse a directory with pipes, devices or texts too large to read; libraries would wait or fill the memory."""
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.exists() and not path.is_dir():
            check_file(path)


def check_file(path: Path) -> None:
    """Refuse what is not a plain file (links to one are), and texts too large to read."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise TadError(f"{path}: is not a plain file")
    if any(path.match(pattern) for pattern in TEXT_FILES) and about.st_size > _LARGEST_TEXT:
        raise TadError(f"{path}: has {about.st_size} bytes, more than {_LARGEST_TEXT}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that must be there."""
    try:
        check_file(path)
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TadError(f"{path}: missing") from None
    except (ValueError, RecursionError) as error:
        raise TadError(f"{path}: is not valid JSON ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise TadError(f"{path}: should hold a JSON object, holds a {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, whose header the library has held to the file's length."""
    check_file(path)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            found = {
                name: Stored(path, str(part.get_dtype()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise TadError(
            f"{path}: is truncated or no safetensors file ({first_line(error)}); copy or download it again"
        ) from None
    for name, tensor in found.items():
        if tensor.dtype not in HEADER_DTYPES:
            raise TadError(
                f"{path}: {name} is stored as {tensor.dtype}; only BF16, F16 and F32 are supported"
            )
    return found


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating dtype by name (bf16, fp16, fp32, or torch's own names) or as it is."""
    name = str(dtype).removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name not in _SHORT.values():
        raise TadError(f"dtype '{dtype}' is not supported; use bfloat16, float16 or float32")
    return cast(torch.dtype, getattr(torch, name))
