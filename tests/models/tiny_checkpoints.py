"""Tiny checkpoints and tokenizers with the file layout of the released ones, written where a test wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tad.models import DreamConfig, LLaDAConfig, MaskedDiffusionModel
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


def llada_config(**changes: Any) -> LLaDAConfig:
    values = {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 96,
        "vocab_size": ROWS,
        "embedding_size": ROWS,
        "max_sequence_length": 256,
        "mask_token_id": FIRST_SPECIAL + LLADA_SPECIAL.index("<|mdm_mask|>"),
        "eos_token_id": FIRST_SPECIAL + LLADA_SPECIAL.index("<|endoftext|>"),
        "pad_token_id": FIRST_SPECIAL + LLADA_SPECIAL.index("<|endoftext|>"),
    }
    return LLaDAConfig(**{**values, **changes})


def dream_config(**changes: Any) -> DreamConfig:
    end = FIRST_SPECIAL + DREAM_SPECIAL.index("<|endoftext|>")
    values = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": ROWS,
        "max_position_embeddings": 256,
        "mask_token_id": FIRST_SPECIAL + DREAM_SPECIAL.index("<|mask|>"),
        "eos_token_id": end,
        "pad_token_id": end,
        "bos_token_id": end,  # as released: not the tokenizer's begin token
    }
    return DreamConfig(**{**values, **changes})


CONFIGS = {"llada": llada_config, "dream": dream_config}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> MaskedDiffusionModel:
    """Random weights in fp32, scaled up so that logits differ visibly; biases and norms are not trivial."""
    model = build(CONFIGS[family](**changes), "cpu", torch.float32, seed)
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
    tiny_model(family, **changes).save_pretrained(folder, max_shard_size=shard)
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
