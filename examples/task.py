"""A task of one's own with a grader of one's own: write a word backwards.

    python examples/task.py nano-llada --out runs/backwards

For questions in a file and answers that a grader of `tad` can judge, `jsonl:FILE` needs no code. A task in code is for
questions that are made, or a verdict that nothing here gives. Named in a plugin (docs/reference/plugins.md), it works in every
command: tad eval nano-llada --tasks backwards.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, ClassVar

import tad
from tad.evaluation import EvalRecipe, evaluate
from tad.tasks import Example, Prompt, Task, Verdict, register_task

WORDS = ("apple", "river", "stone", "cloud", "garden", "window", "basket", "pencil", "yellow", "silver")


class Backwards(Task):
    """Options of the task are keyword arguments beside `data_dir`; recipes give them under `options`."""

    name: ClassVar[str] = "backwards"
    splits: ClassVar[tuple[str, ...]] = ("train", "test")

    def __init__(self, data_dir: Any = None, size: int = 8) -> None:
        self.size = size

    def examples(self, split: str | None = None) -> list[Example]:
        split = self.check_split(split)
        draws = random.Random(f"backwards {split}")  # the same questions at every call
        return [self._example(f"{split}/{n}", draws.choice(WORDS)) for n in range(self.size)]

    def _example(self, name: str, word: str) -> Example:
        reference = f"From the last letter to the first: {', '.join(word[::-1])}. Answer: {word[::-1]}"
        return Example(name, f"Write {word!r} backwards.", reference, word[::-1])

    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        return Prompt.from_user(f"{example.question} End with 'Answer:' and the word.")

    def grade(self, example: Example, text: str) -> Verdict:
        """The last word counts; `extracted` and the reason are kept beside every answer."""
        said = text.split()[-1].strip(".'\"").lower() if text.split() else ""
        return Verdict(said == example.answer, "equal" if said == example.answer else "differs", said)


register_task("backwards", f"{__name__}:Backwards")  # 'module:class', imported when the task is asked for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=Path("runs/backwards"))
    parser.add_argument("--gen-length", type=int, default=64)
    given = parser.parse_args()
    tasks = [{"name": "backwards", "options": {"size": 8}}]
    recipe = EvalRecipe(model=given.model, tasks=tasks, decoder="tad", gen_length=given.gen_length)
    results = evaluate(tad.load(given.model), recipe, given.out)
    for row in results.rows():
        print(
            f"{row.id}: {row.reason}, {row.tokens / row.forwards:.1f} tokens per forward, {row.extracted!r}"
        )


if __name__ == "__main__":
    main()
