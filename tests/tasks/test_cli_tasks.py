"""`tad tasks` and `tad grade`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tad.cli import app
from tad.errors import TadError

QUESTIONS = [
    {"id": "a", "question": "1 + 1?", "answer": "2"},
    {"id": "b", "question": "1 + 2?", "answer": "3"},
    {"id": "c", "question": "Write f.", "tests": "assert f() == 1"},
]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return f"jsonl:{path}"


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_tasks_are_listed_with_sizes_and_places(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    write(
        tmp_path / "gsm8k" / "test.jsonl",
        {"question": "q", "answer": "#### 1"},
        {"question": "r", "answer": "#### 2"},
    )
    listed = {
        (row["task"], row["split"]): row for row in json.loads(run("tasks", "--data-dir", tmp_path, "--json"))
    }
    assert listed["gsm8k", "test"]["size"] == 2
    assert listed["gsm8k", "test"]["data"] == str(tmp_path / "gsm8k" / "test.jsonl")
    assert listed["math", "test"] == {"task": "math", "split": "test", "size": None, "data": "not found"}
    assert listed["nano-word", "test"]["size"] == 1024
    table = run("tasks", "--data-dir", tmp_path)
    assert "humaneval-instruct" in table
    assert "jsonl:FILE" in table


def test_grading_by_id_gives_accuracy_error_and_reasons(mine: str, tmp_path: Path) -> None:
    texts = write(tmp_path / "t.jsonl", {"id": "b", "text": "so 3"}, {"id": "a", "text": "so 3"})
    out = tmp_path / "verdicts.jsonl"
    summary = json.loads(run("grade", mine, texts, "--json", "--out", out))
    assert (summary["texts"], summary["correct"], summary["accuracy"]) == (2, 1, 0.5)
    assert summary["standard_error"] == pytest.approx(0.5)
    assert {"correct": False, "reason": "different", "count": 1} in summary["reasons"]
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["correct"], row["extracted"]) for row in verdicts] == [
        ("b", True, "3"),
        ("a", False, "3"),
    ]
    assert "50.00% ± 50.00  (1 of 2)" in run("grade", mine, texts)


@pytest.mark.sandbox
def test_texts_that_cannot_be_judged_are_counted_apart_from_wrong_ones(mine: str, tmp_path: Path) -> None:
    program = "class Equal:\n    def __eq__(self, other): return True\n\ndef f(): return Equal()"
    texts = write(tmp_path / "t.jsonl", {"id": "c", "text": program}, {"id": "a", "text": "3"})
    assert "(0 of 2; 1 cannot be judged)" in run("grade", mine, texts)
    assert json.loads(run("grade", mine, texts, "--json"))["cannot_judge"] == 1
    assert json.loads(run("grade", mine, texts, "--json", "--judge", "together"))["cannot_judge"] == 0


def test_texts_without_ids_are_taken_in_order(mine: str, tmp_path: Path) -> None:
    strings = write(tmp_path / "t.jsonl", "2", "4")
    assert json.loads(run("grade", mine, strings, "--json"))["correct"] == 1
    plain = tmp_path / "t.txt"
    plain.write_text("it is 2\nit is 3\n")
    assert json.loads(run("grade", mine, plain, "--json"))["correct"] == 2


def test_code_runs_unprotected_only_with_the_flag(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tad_sandbox import bwrap

    monkeypatch.setattr(bwrap.shutil, "which", lambda *_arguments, **_options: None)
    texts = write(tmp_path / "t.jsonl", {"id": "c", "text": "def f(): return 1"})
    with pytest.raises(TadError, match=r"bubblewrap \(bwrap\) is missing"):
        run("grade", mine, texts)
    assert "1 of 1" in run("grade", mine, texts, "--unsafe-no-sandbox")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"id": "a", "text": "1"}\n{oops\n', ":2: is not valid JSON"),
        ('{"id": "z", "text": "1"}\n', ":1: no example 'z' in this split (ids look like 'a')"),
        ('{"id": "a"}\n', ":1: field 'text' is missing or not a string"),
        ("[1]\n", ":1: expected an object with 'text', or a string; this is list"),
        ('{"id": "a", "text": "1"}\n"two"\n', ":2: some texts have an id and some have none"),
        ('"1"\n"2"\n"3"\n"4"\n', ":4: more texts than the 3 examples"),
        ("", ": no texts to grade"),
    ],
)
def test_bad_texts_are_reported_with_file_and_line(
    mine: str, tmp_path: Path, lines: str, problem: str
) -> None:
    texts = tmp_path / "t.jsonl"
    texts.write_text(lines)
    with pytest.raises(TadError) as caught:
        run("grade", mine, texts)
    assert str(caught.value).startswith(f"{texts}{problem}")


def test_missing_files_are_reported(mine: str, tmp_path: Path) -> None:
    with pytest.raises(TadError, match="no such file"):
        run("grade", mine, tmp_path / "none.jsonl")
    texts = write(tmp_path / "t.jsonl", "2")
    with pytest.raises(TadError, match=r"out\.jsonl.* does not exist"):
        run("grade", mine, texts, "--out", tmp_path / "no" / "out.jsonl")


def test_an_option_the_task_does_not_have_is_refused(mine: str, tmp_path: Path) -> None:
    texts = write(tmp_path / "t.jsonl", "2")
    with pytest.raises(TadError, match="task 'jsonl' has no option 'extraction'"):
        run("grade", mine, texts, "--extraction", "flexible")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("texts.txt", b"caf\xe9\n", "is not UTF-8 text"),
        ("texts.jsonl.gz", b"text", "is not a readable gzip file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    mine: str, tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TadError, match=rf"{name}:\d+: {problem}"):
        run("grade", mine, tmp_path / name)
