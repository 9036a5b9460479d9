"""Your own task: a file of questions with an answer or with tests.

A row of the jsonl (or jsonl.gz, or parquet) file has `question`, and either `answer` (a number, a LaTeX expression or
plain text) or `tests` (Python source, or a list of asserts, that a program must pass). Optional: `id`, `reference` (what
a teacher may read; default: the answer), `level`, `grader` (`number`, `math` or `text`; default: `number` if the answer
is one, else `math`). The options `template` and `instruction` word the prompts of the model and of its privileged teacher.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.tasks.code import fenced_or_all, parse
from tad.tasks.competition import Math, find_answer
from tad.tasks.dataset import DatasetTask
from tad.tasks.numeric import find_numbers, grade_number
from tad.tasks.programming import grade_programs, read_judge, shadowing_names
from tad.tasks.source import Row, read_rows
from tad.tasks.task import Example, Progress, Prompt, Verdict
from tad_sandbox import Job, Sandbox

GRADERS = ("number", "math", "text", "tests")


class Jsonl(DatasetTask):
    name = "jsonl"
    splits = ("all",)
    default_split = "all"
    templates = ("tad", "plain")

    def __init__(
        self,
        data_dir: str | Path | None = None,
        path: str | Path | None = None,
        template: str = "{question}",
        instruction: str = "",
        contained: bool = True,
        sandbox: Sandbox | None = None,
        judge: str = "apart",
    ) -> None:
        """`path` is the file; a relative one is looked up in `data_dir` if it is not here.

        `template` is the text put to the model, with `{question}` where the question stands; `instruction` is what a
        privileged prompt asks for behind the reference (empty: the usual one). Both should be in words the model knows.
        `judge` is that of programming tasks.
        """
        super().__init__(data_dir)
        if "{question}" not in template:
            raise TadError(f"task 'jsonl': option 'template' should contain {{question}}; it is {template!r}")
        self.template, self.instruction = template, instruction
        if path is None:
            raise TadError("task 'jsonl' needs a file: write jsonl:FILE")
        here = Path(path)
        self.path = here if here.is_file() or data_dir is None else Path(data_dir) / here
        self.sandbox = sandbox or Sandbox(contained=contained, together=read_judge(self.name, judge))
        self._math = Math()

    def rows(self, split: str) -> Iterable[Row]:
        return read_rows(self.path)

    def where(self, split: str | None = None) -> str:
        return str(self.path)

    def build(self, row: Row, split: str, index: int) -> Example:
        question = row.text("question")
        grader, answer = _read_gold(row)
        reference = row.get("reference", answer if isinstance(answer, str) else str(row.get("answer")))
        level = row.get("level")
        return Example(
            str(row.get("id", index)),
            question,
            str(reference),
            answer,
            level=None if level is None else str(level),
            meta={"grader": grader},
        )

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        form = self.template if template == "tad" else "{question}"
        return Prompt.from_user(form.replace("{question}", example.question))

    def can_vote(self, example: Example) -> bool:
        return example.meta["grader"] != "tests"

    def grade_many(
        self,
        pairs: Iterable[tuple[Example, str]],
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> list[Verdict]:
        pairs = list(pairs)
        chosen = {
            name: [n for n, (example, _) in enumerate(pairs) if example.meta["grader"] == name]
            for name in GRADERS
        }
        verdicts: dict[int, Verdict] = {}
        for number in chosen["number"]:
            verdicts[number] = grade_number(Fraction(pairs[number][0].answer), pairs[number][1])
        for number in chosen["text"]:
            verdicts[number] = _grade_text(*pairs[number])
        if progress is not None and verdicts:
            progress(len(verdicts))
        math = self._math.grade_many((pairs[number] for number in chosen["math"]), workers, progress)
        verdicts.update(zip(chosen["math"], math, strict=True))
        jobs = [
            Job(fenced_or_all(text), example.answer, names=shadowing_names(example.reference))
            for example, text in (pairs[n] for n in chosen["tests"])
        ]
        if jobs:
            tested = grade_programs(self.sandbox, jobs, workers, progress)
            verdicts.update(zip(chosen["tests"], tested, strict=True))
        return [verdicts[number] for number in range(len(pairs))]


def _read_gold(row: Row) -> tuple[str, Any]:
    if row.get("tests") is not None:
        tests = row["tests"]
        source = "\n".join(row.texts("tests")) if isinstance(tests, list) else row.text("tests")
        if not source.strip():
            raise TadError(f"{row.place}: field 'tests' is empty")
        if _only_defines(source):
            raise TadError(
                f"{row.place}: field 'tests' defines things and calls none; add the calls or bare asserts"
            )
        return "tests", source
    if row.get("answer") is None:
        raise TadError(
            f"{row.place}: field 'answer' or 'tests' is missing (the row has: {', '.join(sorted(row.values))})"
        )
    answer = str(row["answer"]).strip()
    numbers = find_numbers(answer)
    whole = len(numbers) == 1 and numbers[0].text == answer
    grader = row.get("grader", "number" if whole else "math")
    if grader not in GRADERS[:3]:
        raise TadError(f"{row.place}: field 'grader' is '{grader}', it should be number, math or text")
    if grader == "number":
        if not whole:
            raise TadError(f"{row.place}: field 'answer' is not a number: {answer!r}")
        return grader, numbers[0].value
    return grader, answer


def _only_defines(source: str) -> bool:
    """Whether tests consist of imports and definitions, so that every program would pass them."""
    tree = parse(source)
    idle = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return tree is not None and all(isinstance(node, idle) for node in tree.body)


def _grade_text(example: Example, text: str) -> Verdict:
    """Equality with the answer, or with what the text boxes, but for case and spacing."""
    given = find_answer(text) or text
    equal = " ".join(given.split()).casefold() == " ".join(str(example.answer).split()).casefold()
    return Verdict(equal, "equal" if equal else f"different; expected {example.answer}", given)
