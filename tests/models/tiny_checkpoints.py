"""Tiny checkpoints and tokenizers with the file layout of the released ones, written where a test wants them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import tad
from tad.models import DreamConfig, LLaDAConfig, MaskedDiffusionModel, family_of
from tad.models.sdar import SDARMoeConfig
from tad.models.shapes import build

ROWS = 320
LLADA_SPECIAL = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|mdm_mask|>",
]
DREAM_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
MERGES = [("h", "e"), ("l", "l"), ("Ġ", "w")]


def base_vocabulary() -> dict[str, int]:
    """The 256 bytes and a few merges: ids 0 to 258."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    return vocabulary


FIRST_SPECIAL = 256 + len(MERGES)


def _ids(special: list[str], mask: str) -> dict[str, int]:
    mask_id, end = (FIRST_SPECIAL + special.index(text) for text in (mask, "<|endoftext|>"))
    return {"mask_token_id": mask_id, "eos_token_id": end, "pad_token_id": end}


SIZES = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 96, "vocab": ROWS, "context": 256}
_DREAM_IDS = _ids(DREAM_SPECIAL, "<|mask|>")
CONFIGS: dict[str, tuple[Any, dict[str, int]]] = {  # class, and what differs from SIZES
    "llada": (LLaDAConfig, {"kv_heads": 4, **_ids(LLADA_SPECIAL, "<|mdm_mask|>")}),
    # as released, BOS is not the tokenizer's begin token
    "dream": (DreamConfig, {**_DREAM_IDS, "bos_token_id": _DREAM_IDS["eos_token_id"]}),
    "sdar_moe": (
        SDARMoeConfig,
        {"width": 32, "head_dim": 16, "mlp": 48, "moe_intermediate_size": 24, "num_experts": 6,
         "num_experts_per_tok": 2, "block_size": 4, "mask_token_id": 313, "eos_token_id": 305, "pad_token_id": 305},
    ),
}  # fmt: skip
# Folders of the parity set, and what their small vocabularies cannot take from the families' defaults.
GOLDEN = Path(__file__).parents[1] / "golden" / "data"
RELEASED: dict[str, dict[str, Any]] = {
    "fastdllm_v2": {"mask_token_id": 311},
    "sdar": {},
    "llada2": {"mask_token_id": 295, "eos_token_id": 292},
}
_KEPT: list[TemporaryDirectory[str]] = []
BLOCK_FAMILIES = (*RELEASED, "sdar_moe")
ALL = ("llada", "dream", *BLOCK_FAMILIES)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> MaskedDiffusionModel:
    """fp32 weights of the parity set, or random ones, scaled up so that logits differ visibly; biases and norms are not trivial."""
    if family in RELEASED:
        folder = GOLDEN / family / "checkpoint"
        declared = json.loads((folder / "config.json").read_text())["model_type"]
        model_class = family_of(declared).model_class
        return model_class.from_pretrained(folder, dtype="float32", attn_implementation="sdpa").eval()
    config_class, values = CONFIGS[family]
    config = config_class.from_sizes(**{**SIZES, **values})
    for field, value in changes.items():
        setattr(config, field, value)
    model = build(config, "cpu", torch.float32, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() > 1 else 1.0)
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def write_checkpoint(
    folder: Path, family: str, tokenizer: bool = False, shard: str = "5GB", **changes: Any
) -> Path:
    """A whole directory; config.json carries the released fields `auto_map` and `torch_dtype`."""
    if family in RELEASED:
        shutil.copytree(GOLDEN / family / "checkpoint", folder)
        edit_json(folder / "config.json", **{**RELEASED[family], **changes})
        return folder
    shutil.copytree(_made(family, tokenizer, shard, tuple(changes.items())), folder, dirs_exist_ok=True)
    return folder


@cache
def _made(family: str, tokenizer: bool, shard: str, changes: tuple[tuple[str, Any], ...]) -> Path:
    """The same directory, once for all tests that want a copy of it."""
    _KEPT.append(TemporaryDirectory())
    folder = Path(_KEPT[-1].name)
    tiny_model(family, **dict(changes)).save_pretrained(folder, max_shard_size=shard)
    if family == "sdar_moe":
        edit_json(folder / "config.json", torch_dtype="float32", dtype=None)
        return folder
    code, prefix = ("llada", "LLaDA") if family == "llada" else ("dream", "Dream")
    architecture = "LLaDAModelLM" if family == "llada" else "DreamModel"
    edit_json(
        folder / "config.json",
        auto_map={
            "AutoConfig": f"configuration_{code}.{prefix}Config",
            "AutoModel": f"modeling_{code}.{architecture}",
            "AutoModelForCausalLM": f"modeling_{code}.{architecture}",
        },
        torch_dtype="float32",
        dtype=None,
    )
    if tokenizer:
        write_tokenizer(folder, family)
    return folder


def write_adapter(base: Path, folder: Path, rank: int = 4, seed: int = 3) -> Path:
    """An adapter of a checkpoint that does something; fresh ones are zero."""
    lm = tad.load(base)
    torch.manual_seed(seed)
    lm.attach(rank=rank)
    randomise(lm.model, seed)
    lm.peft.save_pretrained(folder)
    return folder


def randomise(model: MaskedDiffusionModel, seed: int = 3) -> None:
    """Make an attached adapter do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.1, generator=generator)


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def write_tokenizer(folder: Path, family: str, **settings: Any) -> None:
    (write_llada_tokenizer if family == "llada" else write_dream_tokenizer)(folder, **settings)


def write_llada_tokenizer(folder: Path, adds_bos: bool = False, chat_template: str | None = None) -> None:
    """tokenizer.json, read by the generic fast class."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=base_vocabulary(), merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in LLADA_SPECIAL])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", FIRST_SPECIAL)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_dream_tokenizer(
    folder: Path,
    special: list[str] | None = None,
    bos: str = "<|beginoftext|>",
    pad: str = "<|endoftext|>",
    mask: str = "<|mask|>",
) -> None:
    """vocab.json, merges.txt and a tokenizer_config.json that names a custom class in remote code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(base_vocabulary()))
    merges = "\n".join(" ".join(pair) for pair in MERGES)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {
            str(FIRST_SPECIAL + offset): {"content": text, **flags}
            for offset, text in enumerate(special or DREAM_SPECIAL)
        },
        "additional_special_tokens": [bos, mask],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": bos,
        "eos_token": "<|endoftext|>",
        "pad_token": pad,
        "mask_token": mask,
        "unk_token": None,
        "add_bos_token": False,
        "errors": "replace",
        "tokenizer_class": "DreamTokenizer",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
