"""The nano families as tasks: prompts, references and graders."""

from __future__ import annotations

import pytest

from tad.errors import TadError
from tad.tasks import get_task

NAMES = ["nano-word", "nano-math", "nano-code"]


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_distinct_and_their_prompt_is_the_question_alone(name: str) -> None:
    task = get_task(name, size=200)
    examples = task.examples("test")
    assert len({example.question for example in examples}) == len(examples) == 200
    for example in examples:
        prompt = task.prompt(example).text
        assert prompt == example.question
        assert example.meta["solution"] not in prompt


@pytest.mark.parametrize("name", NAMES)
def test_the_privileged_prompt_holds_question_reference_and_instruction(name: str) -> None:
    task = get_task(name, size=1)
    (example,) = task.examples("test")
    expected = f"Question: {example.question}\nReference Answer: {example.reference}\nShow every step."
    assert task.privileged(example).text == expected


@pytest.mark.parametrize("name", ["nano-word", "nano-math"])
def test_a_solution_is_correct_and_another_number_or_no_number_is_not(name: str) -> None:
    task = get_task(name, size=150)
    for example in task.examples("test"):
        solution = example.meta["solution"]
        assert task.grade(example, solution).correct
        assert not task.grade(example, solution.replace(f"#### {example.answer}", f"#### {example.answer + 1}")
                              .replace(f"boxed{{{example.answer}}}", f"boxed{{-{example.answer}1}}")).correct  # fmt: skip
        assert not task.grade(example, f"The answer is {example.answer}").correct
        assert not task.grade(example, "").correct


def test_the_last_marked_number_counts() -> None:
    task = get_task("nano-word", size=1)
    (example,) = task.examples("test")
    assert task.grade(example, f"#### 1\n#### {example.answer}").correct
    assert not task.grade(example, f"#### {example.answer}\n#### {example.answer + 1}").correct
    assert not task.grade(example, f"#### {example.answer}7").correct


@pytest.mark.sandbox
def test_a_solution_in_code_passes_in_the_sandbox_and_a_broken_one_does_not() -> None:
    task = get_task("nano-code", size=6)
    examples = task.examples("test")
    good = [(example, example.meta["solution"]) for example in examples]
    fenced = [(example, f"```python\n{text}\n```") for example, text in good]
    bad = [(example, text.replace("return ", "return 1 + 0 * len(str(") + "))") for example, text in good]
    assert all(verdict.correct for verdict in task.grade_many(good + fenced, workers=1))
    assert not any(verdict.correct for verdict in task.grade_many(bad, workers=1))
    assert not task.grade(examples[0], "").correct


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(TadError, match="size=0"):
        get_task("nano-word", size=0)


def test_more_problems_than_there_are_is_an_error_not_an_endless_loop() -> None:
    task = get_task("nano-word", size=10)
    task.example = lambda split, index: get_task("nano-word").example(split, index % 5)
    with pytest.raises(TadError, match="distinct problems"):
        task.examples("test")
