"""GSM8K: grade-school word problems with a number as the answer.

Templates: `tad` (what TAD evaluated LLaDA with: the harness's zero-shot `gsm8k` text and a tail that asks for a box),
`cot-zeroshot` (what it evaluated Dream with: the harness's `gsm8k_cot_zeroshot`), `d3llm` (what d3LLM evaluated LLaDA
models with: that text again, continued without a chat), `plain` (the first text without the tail).
Extraction: `exact` compares numbers exactly wherever they are marked; `flexible` is the harness's published filter,
the last thing that looks like a number, compared as a string.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from tad.errors import TadError
from tad.tasks.dataset import DatasetTask
from tad.tasks.numeric import find_numbers, grade_number
from tad.tasks.source import Row, Source
from tad.tasks.task import Example, Prompt, Verdict

BOX_TAIL = r" Please reason step by step, and put your final answer within \boxed{}."


class Gsm8k(DatasetTask):
    name = "gsm8k"
    comparable = True
    splits = ("train", "test")
    templates = ("tad", "cot-zeroshot", "d3llm", "plain")
    source: ClassVar[Source] = Source(
        "gsm8k",
        hub_id="openai/gsm8k",
        hub_files={"train": ("main/train-*.parquet",), "test": ("main/test-*.parquet",)},
    )

    def __init__(self, data_dir: str | Path | None = None, extraction: str = "exact") -> None:
        super().__init__(data_dir)
        if extraction not in ("exact", "flexible"):
            raise TadError(f"gsm8k: extraction '{extraction}' should be exact or flexible")
        self.extraction = extraction

    def build(self, row: Row, split: str, index: int) -> Example:
        solution = row.text("answer")
        numbers = find_numbers(solution.rsplit("####", 1)[-1])
        if "####" not in solution or len(numbers) != 1:
            raise TadError(f"{row.place}: field 'answer' should end with '#### ' and a number")
        return Example(f"gsm8k/{split}/{index}", row.text("question"), solution, numbers[0].value)

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        self.check_template(template)
        if template in ("cot-zeroshot", "d3llm"):
            text = f"Q: {example.question}\nA: Let's think step by step."
            return Prompt.from_user(text, stop=("Q:", "</s>", "<|im_end|>"), raw=template == "d3llm")
        tail = BOX_TAIL if template == "tad" else ""
        stop = ("Question:", "</s>", "<|im_end|>")
        return Prompt.from_user(f"Question: {example.question}\nAnswer:{tail}", stop=stop)

    def grade(self, example: Example, text: str) -> Verdict:
        if self.extraction == "flexible":
            return grade_flexible(example, text)
        return grade_number(Fraction(example.answer), text)


def grade_flexible(example: Example, text: str) -> Verdict:
    """The harness's flexible-extract: string equality after dropping commas, dollar signs and a final full stop."""
    matches = [first or second for first, second in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)]
    if not matches:
        return Verdict(False, "no number found")
    gold = example.reference.rsplit("#### ", 1)[-1]
    taken, wanted = (re.sub(r"\.$", "", re.sub(r"[,$]", "", string)) for string in (matches[-1], gold))
    return Verdict(
        taken == wanted, "equal" if taken == wanted else f"different; expected {wanted}", matches[-1]
    )
