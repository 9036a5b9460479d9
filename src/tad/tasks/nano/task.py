r"""The nano families as tasks: prompts and graders.

Word problems end in `#### n`, maths in `\boxed{n}`; the last one in the text counts. Code runs with its hidden tests in the
sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from tad.errors import TadError
from tad.tasks.code import fenced_or_all
from tad.tasks.nano import SPLITS, WORLD, Problem, hidden_tests
from tad.tasks.programming import grade_programs
from tad.tasks.task import Example, Progress, Prompt, Task, Verdict, privileged_prompt
from tad_sandbox import Job, Limits, Sandbox

SIZES = {"train": 10_000, "validation": 1_024, "test": 1_024}
INSTRUCTION = "Show every step."
_LIMITS = Limits(seconds=5.0, cpu_seconds=2)


class NanoTask(Task):
    """One family. `size` is how many problems of a split to give, `seed` picks another world of the same kind."""

    splits: ClassVar[tuple[str, ...]] = SPLITS
    instruction = INSTRUCTION

    def __init__(self, data_dir: str | Path | None = None, size: int | None = None, seed: int = 0) -> None:
        if size is not None and size < 1:
            raise TadError(f"task '{self.name}': size={size} gives no examples; use 1 or more")
        self.size, self.seed = size, seed

    def examples(self, split: str | None = None) -> list[Example]:
        """The first problems of a split, without repeated questions: the same mix of levels at any size where the family
        has one, so that small samples are as hard as large ones."""
        split = self.check_split(split)
        levels = len(WORLD[self.name].mix or (0,))
        found: dict[str, Example] = {}
        drawn, kept = [0] * levels, [0] * levels  # of each level
        while len(found) < self.count(split):
            level = len(found) % levels
            example = self.example(split, level + levels * drawn[level])
            drawn[level] += 1
            if example.question not in found:
                found[example.question] = example
                kept[level] += 1
            elif drawn[level] > max(1000, 20 * kept[level]):
                raise TadError(
                    f"task '{self.name}': split '{split}' has about {len(found)} distinct problems; ask for a smaller size"
                )
        return list(found.values())

    def count(self, split: str | None = None) -> int:
        return self.size or SIZES[self.check_split(split)]

    def example(self, split: str, index: int) -> Example:
        """The example at an index; there is no last one."""
        family = WORLD[self.name]
        problem = family.problem(split, index, self.seed)
        return Example(
            id=f"{family.label}/{split}/{index}",
            question=problem.question,
            reference=problem.reference,
            answer=self.answer(problem),
            level=str(problem.level),
            meta={"kind": problem.kind, "solution": problem.solution},
        )

    def answer(self, problem: Problem) -> object:
        return problem.answer

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        return Prompt.from_user(example.question)

    def privileged(self, example: Example) -> Prompt:
        """What the teacher is asked: the question with its terse reference."""
        return privileged_prompt(example.question, self.reference(example), self.instruction)


class NanoNumber(NanoTask):
    """A family whose answer is a whole number behind a marker."""

    marker: ClassVar[re.Pattern[str]]
    marker_text: ClassVar[str]
    comparable = True

    def grade(self, example: Example, text: str) -> Verdict:
        found = self.marker.findall(text)
        if not found:
            return Verdict(False, f"no {self.marker_text} in the text")
        correct = int(found[-1]) == example.answer
        return Verdict(correct, "equal" if correct else f"{found[-1]} is not {example.answer}", found[-1])


class NanoWord(NanoNumber):
    name = "nano-word"
    marker = re.compile(r"####\s*(-?[0-9]{1,9})(?![0-9])")
    marker_text = "'#### number'"


class NanoMath(NanoNumber):
    name = "nano-math"
    marker = re.compile(r"\\boxed\{\s*(-?[0-9]{1,9})\s*\}")
    marker_text = "\\boxed{number}"


class NanoCode(NanoTask):
    """`answer` holds the hidden tests."""

    name = "nano-code"

    def answer(self, problem: Problem) -> object:
        return hidden_tests(problem)

    def grade_many(
        self,
        pairs: Iterable[tuple[Example, str]],
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> list[Verdict]:
        jobs = [Job(fenced_or_all(text), str(example.answer)) for example, text in pairs]
        return grade_programs(Sandbox(_LIMITS), jobs, workers, progress)
