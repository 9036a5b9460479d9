"""MBPP: write a Python function from a sentence and three asserts.

`mbpp` is what TAD evaluated LLaDA with: the harness's three-shot `mbpp` text in one user turn, the answer sanitized.
`mbpp-instruct` is what it evaluated Dream with: the harness's `mbpp_instruct` without examples, where the assistant's
turn opens a fence. d3LLM (template `d3llm`) put the first to LLaDA models as TAD does, and the second to Dream models in
the words of Dream's own evaluation; its scripts ask for four examples there, which the task file's zero overrules.
`plain` is the sentence and the asserts. Problems 1-10 are for prompts, 11-510 test, 511-600 validation, 601-974 train.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from tad.errors import TadError
from tad.tasks.code import cut_python_fence, sanitize
from tad.tasks.programming import ProgrammingTask, shadowing_names
from tad.tasks.source import Row, Source
from tad.tasks.task import Example, Prompt
from tad_sandbox import Job

RANGES = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}

# The published three examples (problems 2, 3 and 4), with the line ends of the dataset.
SHOTS = (
    (
        "Write a function to find the similar elements from the given two tuple lists.",
        (
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ),
        "def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & set(test_tup2))\r\n  return (res) ",
    ),
    (
        "Write a python function to identify non-prime numbers.",
        (
            "assert is_not_prime(2) == False",
            "assert is_not_prime(10) == True",
            "assert is_not_prime(35) == True",
        ),
        "import math\r\ndef is_not_prime(n):\r\n    result = False\r\n    for i in range(2,int(math.sqrt(n)) + 1):\r\n"
        "        if n % i == 0:\r\n            result = True\r\n    return result",
    ),
    (
        "Write a function to find the largest integers from a given list of numbers using heap queue algorithm.",
        (
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ),
        "import heapq as hq\r\ndef heap_queue_largest(nums,n):\r\n  largest_nums = hq.nlargest(n, nums)\r\n  return largest_nums",
    ),
)


class Mbpp(ProgrammingTask):
    name = "mbpp"
    splits = ("train", "validation", "test", "prompt")
    templates: ClassVar[tuple[str, ...]] = ("tad", "zero-shot", "d3llm", "plain")
    source = Source(
        "mbpp",
        hub_id="google-research-datasets/mbpp",
        hub_files={split: (f"full/{split}-*.parquet",) for split in RANGES},
        whole="mbpp",
    )

    def rows(self, split: str) -> Iterable[Row]:
        return (row for row in super().rows(split) if row["task_id"] in RANGES[split])

    def build(self, row: Row, split: str, index: int) -> Example:
        asserts = row.texts("test_list")
        if len(asserts) < 3:
            raise TadError(f"{row.place}: field 'test_list' should hold at least three asserts")
        meta = {"tests": tuple(asserts), "setup": row.get("test_setup_code", "")}
        return Example(
            f"mbpp/{row['task_id']}", row.text("text"), row.text("code"), "\n".join(asserts[:3]), meta=meta
        )

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        if template == "plain":
            return Prompt.from_user(f"{example.question}\n\n{_listing(example.meta['tests'])}")
        shots = SHOTS if template in ("tad", "d3llm") else ()
        shown = "".join(f"{_request(text, tests)}{code}\n[DONE]\n\n" for text, tests, code in shots)
        return Prompt.from_user(shown + _request(example.question, example.meta["tests"]), stop=("[DONE]",))

    def extract(self, example: Example, text: str) -> str:
        return sanitize(cut_python_fence(text))

    def job(self, example: Example, program: str) -> Job:
        tests = f"{example.meta['setup']}\n{example.answer}"
        return Job(program, tests, names=shadowing_names(example.reference))


class MbppInstruct(Mbpp):
    name = "mbpp-instruct"
    templates = ("tad", "d3llm")

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        tests = example.meta["tests"]
        if template == "d3llm":
            # The published task stops at the closing fence; here it stays, because the grader looks for it.
            request = _request(example.question, tests).removesuffix("\n[BEGIN]\n")
            return Prompt.from_user(request, prefix="Here is the completed function:\n```python\n")
        content = (
            f"You are an expert Python programmer, and here is your task:\n{example.question}\n"
            f"Your code should pass these tests:\n{_listing(tests)}"
        )
        return Prompt.from_user(content, prefix="\n```python\n")

    def extract(self, example: Example, text: str) -> str:
        """What stands before the next fence: the prefix has opened one, and without a closing one nothing counts."""
        for block in text.split("```")[:-1]:
            program = re.sub(r"^\s*(?:python|py)[ \t]*\n", "", block)
            if program.strip():
                return program
        return ""


def _listing(tests: tuple[str, ...]) -> str:
    return "\n".join(tests[:3])


def _request(text: str, tests: tuple[str, ...]) -> str:
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        f"Your code should pass these tests:\n\n{_listing(tests)}\n[BEGIN]\n"
    )
