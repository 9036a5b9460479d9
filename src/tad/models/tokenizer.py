"""Text in and out: a checkpoint's tokenizer, loaded without remote code, and its chat format.

Both families' tokenizers are byte-level BPE. A directory with tokenizer.json is read as it is (LLaDA); one with
vocab.json and merges.txt is Qwen2's BPE with added tokens (Dream, whose custom class is that and nothing more).
"""

from __future__ import annotations

from typing import Any

from tad.errors import TadError
from tad.models.checkpoint import Checkpoint
from tad.models.family import Family

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}

ROLES = ("system", "user", "assistant")
FILES = "tokenizer.json, or vocab.json with merges.txt"


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The directory's tokenizer, None where it has none. Ids must fit the embedding, added tokens their ids."""
    folder = checkpoint.folder
    whole = (folder / "tokenizer.json").is_file()
    pieces = [name for name in ("vocab.json", "merges.txt") if (folder / name).is_file()]
    if not whole and not pieces:
        return None
    if not whole and len(pieces) == 1:
        missing = "merges.txt" if pieces == ["vocab.json"] else "vocab.json"
        raise TadError(f"{folder / missing}: missing, though {pieces[0]} is there; a tokenizer needs both")
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    settings = checkpoint.optional("tokenizer_config.json")
    try:
        tokenizer = (PreTrainedTokenizerFast if whole else Qwen2Tokenizer).from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        raise TadError(
            f"{folder}: its tokenizer cannot be read ({' '.join(str(error).split())[:200]})"
        ) from None
    for number, token in settings.get("added_tokens_decoder", {}).items():
        found = tokenizer.convert_tokens_to_ids(token["content"])
        if found != int(number):
            raise TadError(
                f"{folder / 'tokenizer_config.json'}: {token['content']} should be {number}, the vocabulary makes it {found}"
            )
    rows = checkpoint.config.shape.vocab
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if max(len(tokenizer), largest + 1) > rows:
        raise TadError(
            f"{folder}: the tokenizer has {max(len(tokenizer), largest + 1)} tokens, the model only {rows} rows;"
            " this tokenizer belongs to another model"
        )
    return tokenizer


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts BOS in front of a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def render_chat(tokenizer: Any, family: Family, messages: list[Message], prefix: str = "") -> str:
    """The conversation as text, up to and including the assistant's header (exactly once) and `prefix`."""
    _check(messages)
    from jinja2.exceptions import TemplateError

    own = tokenizer.chat_template
    template = (own.get("default") if isinstance(own, dict) else own) or family.chat_template
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise TadError(
            f"the chat template refuses this conversation: {' '.join(str(error).split())}"
        ) from None
    # Published templates differ in whether they heed add_generation_prompt; the header must stand there once.
    header = family.assistant_header
    while text.endswith(header + header):
        text = text.removesuffix(header)
    if not text.endswith(header) and header.split("assistant")[0] in text:
        text += header
    return str(text) + prefix


def encode_chat(tokenizer: Any, family: Family, messages: list[Message], prefix: str = "") -> list[int]:
    """Ids of `render_chat`. BOS stands first, once, if the template or the tokenizer puts it there."""
    ids = encode_text(tokenizer, render_chat(tokenizer, family, messages, prefix))
    if adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids.insert(0, tokenizer.bos_token_id)
    return ids


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text and nothing around it; special tokens written in the text are recognised."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TadError(
            f"the text holds {text[error.start]!r}, which is no character; was its source not UTF-8?"
        ) from None
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _check(messages: list[Message]) -> None:
    if not messages:
        raise TadError("the conversation is empty; give at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise TadError(f"message {number}: role should be one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise TadError(f"message {number}: content should be a string")
    if messages[-1]["role"] == "assistant":
        raise TadError("the conversation ends with the assistant; pass that text as prefix= to continue it")
