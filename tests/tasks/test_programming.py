"""The code benchmarks with their own solutions, right and made wrong, through extraction and sandbox."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from tad.errors import TadError
from tad.tasks import Example, get_task
from tad.tasks.programming import ProgrammingTask
from tad_sandbox import Sandbox


def get_programming_task(name: str, data_dir: Path, sandbox: Sandbox) -> ProgrammingTask:
    task = get_task(name, data_dir, sandbox=sandbox)
    assert isinstance(task, ProgrammingTask)
    return task


def answer_with(task: ProgrammingTask, example: Example, program: str) -> str:
    """A program as a model would answer with it under this task's prompt."""
    if task.name == "humaneval-instruct":
        return program.removeprefix(example.question) + "\n```\nThat is it."
    if task.name == "mbpp-instruct":
        return program + "\n```\nThat is it."
    return f"Here is my solution.\n```python\n{program}\n```\nIt works."


# Wraps a function so that every result is another value of the same kind.
SPOIL = """

def _spoil(value):
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float, complex)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, (list, tuple)): return type(value)([*value, None])
    return "spoiled"

_right_{name} = {name}
def {name}(*arguments, **options):
    return _spoil(_right_{name}(*arguments, **options))
"""


def check_references(task: ProgrammingTask, examples: list[Example]) -> None:
    pairs = [(example, answer_with(task, example, task.reference(example))) for example in examples]
    verdicts = task.grade_many(pairs)
    failures = {
        e.id: verdict.reason for (e, _), verdict in zip(pairs, verdicts, strict=True) if not verdict.correct
    }
    assert failures == {}


@pytest.mark.parametrize("name", ["humaneval", "humaneval-instruct", "mbpp", "mbpp-instruct"])
def test_a_sample_of_reference_solutions_passes(name: str, data_dir: Path, sandbox: Sandbox) -> None:
    task = get_programming_task(name, data_dir, sandbox)
    check_references(task, random.Random(0).sample(task.examples("test"), 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["humaneval", "humaneval-instruct"])
def test_all_164_humaneval_solutions_pass(name: str, data_dir: Path, sandbox: Sandbox) -> None:
    task = get_programming_task(name, data_dir, sandbox)
    assert len(task.examples()) == 164
    check_references(task, task.examples())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mbpp", "mbpp-instruct"])
def test_all_974_mbpp_solutions_pass(name: str, data_dir: Path, sandbox: Sandbox) -> None:
    task = get_programming_task(name, data_dir, sandbox)
    examples = [example for split in task.splits for example in task.examples(split)]
    assert len(examples) == 974
    check_references(task, examples)


def test_a_wrong_solution_for_each_of_50_fails(data_dir: Path, sandbox: Sandbox) -> None:
    task = get_programming_task("humaneval", data_dir, sandbox)
    examples = random.Random(1).sample(task.examples(), 50)
    programs = [e.reference + SPOIL.replace("{name}", e.meta["entry_point"]) for e in examples]
    outcomes = sandbox.run_many(task.job(e, program) for e, program in zip(examples, programs, strict=True))
    passed = [e.id for e, outcome in zip(examples, outcomes, strict=True) if outcome.passed]
    assert passed == []
    assert all(outcome.reason.startswith("tests: ") for outcome in outcomes)


def test_the_solution_of_the_next_problem_fails(data_dir: Path, sandbox: Sandbox) -> None:
    task = get_programming_task("mbpp", data_dir, sandbox)
    examples = task.examples("test")[:12]
    pairs = [(e, answer_with(task, e, other.reference)) for e, other in itertools.pairwise(examples)]
    assert not any(verdict.correct for verdict in task.grade_many(pairs))


def test_an_empty_text_and_a_refusal_fail(data_dir: Path, sandbox: Sandbox) -> None:
    for name in ("mbpp", "mbpp-instruct"):
        task = get_programming_task(name, data_dir, sandbox)
        example = task.examples()[0]
        for text in ("", "I cannot help with that."):
            assert task.grade(example, text).reason == "no program found"
    humaneval = get_programming_task("humaneval", data_dir, sandbox)
    assert not humaneval.grade(humaneval.examples()[0], "").correct


def test_humaneval_keeps_what_only_its_tests_use(data_dir: Path, sandbox: Sandbox) -> None:
    """Problem 50's tests call a helper that the entry point does not; the published post-processing drops it."""
    task = get_programming_task("humaneval", data_dir, sandbox)
    example = task.examples()[50]
    body = example.reference.removeprefix(example.question)
    assert "def encode_shift" in task.extract(example, f"```python\n{body}\n```")


def test_humaneval_takes_a_whole_function_or_a_body(data_dir: Path, sandbox: Sandbox) -> None:
    task = get_programming_task("humaneval", data_dir, sandbox)
    example = task.examples()[0]
    body = example.reference.removeprefix(example.question)
    for text in (f"```python\n{example.reference}\n```", f"```python\n{body}```", body):
        assert task.grade(example, text).correct


def test_mbpp_splits_are_the_published_ranges(data_dir: Path) -> None:
    task = get_task("mbpp", data_dir)
    assert {split: len(task.examples(split)) for split in task.splits} == {
        "train": 374,
        "validation": 90,
        "test": 500,
        "prompt": 10,
    }
    assert task.examples("test")[0].id == "mbpp/11"


def test_mbpp_with_too_few_asserts_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mbpp").mkdir()
    path = tmp_path / "mbpp" / "mbpp.jsonl"
    path.write_text(json.dumps({"task_id": 11, "text": "t", "code": "c", "test_list": ["assert 1"]}) + "\n")
    with pytest.raises(TadError, match=rf"{path}:1: field 'test_list' should hold at least three asserts"):
        get_task("mbpp", tmp_path).examples("test")


KODCODE = [
    {
        "style": "instruct",
        "subset": "Prefill",
        "question_id": "Prefill_0_I",
        "question": "Write a function `double(x)` that doubles.",
        "solution": "def double(x):\n    return 2 * x",
        "test": "from solution import double\n\ndef test_small():\n    assert double(2) == 4\n\ndef test_zero():\n    assert double(0) == 0\n",
        "gpt_difficulty": "easy",
    },
    {
        "style": "instruct",
        "subset": "Leetcode",
        "question_id": "Leetcode_7_I",
        "question": "Write a function `root(x)` that raises ValueError below zero.",
        "solution": "def root(x):\n    if x < 0:\n        raise ValueError\n    return x ** 0.5",
        "test_code": "import pytest\nfrom solution import root\n\ndef test_raises():\n    with pytest.raises(ValueError):\n        root(-1)\n",
        "gpt_difficulty": "medium",
    },
]


@pytest.fixture
def kodcode(tmp_path: Path, sandbox: Sandbox) -> ProgrammingTask:
    (tmp_path / "kodcode").mkdir()
    (tmp_path / "kodcode" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in KODCODE))
    task = get_task("kodcode", tmp_path)
    assert isinstance(task, ProgrammingTask)
    return task


def test_kodcode_reads_its_published_schema(kodcode: ProgrammingTask) -> None:
    first, second = kodcode.examples()
    assert (first.id, first.level, second.level) == ("kodcode/Prefill_0_I", "easy", "medium")
    assert kodcode.prompt(first).text == KODCODE[0]["question"]
    assert kodcode.reference(second) == KODCODE[1]["solution"]


def test_kodcode_solutions_pass_their_tests_and_wrong_ones_fail(kodcode: ProgrammingTask) -> None:
    first, second = kodcode.examples()
    verdicts = kodcode.grade_many(
        [
            (first, f"```python\n{first.reference}\n```"),
            (first, first.reference),
            (second, f"Sure!\n```\n{second.reference}\n```"),
            (first, "```python\ndef double(x):\n    return x + 1\n```"),
            (second, "def root(x):\n    return abs(x) ** 0.5"),
            (first, ""),
        ]
    )
    assert [verdict.correct for verdict in verdicts] == [True, True, True, False, False, False]
    assert verdicts[3].reason == "tests: AssertionError"
    assert verdicts[4].reason.startswith("tests: Failed: DID NOT RAISE")
