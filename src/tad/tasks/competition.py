"""Competition mathematics: MATH for evaluation, PRM12K for collection.

Templates: `tad` (the harness's `minerva_math`, four fixed worked examples in the one user turn, for LLaDA and Dream
alike), `zero-shot` (the same without the examples; what d3LLM evaluated Dream models with), `d3llm` (what it evaluated
LLaDA models with: the text of `tad`, continued without a chat), `plain` (the problem alone).
Extraction: `box` compares the last box with the gold answer, first as strings, then through math-verify; a text without
a box is read by math-verify as a whole. `math-verify` is the harness's published metric of that name: gold solution and
text both go to math-verify unprepared. The harness's other metric, an exact match of "The final answer is ...", is not
offered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from tad.errors import TadError
from tad.tasks.dataset import DatasetTask
from tad.tasks.equivalence import Pair, compare_many
from tad.tasks.latex import last_boxed, normalize, number_base, tidy
from tad.tasks.source import Row, Source
from tad.tasks.task import Example, Progress, Prompt, Verdict

_FINAL_ANSWER = re.compile(r"final answer is:?\s*(.+?)\.?\s*I hope it is correct", re.IGNORECASE | re.DOTALL)
_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class Math(DatasetTask):
    name = "math"
    comparable = True
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    templates = ("tad", "zero-shot", "d3llm", "plain")
    source: ClassVar[Source] = Source(
        "math",
        hub_id="EleutherAI/hendrycks_math",
        hub_files={
            split: tuple(f"{subject}/{split}-*.parquet" for subject in _SUBJECTS)
            for split in ("train", "test")
        },
    )

    def __init__(self, data_dir: str | Path | None = None, extraction: str = "box") -> None:
        super().__init__(data_dir)
        if extraction not in ("box", "math-verify"):
            raise TadError(f"{self.name}: extraction '{extraction}' should be box or math-verify")
        self.extraction = extraction

    def build(self, row: Row, split: str, index: int) -> Example:
        solution = row.text("solution")
        answer = last_boxed(solution)
        if answer is None:
            raise TadError(rf"{row.place}: field 'solution' should hold the answer in \boxed{{...}}")
        meta = {"subject": row.get("type")}
        return Example(
            f"math/{split}/{index}", row.text("problem"), solution, answer, level=row.get("level"), meta=meta
        )

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        if template == "plain":
            return Prompt.from_user(example.question)
        shots = "" if template == "zero-shot" else minerva_shots()
        text = f"{shots}Problem:\n{example.question}\n\nSolution:"
        return Prompt.from_user(text, stop=("Problem:",), raw=template == "d3llm")

    def grade_many(
        self,
        pairs: Iterable[tuple[Example, str]],
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> list[Verdict]:
        pairs = list(pairs)
        requests: dict[int, Pair] = {}
        verdicts: dict[int, Verdict] = {}
        for number, (example, text) in enumerate(pairs):
            answer = find_answer(text)
            if not text.strip():
                verdicts[number] = Verdict(False, "empty text")
            elif self.extraction == "math-verify":
                requests[number] = Pair(example.reference, text, gold_whole=False, target_whole=False)
            elif answer is None:
                requests[number] = Pair(tidy(example.answer), text, target_whole=False)
            elif normalize(answer) == normalize(example.answer):
                verdicts[number] = Verdict(True, "same string", answer)
            elif number_base(answer) and number_base(example.answer) not in (None, number_base(answer)):
                verdicts[number] = Verdict(False, f"another base; expected {example.answer}", answer)
            else:
                requests[number] = Pair(tidy(example.answer), tidy(answer))
        if progress is not None and verdicts:
            progress(len(verdicts))
        if requests:
            compared = compare_many(list(requests.values()), workers, progress=progress)
            for (number, _), comparison in zip(requests.items(), compared, strict=True):
                extracted = find_answer(pairs[number][1]) or comparison.read
                reason = (
                    comparison.reason
                    if comparison.equal
                    else f"{comparison.reason}; expected {pairs[number][0].answer}"
                )
                verdicts[number] = Verdict(comparison.equal, reason, extracted)
        return [verdicts[number] for number in range(len(pairs))]


class Prm12k(Math):
    """The 12,000-problem training split published with PRM800K: for collection, and never next to `math` evaluation."""

    name = "prm12k"
    splits = ("train",)
    default_split = "train"
    source = Source("prm12k")

    def build(self, row: Row, split: str, index: int) -> Example:
        meta = {"subject": row.get("subject"), "unique_id": row.get("unique_id")}
        level = row.get("level")
        return Example(
            f"prm12k/{row.get('unique_id', index)}",
            row.text("problem"),
            row.text("solution"),
            row.text("answer"),
            level=None if level is None else str(level),
            meta=meta,
        )


@cache
def minerva_shots() -> str:
    """The four worked examples of the published protocol, each followed by an empty line."""
    text = files("tad.tasks").joinpath("prompts/minerva_math_4shot.txt").read_text(encoding="utf-8")
    return text.rstrip("\n") + "\n\n"


def find_answer(text: str) -> str | None:
    """The last box, else what the protocol's closing sentence states; None if the text has neither."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    stated = _FINAL_ANSWER.findall(text)
    return stated[-1].strip().strip("$").strip() if stated else None
