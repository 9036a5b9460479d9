"""A user's own file as a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tad.errors import TadError
from tad.tasks import get_task
from tad_sandbox import Sandbox


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"jsonl:{path}"


def test_every_kind_of_answer_is_graded(tmp_path: Path, sandbox: Sandbox) -> None:
    name = write(
        tmp_path / "mine.jsonl",
        {"question": "How many?", "answer": 12, "reference": "Three fours are 12."},
        {"question": "Half?", "answer": r"\frac{\sqrt{2}}{2}", "id": "half", "level": 2},
        {"question": "Who?", "answer": "Evelyn Smith", "grader": "text"},
        {"question": "Write f.", "tests": ["assert f(1) == 2", "assert f(2) == 3"]},
        {
            "question": "Write g.",
            "tests": "def test_g():\n    assert g() == 1\ntest_g()",
            "reference": "def g(): return 1",
        },
    )
    task = get_task(name, sandbox=sandbox)
    examples = task.examples()
    assert [example.id for example in examples] == ["0", "half", "2", "3", "4"]
    assert [example.meta["grader"] for example in examples] == ["number", "math", "text", "tests", "tests"]
    assert [task.reference(example) for example in examples[:2]] == [
        "Three fours are 12.",
        r"\frac{\sqrt{2}}{2}",
    ]
    right = [
        "so 12",
        r"\boxed{1/\sqrt{2}}",
        "evelyn  smith",
        "```python\ndef f(x): return x + 1\n```",
        "def g(): return 1",
    ]
    wrong = ["so 13", r"\boxed{0.6}", "Evan", "```python\ndef f(x): return x\n```", ""]
    assert all(
        verdict.correct for verdict in task.grade_many(list(zip(examples, right, strict=True)), workers=1)
    )
    assert not any(
        verdict.correct for verdict in task.grade_many(list(zip(examples, wrong, strict=True)), workers=1)
    )


def test_the_prompt_is_the_question_or_the_tasks_template(tmp_path: Path) -> None:
    name = write(tmp_path / "mine.jsonl", {"question": "How many {x}?", "answer": "3"})
    worded = get_task(name, template="Q: {question}\nA:", instruction="Show every step.")
    (example,) = worded.examples()
    for task, text in ((get_task(name), "How many {x}?"), (worded, "Q: How many {x}?\nA:")):
        assert task.prompt(example).as_chat() == [{"role": "user", "content": text}]
    assert worded.prompt(example, "plain").text == "How many {x}?"
    assert worded.instruction == "Show every step."
    with pytest.raises(TadError, match="'template'"):
        get_task(name, template="no question")


def test_a_relative_file_is_looked_up_in_the_data_directory(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", {"question": "q", "answer": "3"})
    assert len(get_task("jsonl:mine.jsonl", tmp_path).examples()) == 1


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "3"}, "field 'question' is missing"),
        ({"question": "q"}, "field 'answer' or 'tests' is missing"),
        ({"question": "q", "tests": "  "}, "field 'tests' is empty"),
        ({"question": "q", "tests": [1]}, "field 'tests' should be a list of strings"),
        ({"question": "q", "answer": "three", "grader": "number"}, "field 'answer' is not a number: 'three'"),
        (
            {"question": "q", "answer": "3", "grader": "vibes"},
            "field 'grader' is 'vibes', it should be number, math",
        ),
        ({"question": "q", "answer": "3", "id": "0"}, "the id '0' occurs twice"),
        (
            {"question": "q", "tests": "import math\ndef test_f():\n    assert f() == 1"},
            "field 'tests' defines",
        ),
    ],
)
def test_a_bad_row_is_reported_with_file_and_line(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    path = tmp_path / "mine.jsonl"
    name = write(path, {"question": "fine", "answer": "1"}, row)
    with pytest.raises(TadError) as caught:
        get_task(name).examples()
    assert str(caught.value).startswith(f"{path}:2: {problem}")


def test_an_empty_file_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TadError, match=r"task 'jsonl' split 'all' is empty"):
        get_task(write(tmp_path / "empty.jsonl")).examples()
    with pytest.raises(TadError, match="no such file"):
        get_task(f"jsonl:{tmp_path / 'none.jsonl'}").examples()
    with pytest.raises(TadError, match="needs a file: write jsonl:FILE"):
        get_task("jsonl")
