"""Answers while they are decoded: one step by step (`stream`), or many turn by turn (`Conversation`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tad.canvas.text import MASK, spell_pieces
from tad.decoding import Decoder, Request, Scheduler, Step, check_prompt, get_decoder
from tad.errors import TadError
from tad.generation import Chat, Generation, Prompt, check_types, encode_prompt, read_generation
from tad.models import LM


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
    check_types(lm, decoder, gen_length)
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
        check_types(lm, decoder, gen_length)
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
