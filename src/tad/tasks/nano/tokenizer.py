"""The tokenizer of the nano world, in Hugging Face files: words, single digits and code symbols, with bytes underneath.

A token is one piece of `PIECES`: a word with the space before it, a digit, a symbol, a line break with its
indentation. Pieces outside the vocabulary fall apart into bytes, so any text survives encode and decode unchanged.
Families differ only in the names of the special tokens and in the chat template.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tad.errors import TadError
from tad.models.family import DREAM, FAST_DLLM_V2, LLADA, Family

PIECES = (
    r"\n\n|\n *"
    r"| ?[A-Za-z_]+"
    r"| ?[0-9]"
    r'| ?(?:####|"""|\*\*|//|==|!=|<=|>=|\.\.\.|\\boxed\{|\[::-1\])'
    r"| ?[^\sA-Za-z0-9_]"
    r"|\s"
)

# Special tokens in id order; the roles a config names are found by the text.
_SPECIAL = {
    LLADA.name: (
        "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    ),
    DREAM.name: ("<|beginoftext|>", "<|endoftext|>", "<|mask|>", "<|im_end|>", "<|im_start|>"),
    FAST_DLLM_V2.name: ("<|beginoftext|>", "<|endoftext|>", "|<MASK>|", "<|im_end|>", "<|im_start|>"),
}  # fmt: skip


def _special(family: Family) -> tuple[str, ...]:
    if family.name not in _SPECIAL:
        raise TadError(f"model.family: no nano tokenizer for {family.name}; use {', '.join(_SPECIAL)}")
    return _SPECIAL[family.name]


def vocabulary() -> list[str]:
    """The pieces that are single tokens, in id order."""
    text = files("tad.tasks.nano").joinpath("vocabulary.txt").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def pieces(text: str) -> list[str]:
    """A text cut as the tokenizer cuts it, before unknown pieces fall apart into bytes."""
    return re.findall(PIECES, text)


def build_tokenizer(family: Family) -> Tokenizer:
    """The tokenizer with a family's special tokens."""
    special = _special(family)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [to_bytes.pre_tokenize_str(piece)[0][0] for piece in vocabulary()]
    tokens = [*special, *words, *sorted(set(alphabet) - set(words))]
    tokenizer = Tokenizer(
        BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return tokenizer


def special_ids(family: Family) -> dict[str, int]:
    """Ids as a config.json names them: bos, eos, pad and mask; `eot` ends a turn."""
    special = _special(family)
    eos = special.index("<|endoftext|>")
    return {
        "bos_token_id": 0,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "mask_token_id": special.index(family.mask_text),
        "eot_token_id": special.index(family.end_of_turn_text),
    }


def save_tokenizer(family: Family, directory: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as a released checkpoint has them."""
    special = _special(family)
    ids = special_ids(family)
    build_tokenizer(family).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": special[ids["eos_token_id"]],
        "pad_token": special[ids["pad_token_id"]],
        "mask_token": family.mask_text,
        "additional_special_tokens": [family.end_of_turn_text],
        "chat_template": family.chat_template,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": context,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
