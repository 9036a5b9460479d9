"""Text in and out: a checkpoint's tokenizer, loaded without remote code, and its chat format.

Both families' tokenizers are byte-level BPE. A directory with tokenizer.json is read as it is (LLaDA); one with
vocab.json and merges.txt is Qwen2's BPE with added tokens (Dream, whose custom class is that and nothing more).

Text is never a control token: what a user, a question or a reference writes becomes the ids of its letters, even where it
reads `<|eot_id|>`. Only the chat template's own markers become control tokens, and text that is encoded with `allow_special`.
"""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from typing import Any, cast

from tad.errors import TadError
from tad.models.checkpoint import Checkpoint
from tad.models.family import FAMILIES, Family
from tad.models.template import render, render_here

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}

ROLES = ("system", "user", "assistant")
LONGEST_TOKEN = 1000
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
    _check_settings(checkpoint, settings)
    try:
        tokenizer = (PreTrainedTokenizerFast if whole else Qwen2Tokenizer).from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        raise TadError(
            f"{folder}: its tokenizer cannot be read ({' '.join(str(error).split())[:200]})"
        ) from None
    where = folder / "tokenizer_config.json"
    try:
        added = {int(n): str(one["content"]) for n, one in settings.get("added_tokens_decoder", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TadError(f"{where}: added_tokens_decoder should map ids to tokens") from None
    for number, text in added.items():
        found = tokenizer.convert_tokens_to_ids(text)
        if found != number:
            raise TadError(f"{where}: {text} should be {number}, the vocabulary makes it {found}")
    longest = max(map(len, tokenizer.get_added_vocab()), default=0)
    if longest > LONGEST_TOKEN:
        raise TadError(
            f"{folder}: an added token has {longest} characters; a control token has at most {LONGEST_TOKEN}"
        )
    rows = checkpoint.config.shape.vocab
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if max(len(tokenizer), largest + 1) > rows:
        raise TadError(
            f"{folder}: the tokenizer has {max(len(tokenizer), largest + 1)} tokens, the model only {rows} rows;"
            " this tokenizer belongs to another model"
        )
    return tokenizer


def _check_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """What transformers takes as it stands: lengths that are numbers, control tokens that are short texts."""
    where = checkpoint.folder / "tokenizer_config.json"
    length = settings.get("model_max_length")
    if not isinstance(length, int | float | None):
        raise TadError(f"{where}: model_max_length should be a number")
    others = checkpoint.folder / "special_tokens_map.json"
    for path, values in ((where, settings), (others, checkpoint.optional(others.name))):
        for name, token in values.items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str) and len(text) > LONGEST_TOKEN:
                raise TadError(
                    f"{path}: {name} has {len(text)} characters; a control token has at most {LONGEST_TOKEN}"
                )


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts BOS in front of a text."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def render_chat(tokenizer: Any, family: Family, messages: list[Message], prefix: str = "") -> str:
    """The conversation as text, up to and including the assistant's header (exactly once) and `prefix`.

    Control tokens written in the contents or in `prefix` are escaped (`escape_control`); `encode_rendered` gives the ids.
    """
    _check(messages)
    own = tokenizer.chat_template
    template = (own.get("default") if isinstance(own, dict) else own) or family.chat_template
    if not template:
        raise TadError(
            "no chat template: this checkpoint's tokenizer_config.json has none, as a base model's; give an instruct model, or put"
            " chat_template there"
        )
    if not isinstance(template, str):
        raise TadError("tokenizer_config.json: chat_template should be a string")
    values = {
        **tokenizer.special_tokens_map,
        "messages": [{**m, "content": escape_control(tokenizer, m["content"])} for m in messages],
        "add_generation_prompt": True,
    }
    ours = template in (other.chat_template for other in FAMILIES.values())
    text = (render_here if ours else render)(template, values)
    # Published templates differ in whether they heed add_generation_prompt; the header must stand there once.
    header = family.assistant_header
    while header and text.endswith(header + header):
        text = text.removesuffix(header)
    if header and not text.endswith(header) and header.split("assistant")[0] in text:
        text += header
    return text + escape_control(tokenizer, prefix)


def encode_chat(tokenizer: Any, family: Family, messages: list[Message], prefix: str = "") -> list[int]:
    """Ids of `render_chat`. BOS stands first, once, if the template or the tokenizer puts it there."""
    ids = encode_rendered(tokenizer, render_chat(tokenizer, family, messages, prefix))
    if adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids.insert(0, tokenizer.bos_token_id)
    return ids


def encode_text(tokenizer: Any, text: str, allow_special: bool = False) -> list[int]:
    """Ids of a text and nothing around it. Control tokens written in it are text, or with `allow_special` control tokens."""
    _check_unicode(text)
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    control = _control_of(tokenizer)
    return ids if allow_special or control.ids.isdisjoint(ids) else control.encode_plain(text)


# A noncharacter that breaks control tokens apart in rendered text. A mark that belongs to the text is written twice.
_MARK = "\U0010ffff"


def escape_control(tokenizer: Any, content: str) -> str:
    """The content with a mark inside everything in it that the tokenizer takes for a control token.

    Text without any comes back as it is: templates trim and inspect contents, and must see them. A control token's
    beginning at the end is marked too, since the template may continue it.
    """
    _check_unicode(content)
    control = _control_of(tokenizer)
    text = content.replace(_MARK, _MARK + _MARK)
    for _ in range(control.longest + 2):  # a mark may uncover a control token that overlaps
        spans = control.find(text)
        if not spans:
            break
        for start, end in reversed(spans):
            cut = (
                end - len(text[start:end].lstrip()) + 1
            )  # behind the first character: trimming stays possible
            text = text[:cut] + _MARK + text[cut:]
    else:
        raise TadError("the tokenizer's normalizer brings control tokens back into text; it cannot be used")
    stripped = text.rstrip()
    for length in range(1, min(control.longest, len(stripped)) + 1):
        cut = len(stripped) - length
        if stripped[cut:] in control.beginnings:
            text = text[: cut + 1] + _MARK + text[cut + 1 :]
    return text


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text: control tokens are recognised, except where `escape_control` marked them."""
    if _MARK not in text:
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    control = _control_of(tokenizer)
    found, start = [], 0
    for low, high in [*control.find(text), (len(text), len(text))]:
        between = _MARKED.sub(r"\1", text[start:low])
        found += encode_text(tokenizer, between)
        found += tokenizer(text[low:high], add_special_tokens=False).input_ids
        start = high
    return found


_MARKED = re.compile(f"{_MARK}({_MARK}?)")


class _Control:
    """The control tokens of a tokenizer: all it adds to its model's vocabulary, special or not, but for white space."""

    def __init__(self, tokenizer: Any) -> None:
        added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
        self.ids = frozenset(added)
        self.beginnings = frozenset(text[:n] for text in added.values() for n in range(1, len(text)))
        self.longest = max((len(text) for text in added.values()), default=1) - 1
        self.tokenizer = tokenizer

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where the tokenizer sees control tokens, from left to right."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(found.input_ids, found.offset_mapping, strict=True)
        return [tuple(span) for number, span in pairs if number in self.ids]

    def encode_plain(self, text: str) -> list[int]:
        """Ids without any control token."""
        plain, kept = self._plain
        ids = [kept.get(number, number) for number in plain.encode(text, add_special_tokens=False).ids]
        if not self.ids.isdisjoint(ids):
            raise TadError(
                "the tokenizer has no way to write a control token as text: its model knows it too"
            )
        return ids

    @cached_property
    def _plain(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer without its control tokens, and the true ids of the added tokens it keeps.

        Made where a text first needs it, which is seldom.
        """
        from tokenizers import Tokenizer

        values = json.loads(self.tokenizer.backend_tokenizer.to_str())
        kept = [one for one in values["added_tokens"] if one["id"] not in self.ids]
        values.update(added_tokens=kept, truncation=None, padding=None, post_processor=None)
        plain = Tokenizer.from_str(json.dumps(values))
        return plain, {cast(int, plain.token_to_id(one["content"])): one["id"] for one in kept}


@lru_cache(maxsize=4)  # of the tokenizers in use
def _control_of(tokenizer: Any) -> _Control:
    return _Control(tokenizer)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TadError(
            f"the text holds {text[error.start]!r}, which is no character; was its source not UTF-8?"
        ) from None


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
