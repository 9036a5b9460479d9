"""`tad generate` and `tad decoders`: output for people, pipes and machines, and one-line errors."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import tad
from tad.canvas.terminal import Canvas, LiveCanvas
from tad.canvas.text import END, FILLER, FUTURE, MASK, printable, reveal_colour
from tad.cli import app
from tad.cli.decoders import list_decoders
from tad.decoding import DECODERS, Decoded, Step, get_decoder
from tad.decoding.decoders import CACHES, RULES, SCHEDULES, explain, parameters
from tad.decoding.parameters import PARAMETERS
from tad.errors import TadError
from tad.prompts import read_questions
from tiny_lm import CONTEXT, write_checkpoint

SHORT = ("--gen-length", "16", "--set", "block=8")


def run(*words: str, given: str | None = None) -> Result:
    result = CliRunner().invoke(app, list(words), input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def records(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("ids"), tokenizer=False))


@pytest.fixture(scope="module")
def lm(model: str) -> tad.LM:
    return tad.load(model, device="cpu")


# What is printed


def test_smaller_weights_are_loaded_where_asked_for(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tad.models import lm

    kinds: list[str] = []
    monkeypatch.setattr(lm, "quantize_model", lambda model, kind, device: kinds.append(kind))
    run("generate", bare, "--ids", "5,6,7", *SHORT, "--quantize", "int8")
    assert kinds == ["int8"]


def test_pipe_gets_the_plain_text_and_nothing_else(model: str, lm: tad.LM) -> None:
    result = run("generate", model, "hello", *SHORT)
    assert result.exit_code == 0
    assert result.stdout == tad.generate(lm, "hello", gen_length=16, block=8).text + "\n"


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--threshold", "0.3"), {"threshold": 0.3}),
        (("--temperature", "1", "--seed", "7"), {"temperature": 1.0, "seed": 7}),
        (("--raw",), {"raw": True}),
    ],
)
def test_json_has_everything_of_an_answer(
    model: str, lm: tad.LM, words: tuple[str, ...], settings: dict[str, Any]
) -> None:
    (found,) = records(run("generate", model, "hello", "--json", *SHORT, *words))
    expected = tad.generate(lm, "hello", gen_length=16, block=8, **settings)
    assert (found["prompt"], found["text"]) == ("hello", expected.text)
    assert (found["tokens"], found["steps"]) == (expected.tokens, expected.decoded.steps)
    assert found["confidence"] == pytest.approx(expected.decoded.confidence)
    assert (found["forwards"], found["tpf"], found["tpf_all"]) == (
        expected.forwards,
        expected.tpf,
        expected.tpf_all,
    )
    assert found["seconds"] > 0
    assert found["seed"] == settings.get("seed", 0)
    assert (found["decoder"]["name"], found["decoder"]["block"]) == ("tad", 8)
    assert found["decoder"]["threshold"] == settings.get("threshold", 0.5)


def test_model_without_tokenizer_takes_and_gives_ids(bare: str) -> None:
    lm = tad.load(bare, device="cpu")
    expected = tad.decoding.decode(lm, [[1, 2, 3]], gen_length=16, block=8)[0]
    assert (
        run("generate", bare, "--ids", "1, 2 3", *SHORT).stdout == ",".join(map(str, expected.answer)) + "\n"
    )
    found = records(run("generate", bare, "--ids", "1,2,3", "--json", *SHORT))
    assert found[0]["prompt"] == [1, 2, 3]
    assert found[0]["text"] is None
    assert found[0]["tokens"] == expected.tokens


# Where prompts come from


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two\nlines"}]
ODD = ["a\u2028b", "c\x0cd\x85e"]  # only newlines end a prompt


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("some.txt", "first\n\n{second}\nand a third one\n", ["first", "{second}", "and a third one"]),
        ("some.txt", "\n".join(ODD), ODD),
        ("some.jsonl", json.dumps({"prompt": "first", "id": 3}) + "\n" + json.dumps({"messages": CHAT}), ["first", CHAT]),
        ("some.jsonl", "\n".join(json.dumps({"prompt": one}, ensure_ascii=False) for one in ODD), ODD),
        (None, "one\ntwo\n", ["one", "two"]),
        ("-", "one\ntwo\n", ["one", "two"]),
        (None, '{"prompt": "one"}\n', ["one"]),
    ],
)  # fmt: skip
def test_prompts_come_from_files_and_pipes_as_lines_and_json(
    model: str, lm: tad.LM, tmp_path: Path, name: str | None, text: str, prompts: list[Any]
) -> None:
    words, given = ("--file", str(tmp_path / str(name))), None
    if name in (None, "-"):
        words, given = ("--file", "-") if name else (), text
    else:
        (tmp_path / str(name)).write_text(text, encoding="utf-8")
    result = run("generate", model, *words, "--json", *SHORT, "--batch-size", "2", given=given)
    found = [json.loads(line) for line in result.stdout.strip().split("\n")]
    assert [record["prompt"] for record in found] == prompts
    assert found[-1]["tokens"] == tad.generate(lm, prompts[-1], gen_length=16, block=8).tokens


def test_plain_answers_are_separated_by_a_blank_line(model: str, lm: tad.LM) -> None:
    answers = [tad.generate(lm, word, gen_length=16, block=8).text for word in ("one", "two")]
    assert run("generate", model, *SHORT, given="one\ntwo\n").stdout == "\n\n".join(answers) + "\n"


# Errors


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        (("hello", "--file", "x.txt"), None, "--file"),
        ((), "", "standard input"),
        (("--file", "nowhere.txt"), None, r"nowhere\.txt"),
        ((), '{"prompt": "a"}\n{"prompt": \n', "standard input:2"),
        ((), '{"prompt": "a"}\n[]\n', "standard input:2"),
        ((), '{"question": "a"}\n', "standard input:1"),
        ((), '{"prompt": "a", "messages": []}\n', "standard input:1"),
        ((), '{"prompt": 3}\n', 'standard input:1: "prompt"'),
        ((), '{"messages": "a"}\n', 'standard input:1: "messages"'),
        ((), '{"messages": []}\n', 'standard input:1: "messages"'),
        ((), '{"messages": [{"role": "robot", "content": "a"}]}\n', "standard input:1: message 0: role"),
        ((), "short\n" + "x" * CONTEXT, "standard input:2: .*--gen-length 16"),
        (("--raw", "--allow-special"), "a\nwhat is <|mdm_mask|>?\n", "standard input:2: .*mask"),
        (("a", "--decoder", "tadd"), None, "'tadd'.*'tad'"),
        (("a", "--set", "treshold=1"), None, "'threshold'"),
        (("a", "--set", "threshold"), None, "--set threshold"),
        (("a", "--set", "threshold=1", "--threshold", "1"), None, "--threshold"),
        (("a", "--set", "threshold=high"), None, "threshold.*'high'"),
        (("a", "--set", "stop=never"), None, "stop"),
        (("a", "--set", "delay=1"), None, "'delay'"),
        (("a", "--decoder", "llada", "--threshold", "1"), None, "'threshold'"),
        (("a", "--set", "name=x"), None, "'name'"),
        (("a", "--set", "family=x"), None, "'family'"),
        (("--ids", "1,two"), None, "--ids"),
        (("--ids", "1,9999"), None, "9999"),
    ],
)  # fmt: skip
def test_bad_input_is_a_clear_error(
    model: str, words: tuple[str, ...], given: str | None, message: str
) -> None:
    with pytest.raises(TadError, match=message) as caught:
        run("generate", model, *SHORT, *words, given=given)
    assert "\n" not in str(caught.value)


def test_malformed_line_of_a_file_is_named(model: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt" "b"}\n')
    with pytest.raises(TadError, match=r"some\.jsonl:3"):
        run("generate", model, "--file", str(path), *SHORT)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TadError, match="not UTF-8"):
        run("generate", model, "--file", str(path), *SHORT)


def test_length_that_is_no_multiple_of_the_block_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="gen_length 20"):
        run("generate", str(tmp_path), "hello", "--decoder", "tad", "--gen-length", "20")


@pytest.mark.parametrize("settings", [(), ("--set", "block=8"), ("--decoder", "llada")])
def test_length_over_the_context_is_answered_by_one_that_fits_block_and_context(
    model: str, lm: tad.LM, settings: tuple[str, ...]
) -> None:
    words = ("generate", model, "hello", *settings)
    with pytest.raises(TadError, match="the longest answer that fits has") as caught:
        run(*words, "--gen-length", "10001")
    longest = re.search(r"fits has (\d+)$", str(caught.value))
    assert longest is not None
    assert CONTEXT - 64 < int(longest[1]) + len(lm.encode("hello")) <= CONTEXT
    assert run(*words, "--gen-length", longest[1]).exit_code == 0


def test_prompt_that_leaves_no_room_for_a_block_is_told_to_be_shorter(model: str) -> None:
    with pytest.raises(TadError, match="give a shorter prompt"):
        run("generate", model, "x" * CONTEXT, *SHORT)


def test_missing_prompt_at_a_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal())
    with pytest.raises(TadError, match="--file"):
        read_questions()


def test_text_for_a_model_without_tokenizer_is_an_error(bare: str) -> None:
    with pytest.raises(TadError, match="--ids"):
        run("generate", bare, "hello", *SHORT)


# The live canvas


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draw(canvas: Canvas, width: int = 60, height: int | None = None) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(canvas.draw(width, height))
    return console.export_text()


def strip_codes(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)


def spell(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def reveal(forward: int, text: str, at: int, created: int = 1) -> Step:
    ids = list(text.encode())
    return Step(0, forward, list(range(at, at + len(ids))), ids, [1.0] * len(ids), 0, created)


def test_canvas_shows_masks_tokens_and_blocks() -> None:
    canvas = Canvas(12, 4, spell, ends=(0,), title="tad")
    assert draw(canvas).splitlines()[:3] == [f"1 │ {MASK * 4}".ljust(60), f"2 │ {FUTURE * 4}".ljust(60), f"3 │ {FUTURE * 4}".ljust(60)]  # fmt: skip
    canvas.take(reveal(1, "ab", 1, created=2))
    lines = [line.rstrip() for line in draw(canvas).splitlines()]
    assert lines == [
        f"1 │ {MASK}ab{MASK}",
        f"2 │ {MASK * 4}",
        f"3 │ {FUTURE * 4}",
        "tad   forward 1   revealed 2/12",
    ]


def test_canvas_of_a_finished_row_tells_the_end_from_filler() -> None:
    canvas = Canvas(8, 4, spell, ends=(0,))
    canvas.finish(Decoded([*b"yes", 0, 0, 0, 0, 0], [1, 1, 2, 2, 0, 0, 0, 0], [1.0] * 8, 2, 1.0, (0,)))
    lines = [line.rstrip() for line in draw(canvas).splitlines()]
    assert lines == [f"1 │ yes{END}", f"2 │ {FILLER * 4}", "forward 2   revealed 8/8 with the filler"]


def test_character_spread_over_tokens_is_shown_whole() -> None:
    canvas = Canvas(4, 4, spell)
    canvas.take(reveal(1, "é", 1))
    assert draw(canvas).startswith(f"1 │ {MASK}é{MASK}")


def test_tokens_are_coloured_by_reveal_step() -> None:
    canvas = Canvas(4, 4, spell)
    canvas.take(reveal(1, "a", 0))
    canvas.take(reveal(5, "b", 1))
    console = Console(
        width=40, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(canvas.draw(40))
    html = console.export_html(inline_styles=True)
    assert f'color: {reveal_colour(1, 5)}; text-decoration-color: {reveal_colour(1, 5)}">a<' in html
    assert f'color: {reveal_colour(5, 5)}; text-decoration-color: {reveal_colour(5, 5)}">b<' in html


def test_picture_shows_every_token_at_its_forward(model: str, tmp_path: Path) -> None:
    path = tmp_path / "canvas.svg"
    row = json.loads(run("generate", model, "a < b", "--json", "--svg", str(path), *SHORT).stdout)
    shown = ElementTree.parse(path).getroot().findall(".//{*}text[@class]")
    assert [int(text.get("class", "")[1:]) for text in shown] == row["steps"][: len(shown)]
    assert len(shown) == round(row["tpf"] * row["forwards"])
    with pytest.raises(TadError, match="--svg"):
        run("generate", model, "--file", str(_two_prompts(tmp_path)), "--svg", str(path), *SHORT)


def _two_prompts(folder: Path) -> Path:
    (folder / "prompts.txt").write_text("a\nb")
    return folder / "prompts.txt"


def test_tall_canvas_is_cut_to_the_blocks_at_work() -> None:
    canvas = Canvas(160, 4, spell)
    for block in range(20):
        canvas.take(reveal(block + 1, "abcd", 4 * block, created=block + 2))
    lines = draw(canvas, height=12).splitlines()
    assert len(lines) <= 12
    assert any(line.startswith(f"21 │ {MASK}") for line in lines)
    assert "blocks above" in lines[0]
    assert "blocks below" in lines[-2]


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\tc\nd") == "a▯[2Jb▯    c\nd"


def test_live_canvas_stays_on_the_screen_when_interrupted() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=20)
    live = LiveCanvas(Canvas(8, 4, spell), console)
    with contextlib.suppress(KeyboardInterrupt), live:
        live.take(reveal(1, "abc", 0))
        raise KeyboardInterrupt
    last = strip_codes(screen.getvalue()).rpartition("revealed 0/8")[2]
    assert "abc" + MASK in last
    assert "revealed 3/8" in last


def run_at_terminal(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        app(list(words))
    return int(ended.value.code or 0), screen.getvalue()


def test_terminal_gets_the_canvas_the_text_and_the_counts(
    model: str, lm: tad.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, screen = run_at_terminal(monkeypatch, "generate", model, "hello", *SHORT)
    answer = tad.generate(lm, "hello", gen_length=16, block=8)
    assert code == 0
    assert "revealed 0/16" in screen
    assert "revealed 16/16" in screen
    assert (
        f"{answer.forwards} forwards, {len(answer.decoded.content)} tokens: {answer.tpf:.2f} per forward"
        in screen
    )
    assert f"({answer.tpf_all:.2f} with the filler)" in screen
    assert "tokens/s" in screen


def test_no_live_prints_text_and_counts_only(model: str, lm: tad.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    code, screen = run_at_terminal(monkeypatch, "generate", model, "hello", "--no-live", *SHORT)
    assert code == 0
    assert "revealed" not in screen
    assert screen.startswith(printable(tad.generate(lm, "hello", gen_length=16, block=8).text))
    assert "tokens/s" in screen


def test_interrupt_leaves_the_canvas_and_exits_with_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tad.decoding.decode

    def interrupted(*args: Any, on_step: Any, **settings: Any) -> Any:
        def stop(step: Step) -> None:
            on_step(step)
            if step.forward == 2:
                raise KeyboardInterrupt

        return whole(*args, on_step=stop, **settings)

    monkeypatch.setattr(tad.generation, "decode", interrupted)
    code, screen = run_at_terminal(monkeypatch, "generate", model, "hello", *SHORT, "--decoder", "one-by-one")
    assert code == 130
    assert strip_codes(screen).rstrip().endswith("one-by-one   forward 2   revealed 2/16")


def test_none_switches_parts_of_a_decoder_off(model: str) -> None:
    """It is read as no value, and names the cache `none`."""
    calls = ("--decoder", "tad"), ("--decoder", "tad-cached", "--set", "cache=none")
    one, other = (
        json.loads(run("generate", model, "hello", *SHORT, "--json", *call).stdout) for call in calls
    )
    assert (one["tokens"], one["steps"]) == (other["tokens"], other["steps"])
    assert run("generate", model, "hello", *SHORT, "--set", "keep=none").exit_code == 0


# tad decoders


def test_decoders_lists_every_name_with_its_parts() -> None:
    text = run("decoders").stdout
    for name in DECODERS:
        assert name in text
    assert "multi-block: block 32, block_add 0.1, decoded 0.95" in text
    assert "entropy: threshold 0.5, strict, keep best" in text
    assert "delayed: delay 2, refresh 3" in text


def test_decoders_shows_families_apart_only_where_they_differ() -> None:
    lines = run("decoders").stdout.splitlines()
    assert [line.split()[:2] for line in lines if line.split()[:1] == ["d3llm"]] == [["d3llm", "(llada)"], ["d3llm", "(dream)"]]  # fmt: skip
    assert sum(line.split()[:1] == ["tad"] for line in lines) == 1
    dream = run("decoders", "--family", "dream").stdout.splitlines()
    assert "threshold 0.4" in next(line for line in dream if line.split()[:1] == ["d3llm"])


def test_decoders_fits_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(list_decoders({(name, "llada"): get_decoder(name) for name in DECODERS}))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in DECODERS)
    assert "…" not in text


def test_one_decoder_explains_all_its_parameters() -> None:
    text = run("decoders", "d3llm-cached").stdout
    for key in parameters(get_decoder("d3llm-cached")):
        assert key in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["threshold"])
    assert row.split()[:3] == ["threshold", "0.5", "0.4"]


def test_decoders_as_json() -> None:
    found = json.loads(run("decoders", "--json").stdout)
    assert {(record["name"], record["family"]) for record in found} == {
        (name, family) for name in DECODERS for family in ("llada", "dream")
    }
    mine = next(record for record in found if (record["name"], record["family"]) == ("d3llm", "dream"))
    assert mine["schedule"] == "multi-block"
    assert mine["parameters"]["threshold"] == 0.4


def test_every_parameter_of_every_part_has_a_meaning() -> None:
    known = set[str]()
    for schedule, rule, cache in product(SCHEDULES, RULES, CACHES):
        decoder = get_decoder("tad", schedule=schedule, rule=rule, cache=cache)
        assert all(explain(key, decoder) for key in parameters(decoder))
        known |= parameters(decoder).keys()
    assert set(PARAMETERS) == known


def test_every_name_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "decoders.md").read_text()
    for name in (*DECODERS, *SCHEDULES, *RULES, *CACHES, "end", "block", "eager", "off"):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # Python's own in a UTF-8 locale and in C
def test_standard_input_that_is_not_utf_8_is_refused(
    model: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    with pytest.raises(TadError, match="standard input"):
        app(["generate", model, *SHORT])
