"""HumanEval: complete a Python function from its signature and docstring.

`humaneval` is what TAD evaluated LLaDA with: its own wrapper around the harness's `humaneval` prompt, an answer in a
fence, sanitized together with the prompt. `humaneval-instruct` is what it evaluated Dream with: the harness's
`humaneval_instruct`, where the assistant's turn already holds the prompt inside an open fence and the model goes on.
d3LLM (template `d3llm`) put the first to LLaDA models as TAD does, and the second to Dream models in the words of Dream's
own evaluation, whose request opens a fence and does not close it. `plain` is the function's head alone.
"""

from __future__ import annotations

import ast
from typing import ClassVar

from tad.tasks.code import cut_python_fence, mentioned_names, parse, sanitize
from tad.tasks.programming import ProgrammingTask
from tad.tasks.source import Row, Source
from tad.tasks.task import Example, Prompt
from tad_sandbox import Job

REQUEST = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```\n"
D3LLM_REQUEST = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```{prompt}"
)
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


class HumanEval(ProgrammingTask):
    name = "humaneval"
    splits = ("test",)
    templates: ClassVar[tuple[str, ...]] = ("tad", "d3llm", "plain")
    source = Source(
        "humaneval",
        hub_id="openai/openai_humaneval",
        hub_files={"test": ("openai_humaneval/test-*.parquet",)},
    )

    def build(self, row: Row, split: str, index: int) -> Example:
        prompt, solution = row.text("prompt"), row.text("canonical_solution")
        meta = {"entry_point": row.text("entry_point")}
        return Example(row.text("task_id"), prompt, prompt + solution, row.text("test"), meta=meta)

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        if template == "plain":
            return Prompt.from_user(example.question, stop=STOP)
        # The space at the end is the published wrapper's. No stop strings: it keeps everything up to the end of text.
        return Prompt.from_user(REQUEST.format(prompt=example.question) + " ")

    def extract(self, example: Example, text: str) -> str:
        roots = {example.meta["entry_point"]} | mentioned_names(example.answer)
        return sanitize(f"{example.question}\n{cut_python_fence(text)}", roots)

    def job(self, example: Example, program: str) -> Job:
        entry = example.meta["entry_point"]
        return Job(program, f"{_helpers(example.question, entry)}{example.answer}\ncheck({entry})")


def _helpers(question: str, entry: str) -> str:
    """What a question defines beside the function it asks for: its tests use it, and not what a program made of it."""
    tree = parse(question)
    if tree is None or sum(isinstance(node, ast.FunctionDef) for node in tree.body) < 2:
        return ""
    tree.body = [node for node in tree.body if getattr(node, "name", None) != entry]
    return ast.unparse(tree) + "\n"


class HumanEvalInstruct(HumanEval):
    name = "humaneval-instruct"
    templates = ("tad", "d3llm")

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        prefix = f"Here is the completed function:\n```python\n{example.question}\n"
        request = D3LLM_REQUEST if template == "d3llm" else REQUEST
        return Prompt.from_user(request.format(prompt=example.question), prefix=prefix, stop=STOP)

    def extract(self, example: Example, text: str) -> str:
        return example.question + text.split("```")[0]
