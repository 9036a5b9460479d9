"""`tad chat`: a conversation in the terminal, answered by the server's engine.

Lines come from a terminal or a pipe; at a terminal the canvas is drawn while it is decoded. What is said is kept in
memory only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli.options import (
    Adapter,
    DecoderSettings,
    Device,
    Dtype,
    GenLength,
    Live,
    Model,
    Temperature,
    Threshold,
    busy,
    fill_defaults,
    load_model,
    read_settings,
)
from tad.cli.options import Decoder as DecoderName
from tad.errors import TadError

if TYPE_CHECKING:
    from tad.cli.canvas import LiveCanvas
    from tad.decoding import Decoded, Decoder
    from tad.models import LM, Message
    from tad.serving import Engine, Event

COMMANDS = {
    "/new": "begin a new conversation",
    "/retry": "answer the last question again",
    "/decoder NAME": "decode with another method, with its own parameters",
    "/threshold X": "change the decoder's threshold",
    "/adapter on|off": "the student, or the base it was made from",
    "/help": "this list",
    "/quit": "end (or Ctrl-D)",
}
_PROMPT = "you> "


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("chat")(chat)


def chat(
    model: Model,
    adapter: Adapter = None,
    decoder: DecoderName = None,
    gen_length: GenLength = None,
    system: Annotated[str | None, typer.Option(help="A system message, before all others.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option(help="Only matters with a temperature; each answer adds one.")] = 0,
    settings: DecoderSettings = None,
    threshold: Threshold = None,
    temperature: Temperature = None,
    live: Live = True,
) -> None:
    """Talk with a model, over several turns; /help lists what else can be typed."""
    overrides = read_settings(settings, threshold=threshold, temperature=temperature)
    with busy(f"loading {model}"):
        from tad.serving import Engine

        name, length, overrides = fill_defaults(model, adapter, decoder, gen_length, overrides)
        lm = load_model(model, adapter, device, dtype)  # not merged: /adapter switches it
    if lm.tokenizer is None:
        raise TadError(f"{model}: has no tokenizer; a conversation needs one")
    engine = Engine(lm, batch=1, queue=1, queue_seconds=float("inf"), seconds=float("inf"))
    talk = Conversation(lm, engine, name, overrides, length, seed, system)
    talk.decoder()
    engine.start()
    try:
        _converse(talk, terminal=sys.stdout.isatty(), live=live)
    finally:
        engine.close()


@dataclass
class Conversation:
    """What was said so far, and how the next answer is decoded."""

    lm: LM
    engine: Engine
    name: str  # of the decoder
    overrides: dict[str, Any]
    gen_length: int
    seed: int = 0
    system: str | None = None
    adapter: bool = True
    messages: list[Message] = field(default_factory=list)  # without the system's

    def decoder(self) -> Decoder:
        from tad.decoding import get_decoder

        found = get_decoder(self.name, self.lm.family.name, **self.overrides)
        return found.prepared(self.gen_length, self.lm.family.logit_shift)

    def answer(
        self, question: str, watch: Callable[[Event], None] = lambda event: None
    ) -> tuple[Decoded, str]:
        """Decode the answer to a question and keep both; nothing is kept if it fails or is interrupted."""
        from tad.decoding import Decoded
        from tad.serving import Failed, Finished, Job

        messages: list[Message] = [*self.messages, {"role": "user", "content": question}]
        prompt, messages = self._fit(messages)
        job = Job(
            tuple(prompt), self.decoder(), self.gen_length, self.gen_length, self.seed, (), self.adapter
        )
        events: SimpleQueue[Event] = SimpleQueue()
        ticket = self.engine.submit(job, events.put)
        try:
            while not isinstance(event := events.get(), Finished):
                if isinstance(event, Failed):
                    raise TadError(event.message)
                watch(event)
        except BaseException:
            self.engine.cancel(ticket)
            raise
        self.messages = [*messages, {"role": "assistant", "content": event.text}]
        self.seed += 1
        ends = self.lm.tokens.ends
        row = Decoded(event.tokens, event.steps, event.confidence, event.forwards, event.seconds, ends)
        return row, event.text

    def _fit(self, messages: list[Message]) -> tuple[list[int], list[Message]]:
        """Token ids of the conversation, without its first questions and answers where they are too many."""
        opening: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        while True:
            prompt = self.lm.encode([*opening, *messages])
            if len(prompt) + self.gen_length <= self.lm.context:
                return prompt, messages
            if len(messages) == 1:
                raise TadError(
                    f"{len(prompt)} tokens and --gen-length {self.gen_length} are more than the context of"
                    f" {self.lm.context}; ask less or make --gen-length smaller"
                )
            messages = messages[2:]

    def take_back(self) -> str:
        """Forget the last answer and its question, and return the question."""
        if not self.messages:
            raise TadError("/retry: nothing has been asked yet")
        question = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return question

    def command(self, line: str) -> str | None:
        """Obey a line that begins with a slash; returns a question to be asked, if it means one."""
        verb, _, rest = line.partition(" ")
        rest = rest.strip()
        if verb == "/new":
            self.messages = []
        elif verb == "/retry":
            return self.take_back()
        elif verb == "/decoder":
            self._switch(rest, {})
        elif verb == "/threshold":
            self._switch(self.name, {**self.overrides, "threshold": _number(rest)})
        elif verb == "/adapter":
            if self.lm.peft is None:
                raise TadError("/adapter: there is none; start with --adapter")
            if rest not in ("on", "off"):
                raise TadError(f"/adapter {rest}: should be on or off")
            self.adapter = rest == "on"
        else:
            raise TadError(f"{verb}: not known; /help lists what is")
        return None

    def _switch(self, name: str, overrides: dict[str, Any]) -> None:
        before = self.name, self.overrides
        self.name, self.overrides = name, overrides
        try:
            self.decoder()
        except TadError:
            self.name, self.overrides = before
            raise


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TadError(f"/threshold {text}: should be a number") from None


def _converse(talk: Conversation, terminal: bool, live: bool) -> None:
    """Read, answer, print. At a terminal a mistake is named and the conversation goes on; in a pipe it ends it."""
    asking = sys.stdin.isatty() and terminal
    if asking:
        typer.secho(f"{talk.lm.source}, decoder {talk.name}. /help lists commands; Ctrl-D ends.", dim=True)
    for line in _lines(asking):
        if line == "/quit":
            return
        if line == "/help":
            typer.echo("\n".join(f"{name:17s} {meaning}" for name, meaning in COMMANDS.items()))
            continue
        try:
            question = talk.command(line) if line.startswith("/") else line
            if question is not None:
                _reply(talk, question, terminal, terminal and live)
        except TadError as error:
            if not asking:
                raise
            typer.secho(f"error: {error}", fg="red", err=True)


def _lines(asking: bool) -> Iterator[str]:
    """What is typed, without blank lines, until the end of the input."""
    if asking:
        _edit_lines()
    while True:
        try:
            line = input(_PROMPT) if asking else sys.stdin.readline()
        except EOFError:
            typer.echo()
            return
        if not asking and not line:
            return
        if line.strip():
            yield line.strip()


def _edit_lines() -> None:
    """Arrow keys and history for `input`, where Python has them: importing the module is all it takes."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def _reply(talk: Conversation, question: str, terminal: bool, live: bool) -> None:
    from tad.cli.canvas import printable
    from tad.cli.decode import summary

    said = len(talk.messages)
    try:
        row, text = _draw(talk, question) if live else talk.answer(question)
    except KeyboardInterrupt:
        if not terminal:
            raise
        typer.secho("stopped; the question is not kept", dim=True)
        return
    if not terminal:
        typer.echo(text)
        return
    typer.echo(printable(text))
    left_out = said + 2 - len(talk.messages)
    if left_out:
        typer.secho(f"the first {left_out} messages no longer fit the context and are left out", dim=True)
    typer.secho(summary(row), dim=True)


def _draw(talk: Conversation, question: str) -> tuple[Decoded, str]:
    """Answer with the canvas on the screen."""
    from rich.console import Console

    from tad.cli.canvas import Canvas, LiveCanvas

    lm, block = talk.lm, talk.decoder().schedule.block
    canvas = Canvas(
        talk.gen_length, block, lambda ids: lm.decode(ids, skip_special=False), lm.tokens.ends, talk.name
    )
    with LiveCanvas(canvas, Console()) as screen:
        row, text = talk.answer(question, lambda event: _show(screen, event))
        canvas.finish(row)
    return row, text


def _show(screen: LiveCanvas, event: Event) -> None:
    from tad.serving import Revealed

    if isinstance(event, Revealed):
        screen.take(event.step)
