"""Recipes, lines of JSON and names of strangers: one short line within seconds, and nothing outside of the run's folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tad.config import Recipe, load_recipe
from tad.errors import TadError, printable
from tad.pipeline.recipe import RunRecipe
from tad.tasks import get_task

SECONDS = 40


class Section(Recipe):
    value: int = 0
    name: str = "x"


def anchors(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        anchors(10) + "\nvalue: *a9",
        "value: " + "[" * 800 + "]" * 800,
        "value: " + "[" * 60 + "]" * 60,
        "value: " + "9" * 6000,
        "name: 0x" + "f" * 100_000,
        "value: 2024-99-99",
        "name: [" + "x" * 100_000 + "]",
        "value: &a [*a]",
    ],
    ids=["anchors", "deep", "somewhat deep", "digits", "hexadecimal", "date", "long", "itself"],
)
def test_a_strange_recipe_is_one_short_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    started = time.monotonic()
    with pytest.raises(TadError, match=r"recipe\.yaml") as caught:
        load_recipe(Section, path)
    assert time.monotonic() - started < SECONDS
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "override",
    [".".join("a" * 50_000) + "=1", "value=" + "[" * 50_000, "value=2024-99-99", "value=" + "9" * 6000],
)
def test_a_strange_override_is_one_short_line(tmp_path: Path, override: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("value: 1")
    with pytest.raises(TadError, match=r"override") as caught:
        load_recipe(Section, path, [override])
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "name", ["/tmp/elsewhere", "../elsewhere", "..", "a/b", ".hidden", "x\x1b[2J", "x" * 5000]
)
def test_the_name_of_a_recipe_is_a_plain_name(name: str) -> None:
    with pytest.raises(TadError, match=r"'name'.*plain name"):
        load_recipe(RunRecipe, "run-nano-llada", [f"name={json.dumps(name)}"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"question": "x", "answer": ' + "9" * 5000 + "}", "thousands of digits"),
        ('{"question": "half \\ud800", "answer": "1"}', "'question' holds half of a surrogate pair"),
        ('{"question": "x", "tests": "assert \'\\ud800\'"}', "'tests' holds half of a surrogate pair"),
    ],
)
def test_a_strange_line_of_json_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TadError, match=rf"own\.jsonl:1: .*{words}"):
        get_task(f"jsonl:{path}").examples()


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[2Jb\r\x07é\u202e") == "a\\x1b[2Jb\\r\\x07é\\u202e"


@pytest.mark.parametrize("name", ["\x1b[2Jx", "x" * 5000])
def test_a_strange_name_of_a_model_is_one_short_line_on_the_terminal(name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tad", "generate", name, "hello"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "\x1b" not in found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1
    assert len(found.stderr) < 3000


@pytest.mark.parametrize(
    ("option", "value"), [("size", [1]), ("size", "[1]"), ("seed", {"a": 1}), ("size", "x" * 10**6)]
)
def test_a_strange_option_of_a_task_is_named(option: str, value: object) -> None:
    with pytest.raises(TadError, match=f"task 'nano-word': option '{option}' should be") as caught:
        get_task("nano-word", **{option: value})
    assert len(str(caught.value)) < 500
