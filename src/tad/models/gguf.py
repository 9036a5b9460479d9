"""GGUF files (llama.cpp's) as checkpoints: read once through transformers' reader, kept as a checkpoint directory from then on.

`unpack` writes the weights in fp32, since they are what the quantized numbers stand for, with config and tokenizer, to the
cache directory of this package (`TAD_CACHE`, by default `~/.cache/tad`). All that follows treats the result as any directory: it is
verified, described, converted and exported in the same way. Files in several parts, and those of other architectures than the
autoregressive families, are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import torch

from tad.errors import MissingExtraError, TadError
from tad.files import grant_usual_modes
from tad.models.family import AUTOREGRESSIVE, FAMILIES
from tad.models.stored import check_file, first_line

_FORMAT = 1  # of what is written; another number is another directory
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {"qwen2": _QWEN_WORDS % 1, "llama-bpe": _QWEN_WORDS % 3, "smollm": None, "default": "", "gpt-2": ""}
# How a text is cut before byte pairs are merged, by `tokenizer.ggml.pre`: a pattern, None for single digits, "" for GPT-2's.


def unpack(path: Path) -> Path:
    """The directory of a GGUF file's contents, made where it is not there yet."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtraError(f"{path}: the package gguf, which reads such files,", "gguf") from None
    check_file(path)
    about = path.stat()
    name = f"{about.st_size} {_hash_pieces(path)} {_FORMAT}"
    cache = Path(os.environ.get("TAD_CACHE") or "~/.cache/tad").expanduser() / "gguf"
    target = cache / f"{path.stem[:80]}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
    if (target / "config.json").is_file():
        return target
    try:
        return _write(path, target)
    except TadError:
        raise
    except NotImplementedError as error:  # the reader's word for a type of numbers it does not know
        raise TadError(f"{path}: {first_line(error)}") from None
    except (ValueError, KeyError, IndexError, TypeError, OSError, OverflowError, AttributeError) as error:
        raise TadError(
            f"{path}: is truncated or no GGUF file ({type(error).__name__}: {first_line(error)}); copy or download it again"
        ) from None


def _hash_pieces(path: Path) -> str:
    digest, size = hashlib.blake2b(digest_size=8), path.stat().st_size
    with path.open("rb") as file:
        for piece in range(64):
            file.seek(max(0, size - 65536) * piece // 63)
            digest.update(file.read(65536))
    return digest.hexdigest()


def _write(path: Path, target: Path) -> Path:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    reader = GGUFReader(path)

    def text(key: str) -> str:
        field = reader.get_field(key)
        return "" if field is None else str(field.contents())

    architecture = text("general.architecture")
    known = {family.model_type for family in AUTOREGRESSIVE}
    if architecture not in known:
        raise TadError(
            f"{path}: architecture {architecture[:40]!r} is not supported; known: {', '.join(sorted(known))}"
        )
    for key, fits in (("rope.scaling.type", ("", "none")), ("attention.sliding_window", ("", "0"))):
        if text(f"{architecture}.{key}") not in fits:
            raise TadError(
                f"{path}: {key} {text(f'{architecture}.{key}')[:40]!r} is not supported; only models without it are"
            )
    if text("split.count") not in ("", "0", "1"):
        raise TadError(f"{path}: is one of several parts; join them first (llama-gguf-split --merge)")
    size = 4 * sum(int(math.prod(int(side) for side in one.shape)) for one in reader.tensors)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TadError(f"{target.parent}: cannot be made ({first_line(error)}); set TAD_CACHE") from None
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise TadError(f"{target}: needs {size / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB left")
    print(f"{path}: unpacking to {target} ({size / 1e9:.1f} GB, once)", file=sys.stderr)
    config = {
        name: value
        for name, value in load_gguf_checkpoint(str(path))["config"].items()
        if not name.startswith("_")
    }
    family = FAMILIES.get(str(config.get("model_type")))
    if family not in AUTOREGRESSIVE:
        raise TadError(f"{path}: is a {str(config.get('model_type'))[:40]!r} model, which is not supported")
    scaling = _rope_scaling(path, reader, config)
    head_dim = reader.get_field(f"{architecture}.attention.key_length")
    if head_dim is not None:
        config["head_dim"] = int(head_dim.contents())
    config |= {"architectures": [family.model_class.__name__], "dtype": "float32", **scaling}
    config = {name: value for name, value in config.items() if value is not None}
    try:
        made = family.config_class.from_dict(config)
        layers = made.shape.layers
    except TadError as error:
        raise TadError(f"{path}: {str(error).removeprefix('config.json: ')}") from None
    if layers > len(reader.tensors):  # checked before a network of that many is built
        raise TadError(f"{path}: says {layers} layers and has {len(reader.tensors)} tensors")
    with torch.device("meta"):
        empty = family.model_class(made)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        fresh.mkdir()
        save_file(
            {name: weight.float().contiguous() for name, weight in weights.items()},
            fresh / "model.safetensors",
            metadata={"format": "pt"},
        )
        _write_tokenizer(path, fresh, text("tokenizer.ggml.model"), text("tokenizer.ggml.pre"))
        (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        grant_usual_modes(fresh)
        if not target.exists():  # else another process was faster
            fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _rope_scaling(path: Path, reader: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's and 3.2's scaled positions, which GGUF stores as the divisors that they come to."""
    found = next((one for one in reader.tensors if one.name == "rope_freqs.weight"), None)
    if found is None:
        return {}
    from tad.models.layers import stretch
    from tad.models.shape import RopeScaling

    divisors = torch.tensor(found.data.astype("float32")).flatten()
    theta = float(config.get("rope_theta", 10000.0))
    frequency = theta ** -(torch.arange(len(divisors)) / len(divisors))
    for factor in (8.0, 32.0):  # as released
        scaling = RopeScaling(factor, 1.0, 4.0, 8192)
        if torch.allclose(frequency / stretch(frequency, scaling), divisors, rtol=1e-3):
            values = {name: getattr(scaling, name) for name in scaling.__dataclass_fields__}
            return {"rope_parameters": {"rope_type": "llama3", "rope_theta": theta, **values}}
    raise TadError(
        f"{path}: rope_freqs.weight has scaled positions of an unknown kind; give the safetensors checkpoint"
    )


def _write_tokenizer(path: Path, folder: Path, model: str, pre: str) -> None:
    from tokenizers import Regex, pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (
        Exception
    ) as error:  # the tokenizers library raises bare Exception for one that does not fit together
        raise TadError(f"{path}: its tokenizer cannot be read ({first_line(error)})") from None
    if model == "gpt2":
        if pre not in _WORDS:
            raise TadError(
                f"{path}: tokenizer.ggml.pre '{pre[:40]}' is not known ({', '.join(_WORDS)} are); give the safetensors checkpoint"
            )
        words = _WORDS[pre]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        if words:
            first = pre_tokenizers.Split(Regex(words), "isolated")
        tokenizer.backend_tokenizer.pre_tokenizer = (
            last if words == "" else pre_tokenizers.Sequence([first, last])
        )
        if pre == "llama-bpe":
            tokenizer.backend_tokenizer.model.ignore_merges = True
    tokenizer.save_pretrained(folder)
