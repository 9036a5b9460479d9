"""Write a standard checkpoint: adapter merged, the original key names, config, tokenizer and code files.

The directory appears complete or not at all: everything is written to a sibling first and renamed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tad.errors import TadError
from tad.files import grant_usual_modes
from tad.models.checkpoint import Checkpoint
from tad.models.conversion import is_conversion, read_conversion
from tad.models.defaults import write_defaults
from tad.models.lm import load
from tad.models.source import locate
from tad.models.stored import HEADER_DTYPES, parse_dtype

_COMPANIONS = ("*.json", "*.txt", "*.jinja", "*.model", "*.py", "LICENSE*")
_NOT_COMPANIONS = (
    "config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "adapter_config.json",
)


def export(
    source: str | Path,
    out: str | Path,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    device: str | torch.device = "cpu",
    revision: str | None = None,
) -> Path:
    """Load, merge, write; returns the new directory. Other tools that know the family load it as the original."""
    if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", max_shard_size, flags=re.IGNORECASE):
        raise TadError(f"max shard size '{max_shard_size}' should be a number with a unit, such as 5GB")
    target = Path(out).expanduser().resolve()
    folder = locate(source, revision, code=True)
    if is_conversion(folder):
        raise TadError(
            f"{folder}: its adapter acts on masks only, so there are no merged weights to write; without it the model is its "
            f"parent, {read_conversion(folder).parent}. A checkpoint of its own is made by `tad convert --how all`"
        )
    _check_target(target, folder.resolve(), overwrite)
    lm = load(folder, adapter=adapter, dtype=dtype, device=device)
    model = lm.model if lm.peft is None else lm.peft.merge_and_unload()
    checkpoint = Checkpoint.open(folder)
    for name, buffer in model.named_buffers():  # a router's bias stays in the dtype it was stored in
        buffer.data = buffer.to(HEADER_DTYPES[checkpoint.tensors[name].dtype])
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    with _directory(target, size, overwrite) as fresh:
        model.save_pretrained(fresh, max_shard_size=max_shard_size)
        copy_companions(folder, fresh)
        if adapter is not None:
            write_defaults(fresh, **asdict(lm.defaults))
        (fresh / "config.json").write_text(_config_text(checkpoint, model.dtype), encoding="utf-8")
    return target


def _check_target(target: Path, source: Path, overwrite: bool) -> None:
    if target == source or target in source.parents or source in target.parents:
        raise TadError(f"{target}: overlaps the source directory; choose another --out")
    if target.exists() and not target.is_dir():
        raise TadError(f"{target}: is a file; choose another --out")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise TadError(f"{target}: is not empty; choose another --out or pass --overwrite")


@contextmanager
def _directory(target: Path, size: int, overwrite: bool) -> Iterator[Path]:
    """A sibling directory to write to, which takes the target's place on success and is removed on failure."""
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise TadError(f"{target}: needs {size / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB left")
        fresh.mkdir()
        yield fresh
        grant_usual_modes(fresh)
        _replace(target, fresh, overwrite)
    except (OSError, SafetensorError) as error:
        raise TadError(f"{target}: cannot be written ({' '.join(str(error).split())})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _replace(target: Path, fresh: Path, overwrite: bool) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    if not overwrite:
        target.rmdir()  # it was empty when we began; if it no longer is, this fails and nothing is lost
        fresh.rename(target)
        return
    old = fresh.with_suffix(".old")
    target.rename(old)
    os.rename(fresh, target)
    shutil.rmtree(old)


def copy_companions(source: Path, target: Path) -> None:
    """What travels with the weights: tokenizer and generation files, and the Python files that auto_map names."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in _NOT_COMPANIONS:
                shutil.copyfile(file, target / file.name)


def _config_text(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """The source's config.json with the dtype now stored, under the name old tools read and the one new ones do."""
    name = str(parse_dtype(dtype)).removeprefix("torch.")
    values: dict[str, Any] = {**checkpoint.values, "torch_dtype": name, "dtype": name}
    return json.dumps(values, indent=2, sort_keys=True) + "\n"
