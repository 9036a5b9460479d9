"""`tad chat`: turns, commands, the context, interrupts, and what goes to pipes and terminals."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tad
from tad.canvas.text import printable
from tad.cli import app
from tad.cli import chat as cli
from tad.conversation import Conversation
from tad.errors import TadError
from tad.models.lora import attach
from tiny_lm import write_checkpoint

SHORT = ("--gen-length", "16", "--set", "block=8")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe(model: str, *lines: str, options: tuple[str, ...] = SHORT) -> Result:
    given = "".join(f"{line}\n" for line in lines)
    result = CliRunner().invoke(app, ["chat", model, *options], input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def type_in(
    monkeypatch: pytest.MonkeyPatch, model: str, *lines: str, options: tuple[str, ...] = SHORT
) -> str:
    """What a terminal shows after these lines and Ctrl-D."""
    screen, typed = _Terminal(), iter(lines)

    def read(prompt: str) -> str:
        screen.write(prompt)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(sys, "stdin", _Terminal())
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        app(["chat", model, *options])
    assert not ended.value.code
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def lm(model: str) -> tad.LM:
    return tad.load(model, device="cpu")


@pytest.fixture
def talk(lm: tad.LM) -> Conversation:
    return Conversation(lm, "tad", 16, block=8)


def say(lm: tad.LM, messages: list[dict[str, str]], **settings: Any) -> str:
    return tad.generate(lm, messages, **{"gen_length": 16, "block": 8, **settings}).text


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


# Turns


def test_pipe_gets_the_answers_of_generate_turn_by_turn(model: str, lm: tad.LM) -> None:
    first = say(lm, turns("hi"))
    second = say(lm, turns("hi", first, "and?"))
    result = pipe(model, "hi", "", "and?")
    assert result.exit_code == 0
    assert result.stdout == f"{first}\n{second}\n"


def test_system_message_stands_before_every_turn(model: str, lm: tad.LM) -> None:
    system = {"role": "system", "content": "be brief"}
    first = say(lm, [system, *turns("hi")])
    second = say(lm, [system, *turns("hi", first, "and?")])
    assert first != say(lm, turns("hi"))
    assert (
        pipe(model, "hi", "and?", options=(*SHORT, "--system", "be brief")).stdout == f"{first}\n{second}\n"
    )


def test_each_answer_of_a_warm_decoder_has_the_next_seed(talk: Conversation) -> None:
    talk.switch("tad", {"block": 8, "temperature": 1.5})
    first = talk.ask("hi").text
    assert first == say(talk.lm, turns("hi"), temperature=1.5, seed=0)
    talk.messages.clear()
    second = talk.ask("hi").text
    assert second == say(talk.lm, turns("hi"), temperature=1.5, seed=1)
    assert first != second


def test_answer_has_the_tokens_and_forwards_of_decode(talk: Conversation) -> None:
    row = talk.ask("hi").decoded
    alone = tad.generate(talk.lm, "hi", gen_length=16, block=8).decoded
    assert (row.tokens, row.steps, row.forwards) == (alone.tokens, alone.steps, alone.forwards)


def test_new_forgets_and_retry_asks_the_last_question_again(model: str, lm: tad.LM) -> None:
    first = say(lm, turns("hi"))
    again = say(lm, turns("and?"))
    assert pipe(model, "hi", "/new", "and?", "/retry").stdout == f"{first}\n{again}\n{again}\n"


def test_oldest_turns_are_left_out_where_the_context_is_full(talk: Conversation) -> None:
    talk.messages = turns("a" * 100, "b" * 80, "short", "answer")
    assert len(talk.lm.encode([*talk.messages, *turns("next?")])) + 16 > talk.lm.context
    text = talk.ask("next?").text
    kept = turns("short", "answer", "next?")
    assert talk.messages == [*kept, {"role": "assistant", "content": text}]
    assert text == say(talk.lm, kept)


def test_question_that_cannot_fit_is_refused_and_not_kept(talk: Conversation) -> None:
    talk.messages = turns("one", "two")
    with pytest.raises(TadError, match="gen_length"):
        talk.ask("x" * 300)
    assert talk.messages == turns("one", "two")


def test_interrupted_answer_is_cancelled_and_the_conversation_goes_on(talk: Conversation) -> None:
    said = talk.stream("hi")
    next(said)
    said.close()
    assert talk.messages == []
    with pytest.raises(TadError, match="closed"):
        talk.keep(said)
    assert talk.ask("hello").text == say(talk.lm, turns("hello"))


# Commands


def test_decoder_is_switched_with_its_own_parameters(talk: Conversation) -> None:
    talk.gen_length = 32  # a block of that decoder; of the first one's parameters, block 8, nothing is left
    assert cli.obey(talk, "/decoder one-by-one") is None
    alone = tad.generate(talk.lm, "hi", decoder="one-by-one", gen_length=32)
    answer = talk.ask("hi")
    assert (answer.text, answer.forwards) == (alone.text, alone.forwards)


def test_threshold_changes_how_many_forwards_it_takes(talk: Conversation) -> None:
    cli.obey(talk, "/threshold 0")
    row = talk.ask("hi")
    assert row.forwards == tad.generate(talk.lm, "hi", gen_length=16, block=8, threshold=0.0).forwards
    talk.messages.clear()
    cli.obey(talk, "/threshold 9")
    assert talk.ask("hi").forwards < row.forwards


def test_adapter_is_switched_off_and_on(tmp_path: Path) -> None:
    lm = tad.load(write_checkpoint(tmp_path), device="cpu")
    base = say(lm, turns("hi"))
    lm.peft = attach(lm.model, 4, None, 0.0)
    for name, weight in lm.model.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.2)
    student = say(lm, turns("hi"))
    assert student != base
    talk = Conversation(lm, "tad", 16, block=8)
    assert talk.ask("hi").text == student
    cli.obey(talk, "/new")
    cli.obey(talk, "/adapter off")
    assert talk.ask("hi").text == base


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/bogus", "/bogus"),
        ("/retry", "/retry"),
        ("/decoder tadd", "'tadd'"),
        ("/threshold much", "/threshold much"),
        ("/threshold -1", "threshold"),
        ("/adapter on", "--adapter"),
    ],
)
def test_wrong_command_is_refused_and_changes_nothing(talk: Conversation, line: str, message: str) -> None:
    with pytest.raises(TadError, match=re.escape(message)):
        cli.obey(talk, line)
    assert (talk.name, talk.overrides, talk.adapter) == ("tad", {"block": 8}, True)


def test_every_command_of_the_list_is_obeyed(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    shown = type_in(monkeypatch, model, "/help")
    for name, meaning in cli.COMMANDS.items():
        assert re.search(rf"{re.escape(name)} +{re.escape(meaning)}", shown)


# Pipes and terminals


def test_mistake_in_a_pipe_ends_it_with_an_error(model: str) -> None:
    with pytest.raises(TadError, match="/bogus"):
        pipe(model, "/bogus", "hi")


def test_mistake_at_a_terminal_is_named_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, model: str, lm: tad.LM
) -> None:
    screen = type_in(monkeypatch, model, "/bogus", "hi", options=(*SHORT, "--no-live"))
    assert "error: /bogus: not known" in screen
    assert printable(say(lm, turns("hi"))) in screen
    assert screen.endswith("you> \n")


def test_terminal_shows_canvas_answer_and_counts(
    monkeypatch: pytest.MonkeyPatch, model: str, lm: tad.LM
) -> None:
    screen = type_in(monkeypatch, model, "hi")
    alone = tad.generate(lm, "hi", gen_length=16, block=8)
    assert "tad   forward 0   revealed 0/16" in screen
    assert f"tad   forward {alone.forwards}   revealed 16/16" in screen
    assert printable(alone.text) in screen
    assert f"{alone.forwards} forwards, {len(alone.decoded.content)} tokens" in screen


def test_terminal_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    screen = type_in(monkeypatch, model, "a" * 100, "b" * 100, options=(*SHORT, "--no-live"))
    assert "the first 2 messages no longer fit the context and are left out" in screen


def test_interrupt_at_a_terminal_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, model: str, lm: tad.LM
) -> None:
    def interrupt(screen: object, step: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tad.canvas.terminal.LiveCanvas.take", interrupt)
    screen = type_in(monkeypatch, model, "hi", "/retry")
    assert "stopped; the question is not kept" in screen
    assert "error: /retry: nothing has been asked yet" in screen


def test_quit_ends_the_conversation(model: str, lm: tad.LM) -> None:
    assert pipe(model, "hi", "/quit", "more").stdout == say(lm, turns("hi")) + "\n"


def test_wrong_options_are_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="gen_length 20"):
        pipe(str(tmp_path), options=("--decoder", "tad", "--gen-length", "20"))


def test_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="tokenizer"):
        pipe(str(write_checkpoint(tmp_path, tokenizer=False)))


def test_the_adapter_can_be_switched_where_other_commands_merge_it(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    tad.load(base, device="cpu").attach(rank=4).save_pretrained(tmp_path / "adapter")
    options = ("--adapter", str(tmp_path / "adapter"), *SHORT)
    result = pipe(str(base), "hello", "/adapter off", "hello", options=options)
    assert result.exit_code == 0
