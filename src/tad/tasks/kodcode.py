"""KodCode: synthetic programming questions with a solution and pytest-style tests; for collecting trajectories.

The published columns are question, solution and test (`test_code` in some releases), with the tests importing from a
module `solution`. Tests that are more than plain functions are run by pytest, if it is installed next to tad.
"""

from __future__ import annotations

from typing import ClassVar

from tad.tasks.code import fenced_or_all
from tad.tasks.programming import ProgrammingTask
from tad.tasks.source import Row, Source
from tad.tasks.task import Example, Prompt
from tad_sandbox import Job, Limits


class KodCode(ProgrammingTask):
    name = "kodcode"
    splits = ("train",)
    default_split = "train"
    templates = ("tad",)
    # The tests may import what they like (pytest, numpy, ...), and the published filter gave them 30 seconds.
    packages = True
    limits: ClassVar[Limits] = Limits(seconds=60.0, cpu_seconds=30, memory=2 << 30)
    source = Source(
        "kodcode",
        hub_id="KodCode/KodCode-V1-SFT-R1",
        hub_files={"train": ("data/train-*.parquet",)},
    )

    def build(self, row: Row, split: str, index: int) -> Example:
        tests = row.text(
            "test" if row.get("test") is not None or row.get("test_code") is None else "test_code"
        )
        name = f"kodcode/{row.get('question_id', index)}"
        meta = {"subset": row.get("subset"), "style": row.get("style")}
        level = row.get("gpt_difficulty")
        return Example(name, row.text("question"), row.text("solution"), tests, level=level, meta=meta)

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        return Prompt.from_user(example.question)

    def extract(self, example: Example, text: str) -> str:
        return fenced_or_all(text)

    def job(self, example: Example, program: str) -> Job:
        return Job(program, example.answer, as_module=True)
