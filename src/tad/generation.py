"""Text in, text out: prompts and chats through the tokenizer, decoding, and back.

Everything about how masks become tokens is in `tad.decoding`, which knows token ids only. This module adds the text
on both sides and nothing else; step by step and turn by turn is `tad.conversation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from tad.canvas.text import spell_pieces
from tad.decoding import (
    Decoded,
    Decoder,
    StepCallback,
    decode,
)
from tad.errors import TadError
from tad.models import LM, Message

Chat: TypeAlias = "list[Message]"
Prompt: TypeAlias = "str | Chat | list[int]"


@dataclass(frozen=True, repr=False)
class Generation:
    """The answer to one prompt. In a notebook it is drawn by reveal step and confidence."""

    prompt: Prompt  # as given
    text: str  # what was generated, before the first end token and without special tokens
    decoded: Decoded
    pieces: tuple[str, ...] = field(default=(), compare=False)  # the text of each position

    @property
    def tokens(self) -> list[int]:
        """All ids of the generated part, `gen_length` of them."""
        return self.decoded.tokens

    @property
    def forwards(self) -> int:
        return self.decoded.forwards

    @property
    def tpf(self) -> float:
        """Tokens per forward: content, the first end token included."""
        return self.decoded.tpf

    @property
    def tpf_all(self) -> float:
        """Tokens per forward: every position of the generated part."""
        return self.decoded.tpf_all

    @property
    def seconds(self) -> float:
        return self.decoded.seconds

    @property
    def tokens_per_second(self) -> float:
        """Content tokens over seconds. In a batch the seconds are shared with the other rows."""
        return len(self.decoded.content) / self.decoded.seconds

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 80 else f"{self.text[:77]}..."
        return f"Generation({text!r}, {self.forwards} forwards, {self.tpf:.2f} tokens per forward)"

    def _repr_html_(self) -> str:
        from tad.canvas.html import draw_html

        return draw_html(self.decoded, self.pieces)


@overload
def generate(lm: LM, prompts: Prompt, *args: Any, **settings: Any) -> Generation: ...


@overload
def generate(
    lm: LM, prompts: list[str] | list[Chat] | list[list[int]] | list[Prompt], *args: Any, **settings: Any
) -> list[Generation]: ...


def generate(
    lm: LM,
    prompts: Prompt | list[str] | list[Chat] | list[list[int]] | list[Prompt],
    decoder: str | Decoder | None = None,
    gen_length: int | None = None,
    seed: int | Sequence[int] = 0,
    batch_size: int | None = None,
    on_step: StepCallback | None = None,
    prefix: str = "",
    raw: bool = False,
    allow_special: bool = False,
    **overrides: Any,
) -> Generation | list[Generation]:
    """Answer prompts: one `Generation` for a string, a chat or token ids, a list of them for a list of these.

    A string is the user's turn of a chat, token ids are taken as they are; with `raw` it is plain text that the model continues, without a chat around
    it, in which `allow_special` lets control tokens be written. `prefix` is text every answer already begins with; it is not part of `Generation.text`. The other arguments are
    those of `tad.decoding.decode`; `overrides` are parameters of the decoder (`tad decoders NAME` lists them). Where no
    decoder or length is given, they are the model's own (`lm.defaults`).
    """
    check_types(lm, decoder, gen_length)
    single = not isinstance(prompts, list) or is_chat(prompts) or is_ids(prompts)
    asked: list[Any] = [prompts] if single else list(prompts)
    ids = [
        encode_prompt(lm, prompt, prefix, raw, number, allow_special) for number, prompt in enumerate(asked)
    ]
    decoder, gen_length, overrides = lm.defaults.fill(decoder, gen_length, overrides)
    rows = decode(lm, ids, decoder, gen_length, seed, batch_size, on_step=on_step, **overrides)
    answers = [read_generation(lm, prompt, row) for prompt, row in zip(asked, rows, strict=True)]
    return answers[0] if single else answers


def check_types(lm: Any, decoder: Any, gen_length: Any) -> None:
    """One line for arguments in the wrong place."""
    if not isinstance(lm, LM):
        raise TadError(
            f"lm should be a loaded model, such as tad.load({lm!r:.60}); it is a {type(lm).__name__}"
        )
    if decoder is not None and not isinstance(decoder, str | Decoder):
        raise TadError(f"decoder should be a name or a Decoder, it is a {type(decoder).__name__}")
    if gen_length is not None and (isinstance(gen_length, bool) or not isinstance(gen_length, int)):
        raise TadError(f"gen_length should be a whole number, it is {gen_length!r:.40}")


def is_chat(prompts: Any) -> bool:
    """Whether this is one conversation, a list of messages, rather than a list of prompts."""
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], dict)


def is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids."""
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)


def encode_prompt(
    lm: LM,
    prompt: Prompt,
    prefix: str = "",
    raw: bool = False,
    number: int = 0,
    allow_special: bool = False,
) -> list[int]:
    """Token ids of a prompt up to the first generated position. `number` names it in errors."""
    if is_ids(prompt):
        return list(prompt)  # type: ignore[arg-type]
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise TadError(f"prompt {number} is neither text nor a chat (a list of messages): {prompt!r:.60}")
    if allow_special and not raw:
        raise TadError("allow_special goes with raw: the contents of a chat are always text")
    if raw and not isinstance(prompt, str):
        raise TadError(f"prompt {number} is a chat; raw generation continues plain text, give it as a string")
    if raw:
        return lm.encode_text(str(prompt) + prefix, allow_special=allow_special)
    try:
        return lm.encode(prompt, prefix)  # type: ignore[arg-type]
    except TadError as error:
        raise TadError(f"prompt {number}: {error}") from None


def read_generation(lm: LM, prompt: Prompt, row: Decoded) -> Generation:
    """A decoded row with its text; a model without a tokenizer gives none."""
    if lm.tokenizer is None:
        return Generation(prompt, "", row)
    pieces = spell_pieces(row.content, lambda ids: lm.decode(ids, skip_special=False), row.ends)
    return Generation(prompt, read_answer(lm, row), row, tuple(pieces))


def read_answer(lm: LM, row: Decoded) -> str:
    """The text of a decoded row, before its first end token."""
    return lm.decode(row.answer)
