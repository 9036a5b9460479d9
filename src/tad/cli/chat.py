"""`tad chat`: a conversation in the terminal.

Lines come from a terminal or a pipe; at a terminal the canvas is drawn while it is decoded. What is said is kept in
memory only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tad.cli import options
from tad.errors import TadError

if TYPE_CHECKING:
    from tad.conversation import Conversation
    from tad.generation import Generation

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
_END = ("/quit", "/exit", "/q", "/bye")


def chat(
    model: options.Model,
    adapter: options.Adapter = None,
    decoder: options.Decoder = None,
    gen_length: options.GenLength = None,
    system: Annotated[str | None, typer.Option(help="A system message, before all others.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    seed: Annotated[int, typer.Option(help="Only matters with a temperature; each answer adds one.")] = 0,
    settings: options.DecoderSettings = None,
    threshold: options.Threshold = None,
    temperature: options.Temperature = None,
    live: options.Live = True,
) -> None:
    """Talk with a model, over several turns; /help lists what else can be typed."""
    overrides = options.read_settings(settings, threshold=threshold, temperature=temperature)
    with options.busy(f"loading {model}"):
        from tad.conversation import Conversation

        name, length, overrides = options.fill_defaults(model, adapter, decoder, gen_length, overrides)
        # Not merged: /adapter switches it.
        lm = options.load_model(model, adapter, device, dtype, quantize=quantize)
    if lm.tokenizer is None:
        raise TadError(f"{model}: has no tokenizer; a conversation needs one")
    talk = Conversation(lm, name, length, seed, system, **overrides)
    _converse(talk, terminal=sys.stdout.isatty(), live=live)


def obey(talk: Conversation, line: str) -> str | None:
    """Do what a line that begins with a slash says; returns a question to be asked, if it means one."""
    verb, _, rest = line.partition(" ")
    rest = rest.strip()
    if verb == "/new":
        talk.messages = []
    elif verb == "/retry":
        try:
            return talk.take_back()
        except TadError as error:
            raise TadError(f"/retry: {error}") from None
    elif verb == "/decoder":
        talk.switch(rest, {})
    elif verb == "/threshold":
        try:
            talk.switch(talk.name, {**talk.overrides, "threshold": float(rest)})
        except ValueError:
            raise TadError(f"/threshold {rest}: should be a number") from None
    elif verb == "/adapter":
        if talk.lm.peft is None:
            raise TadError("/adapter: there is none; start with --adapter")
        if rest not in ("on", "off"):
            raise TadError(f"/adapter {rest}: should be on or off")
        talk.adapter = rest == "on"
    else:
        raise TadError(f"{verb}: not known; /help lists what is")
    return None


def _converse(talk: Conversation, terminal: bool, live: bool) -> None:
    """Read, answer, print. At a terminal a mistake is named and the conversation goes on; in a pipe it ends it."""
    asking = sys.stdin.isatty() and terminal
    if asking:
        typer.secho(f"{talk.lm.source}, decoder {talk.name}. /help lists commands; /exit ends.", dim=True)
        from tad.tasks.nano.samples import sample_questions

        if examples := sample_questions(talk.lm.source):
            typer.secho(
                "It knows generated word problems, school maths and short Python functions only. Try:",
                dim=True,
            )
            typer.echo("\n".join(f"  {question}" for _, question in examples))
    for line in _lines(asking):
        if line in _END:
            return
        if line == "/help":
            typer.echo("\n".join(f"{name:17s} {meaning}" for name, meaning in COMMANDS.items()))
            continue
        try:
            question = obey(talk, line) if line.startswith("/") else line
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
    from tad.canvas.text import printable
    from tad.cli.decode import summary, warn_of_scope

    said = len(talk.messages)
    try:
        answer = _draw(talk, question) if live else talk.ask(question)
    except KeyboardInterrupt:
        if not terminal:
            raise
        typer.secho("stopped; the question is not kept", dim=True)
        return
    if not terminal:
        typer.echo(answer.text)
        return
    typer.echo(printable(answer.text))
    warn_of_scope(talk.lm.source, question)
    left_out = said + 2 - len(talk.messages)
    if left_out:
        typer.secho(f"the first {left_out} messages no longer fit the context and are left out", dim=True)
    typer.secho(summary(answer), dim=True)


def _draw(talk: Conversation, question: str) -> Generation:
    """Answer with the canvas on the screen."""
    from rich.console import Console

    from tad.canvas.terminal import Canvas, LiveCanvas

    lm, block = talk.lm, talk.decoder.bind(talk.lm).schedule.block
    canvas = Canvas(
        talk.gen_length, block, lambda ids: lm.decode(ids, skip_special=False), lm.tokens.ends, talk.name
    )
    said = talk.stream(question)
    try:
        with LiveCanvas(canvas, Console()) as screen:
            for step in said:
                screen.take(step)
            answer = talk.keep(said)
            canvas.finish(answer.decoded)
    finally:
        said.close()
    return answer
