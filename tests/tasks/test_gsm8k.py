"""GSM8K graded against itself and against what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tad.tasks import get_task
from tad.tasks.numeric import format_number


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_reference_is_right_and_every_wrong_answer_is_wrong(
    data_dir: Path, split: str, count: int
) -> None:
    task, flexible = get_task("gsm8k", data_dir), get_task("gsm8k", data_dir, extraction="flexible")
    examples = task.examples(split)
    assert len(examples) == count
    assert all(flexible.grade(example, example.reference).correct for example in examples)
    for example, following in zip(examples, [*examples[1:], examples[0]], strict=True):
        assert task.grade(example, task.reference(example)).correct, example.id
        for answer in (following.answer, example.answer + 1, -example.answer):
            for text in (f"#### {format_number(answer)}", rf"So it is \boxed{{{format_number(answer)}}}."):
                assert task.grade(example, text).correct == (answer == example.answer), (example.id, text)
        assert not task.grade(example, "").correct


def test_the_published_filter_rejects_what_the_exact_grader_reads(data_dir: Path) -> None:
    example = get_task("gsm8k", data_dir).examples("test")[0]
    exact, flexible = get_task("gsm8k"), get_task("gsm8k", extraction="flexible")
    assert example.answer == 18
    for text, flexibly in {
        r"\boxed{18}": True,
        "She makes $18.": True,
        "She makes $18.00": False,
        "18 dollars ...": False,
        "The answer is 18. Check: 9 * 2": False,
    }.items():
        assert exact.grade(example, text).correct, text
        assert flexible.grade(example, text).correct == flexibly, text
