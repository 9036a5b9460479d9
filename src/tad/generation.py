"""Text in, text out: prompts and chats through the tokenizer, decoding, and back; whole, step by step, or turn by turn.

Everything about how masks become tokens is in `tad.decoding`, which knows token ids only. This module adds the text
on both sides and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from tad.canvas.text import MASK, spell_pieces
from tad.decoding import (
    Decoded,
    Decoder,
    Request,
    Scheduler,
    Step,
    StepCallback,
    check_prompt,
    decode,
    get_decoder,
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
    _check_types(lm, decoder, gen_length)
    single = not isinstance(prompts, list) or is_chat(prompts) or is_ids(prompts)
    asked: list[Any] = [prompts] if single else list(prompts)
    ids = [
        encode_prompt(lm, prompt, prefix, raw, number, allow_special) for number, prompt in enumerate(asked)
    ]
    decoder, gen_length, overrides = lm.defaults.fill(decoder, gen_length, overrides)
    rows = decode(lm, ids, decoder, gen_length, seed, batch_size, on_step=on_step, **overrides)
    answers = [read_generation(lm, prompt, row) for prompt, row in zip(asked, rows, strict=True)]
    return answers[0] if single else answers


@dataclass(frozen=True)
class TextStep(Step):
    """A step, and the text of the canvas after it, with a mark for every mask."""

    text: str


class Stream(Iterator[TextStep]):
    """The steps of one answer, decoded as they are asked for; `answer` is the whole of it after the last one."""

    def __init__(
        self,
        lm: LM,
        prompt: Prompt,
        ids: list[int],
        decoder: Decoder,
        gen_length: int,
        seed: int = 0,
        adapter: bool = True,
        merges: bool = False,
    ) -> None:
        """`ids` are the prompt's; `adapter` and `merges` are the scheduler's."""
        check_prompt(lm, ids, gen_length)
        self.lm, self.prompt = lm, prompt
        self.tokens: list[int | None] = [None] * gen_length
        self._steps: list[Step] = []
        self._answer: Generation | None = None
        self._scheduler = Scheduler(lm, None, self._steps.append, (len(ids), gen_length), 1, merges=merges)
        self._scheduler.admit([Request(0, ids, gen_length, decoder, seed, adapter=adapter)])

    def __next__(self) -> TextStep:
        if self._answer is not None or not len(self._scheduler):
            raise StopIteration
        try:
            done = self._scheduler.step()
        except BaseException:
            self.close()
            raise
        step = self._steps.pop()
        for position, token in zip(step.positions, step.tokens, strict=True):
            self.tokens[position] = token
        if done:
            self.tokens = list(done[0].tokens)
            self._answer = read_generation(self.lm, self.prompt, done[0])
            self.close()
        return TextStep(**vars(step), text=self.text)

    @property
    def text(self) -> str:
        """The canvas as it is now."""
        pieces = spell_pieces(self.tokens, self.lm.decode, self.lm.tokens.ends)
        return "".join(
            MASK if token is None else piece for token, piece in zip(self.tokens, pieces, strict=True)
        )

    @property
    def answer(self) -> Generation:
        """The whole answer; what is left of it is decoded first."""
        for _ in self:
            pass
        if self._answer is None:
            raise TadError("this answer was closed before its end; ask again")
        return self._answer

    def close(self) -> None:
        """Stop decoding."""
        self._scheduler.close()


def stream(
    lm: LM,
    prompt: Prompt,
    decoder: str | Decoder | None = None,
    gen_length: int | None = None,
    seed: int = 0,
    prefix: str = "",
    raw: bool = False,
    **overrides: Any,
) -> Stream:
    """Answer one prompt step by step: `for step in tad.stream(lm, "...")`. The arguments are those of `generate`."""
    _check_types(lm, decoder, gen_length)
    ids = encode_prompt(lm, prompt, prefix, raw)
    decoder, gen_length, overrides = lm.defaults.fill(decoder, gen_length, overrides)
    return Stream(lm, prompt, ids, get_decoder(decoder, lm.family.name, **overrides), gen_length, seed)


class Conversation:
    """What was said so far, and how the next answer is decoded. A turn is kept when it was answered whole."""

    def __init__(
        self,
        lm: LM,
        decoder: str | None = None,
        gen_length: int | None = None,
        seed: int = 0,
        system: str | None = None,
        **overrides: Any,
    ) -> None:
        """`seed` is that of the first answer; each answer adds one."""
        _check_types(lm, decoder, gen_length)
        self.lm, self.seed, self.system, self.adapter = lm, seed, system, True
        self.messages: Chat = []  # without the system's
        self.name, self.gen_length, self.overrides = lm.defaults.fill(decoder, gen_length, overrides)
        self.switch(self.name, self.overrides)

    def switch(self, name: str, overrides: dict[str, Any]) -> None:
        """Decode with another method from now on; one that does not fit changes nothing."""
        found = get_decoder(name, self.lm.family.name, **overrides)
        found.bind(self.lm, self.gen_length)
        self.decoder, self.name, self.overrides = found, name, overrides

    def ask(self, question: str) -> Generation:
        """The answer to the next question, which is kept with it."""
        return self.keep(self.stream(question))

    def stream(self, question: str) -> Stream:
        """The answer step by step. `keep` adds it to the conversation."""
        ids, messages = self._fit([*self.messages, {"role": "user", "content": question}])
        return Stream(
            self.lm,
            messages,
            ids,
            self.decoder,
            self.gen_length,
            self.seed,
            self.adapter,
            merges=self.lm.peft is not None,
        )

    def keep(self, said: Stream) -> Generation:
        """Take the (rest of the) answer into the conversation."""
        answer = said.answer
        assert not isinstance(answer.prompt, str)
        self.messages = [*answer.prompt, {"role": "assistant", "content": answer.text}]
        self.seed += 1
        return answer

    def take_back(self) -> str:
        """Forget the last answer and its question, and return the question."""
        if not self.messages:
            raise TadError("nothing has been asked yet")
        question = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return question

    def _fit(self, messages: Chat) -> tuple[list[int], Chat]:
        """Token ids of the conversation, without its first questions and answers where they are too many."""
        opening: Chat = [] if self.system is None else [{"role": "system", "content": self.system}]
        while True:
            ids = self.lm.encode([*opening, *messages])
            if len(ids) + self.gen_length <= self.lm.context:
                return ids, messages
            if len(messages) == 1:
                raise TadError(
                    f"{len(ids)} tokens and gen_length {self.gen_length} are more than the context of"
                    f" {self.lm.context}; ask less or make gen_length smaller"
                )
            messages = messages[2:]

    def __repr__(self) -> str:
        return f"Conversation({len(self.messages) // 2} answers, {self.name}, {self.lm!r})"


def _check_types(lm: Any, decoder: Any, gen_length: Any) -> None:
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
