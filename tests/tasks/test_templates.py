"""The named prompt templates: what each asks, and how those of one benchmark differ. Their texts are in test_prompts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tad.tasks import get_task
from tad_sandbox import Sandbox

BENCHMARKS = ("gsm8k", "math", "humaneval", "humaneval-instruct", "mbpp", "mbpp-instruct")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_template_asks_the_question_in_one_user_turn_and_in_its_own_words(
    name: str, data_dir: Path
) -> None:
    task = get_task(name, data_dir)
    for example in task.examples("test")[::97]:
        prompts = {template: task.prompt(example, template) for template in task.templates}
        for prompt in prompts.values():
            assert [message.role for message in prompt.messages] == ["user"]
            assert example.question in prompt.text
        prompts.pop("d3llm")  # where the protocols agree, it is `tad`
        assert len(set(prompts.values())) == len(prompts)


@pytest.mark.parametrize("name", ["humaneval-instruct", "mbpp-instruct"])
def test_an_answer_to_the_d3llm_template_of_an_instruct_task_passes_up_to_its_closing_fence(
    name: str, data_dir: Path, sandbox: Sandbox
) -> None:
    task = get_task(name, data_dir, sandbox=sandbox)
    example = task.examples("test")[2]
    prompt = task.prompt(example, "d3llm")
    opened = prompt.prefix.split("```python\n")[1].rstrip("\n")  # what the assistant's turn already holds
    program = task.reference(example).removeprefix(opened)
    answer = prompt.cut(f"{program}\n```\nThis function does it.")
    assert task.grade(example, answer).correct
    assert not task.grade(example, answer.replace("return", "raise ValueError #")).correct
