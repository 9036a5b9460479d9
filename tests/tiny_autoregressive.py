"""Tiny autoregressive checkpoints, written by the classes of transformers: the layout of the released ones, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, CONTEXT = 264, 256
BEGIN, END, FREE, TURN = 256, 257, 258, 259  # `FREE` is a special token that nobody uses: a mask's place
SPECIAL = ["<|begin|>", "<|endoftext|>", "<|free|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}


def hf_model(kind: str, seed: int = 0, scale: float = 8.0, **changes: Any) -> Any:
    """The model of transformers. `scale` multiplies the matrices, so that greedy decoding does not repeat one token."""
    config_class, model_class, own = KINDS[kind]
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": CONTEXT,
        "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": END,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **own, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
            else:
                weight.add_(0.1 * torch.randn(weight.shape))
    return model


def write_autoregressive(
    folder: Path,
    kind: str = "qwen2",
    seed: int = 0,
    block_size: int | None = None,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """A directory as transformers writes it; with `block_size`, the one of a converted model of these weights."""
    hf_model(kind, seed, **changes).save_pretrained(folder)
    if block_size is not None:
        edit(folder / "config.json", block_size=block_size, mask_token_id=FREE)
    if tokenizer:
        _write_tokenizer(folder)
    return folder


def edit(path: Path, **values: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[1],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
