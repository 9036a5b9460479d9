"""The named prompt templates: what each benchmark offers, and how the templates of one differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tad.tasks import Prompt, get_task
from tad.tasks.sandbox import Sandbox

TEMPLATES = {
    "gsm8k": ("tad", "cot-zeroshot", "d3llm", "plain"),
    "math": ("tad", "zero-shot", "d3llm", "plain"),
    "humaneval": ("tad", "d3llm", "plain"),
    "humaneval-instruct": ("tad", "d3llm"),
    "mbpp": ("tad", "zero-shot", "d3llm", "plain"),
    "mbpp-instruct": ("tad", "d3llm"),
}


def prompts(name: str, data_dir: Path, number: int = 0) -> dict[str, Prompt]:
    task = get_task(name, data_dir)
    example = task.examples("test")[number]
    return {template: task.prompt(example, template) for template in task.templates}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_benchmark_has_its_named_templates(name: str) -> None:
    assert get_task(name).templates == TEMPLATES[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_asks_the_question_in_one_user_turn(name: str, data_dir: Path) -> None:
    task = get_task(name, data_dir)
    for example in task.examples("test")[::97]:
        for template in task.templates:
            prompt = task.prompt(example, template)
            assert [message.role for message in prompt.messages] == ["user"]
            assert example.question in prompt.text


def test_only_the_d3llm_templates_of_gsm8k_and_math_leave_the_chat(data_dir: Path) -> None:
    raw = {
        (name, template)
        for name in TEMPLATES
        for template, prompt in prompts(name, data_dir).items()
        if prompt.raw
    }
    assert raw == {("gsm8k", "d3llm"), ("math", "d3llm")}


def test_d3llm_shares_its_texts_with_other_templates_where_the_protocols_agree(data_dir: Path) -> None:
    gsm8k, math = prompts("gsm8k", data_dir), prompts("math", data_dir)
    assert gsm8k["d3llm"].text == gsm8k["cot-zeroshot"].text
    assert math["d3llm"].text == math["tad"].text
    for name in ("humaneval", "mbpp"):
        found = prompts(name, data_dir)
        assert found["d3llm"] == found["tad"]
    for name in ("humaneval-instruct", "mbpp-instruct"):
        found = prompts(name, data_dir)
        assert found["d3llm"] != found["tad"]


def test_the_other_templates_of_a_benchmark_are_all_different(data_dir: Path) -> None:
    for name in TEMPLATES:
        found = [prompt for template, prompt in prompts(name, data_dir).items() if template != "d3llm"]
        assert len(set(found)) == len(found)


def test_the_plain_template_of_mbpp_is_the_sentence_and_the_three_asserts(data_dir: Path) -> None:
    task = get_task("mbpp", data_dir)
    example = task.examples("test")[1]
    lines = task.prompt(example, "plain").text.split("\n")
    assert lines == [example.question, "", *example.meta["tests"][:3]]


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
