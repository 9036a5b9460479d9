r"""Prompts equal the published protocol, character by character.

`published_prompts.json` was rendered from the published sources, not from this package: the task files of
lm-evaluation-harness 0.4.9.2 (the version TAD's evaluation pinned) through its template engine, and the wrapper strings
of TAD's LLaDA evaluation; for `d3llm`, those of harness 0.4.9 (the version d3LLM pinned), of the fork with Dream's task
files that d3LLM evaluated Dream with, and the wrapper strings of its LLaDA evaluation. Three rows of each benchmark, with:

- gsm8k `tad`: harness `gsm8k`, zero-shot, plus TAD's tail that asks for \boxed{}. `plain`: without the tail.
  `cot-zeroshot`: harness `gsm8k_cot_zeroshot`, which TAD used for Dream.
- math `tad`: harness `minerva_math`, its four fixed examples and the problem in one user turn, for both families.
- humaneval: harness `humaneval` inside TAD's request (with its final space). humaneval-instruct: harness task of that
  name, the assistant's turn opened with the function to complete.
- mbpp: harness `mbpp`, three fixed examples (carriage returns included). mbpp-instruct: harness task, no examples.
- `d3llm`: gsm8k_cot_zeroshot and minerva_math as plain text, humaneval and mbpp in a chat turn, and Dream's own
  humaneval_instruct and mbpp_instruct (whose stop string, the closing fence, is left to the grader).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tad.tasks import Prompt, get_task
from tad.tasks.source import Row

PUBLISHED = json.loads(Path(__file__).with_name("published_prompts.json").read_text(encoding="utf-8"))


def build_prompt(case: dict[str, Any]) -> Prompt:
    task: Any = get_task(case["task"])
    example = task.build(Row(case["row"], "here"), case["split"], case["index"])
    return task.prompt(example, case["template"])


@pytest.mark.parametrize(
    "case", PUBLISHED, ids=lambda case: f"{case['task']}-{case['template']}-{case['index']}"
)
def test_the_prompt_is_the_published_one(case: dict[str, Any]) -> None:
    prompt = build_prompt(case)
    assert [message.role for message in prompt.messages] == ["user"]
    assert prompt.messages[0].content == case["content"]
    assert prompt.prefix == case["prefix"]
    assert list(prompt.stop) == case["stop"]
    assert prompt.raw == case.get("raw", False)


def test_three_examples_of_each_benchmark_are_pinned() -> None:
    for task in ("gsm8k", "math", "humaneval", "humaneval-instruct", "mbpp", "mbpp-instruct"):
        for template in ("tad", "d3llm"):
            assert sum(case["task"] == task and case["template"] == template for case in PUBLISHED) == 3


def test_no_prompt_contains_the_answer(data_dir: Path) -> None:
    for name in ("gsm8k", "math", "humaneval", "humaneval-instruct", "mbpp", "mbpp-instruct"):
        task = get_task(name, data_dir)
        for example in task.examples("test")[:50]:
            solution = task.reference(example).removeprefix(example.question)
            for template in task.templates:
                prompt = task.prompt(example, template)
                assert solution not in prompt.text + prompt.prefix
