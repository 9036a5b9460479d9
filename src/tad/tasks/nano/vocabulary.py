"""Collects the tokenizer's vocabulary from the world itself.

Run `python -m tad.tasks.nano.vocabulary` after changing what the families say: it rewrites vocabulary.txt. Checkpoints
trained with another vocabulary keep their own tokenizer files.
"""

from __future__ import annotations

import json
from pathlib import Path

from tad.tasks.nano import WORLD
from tad.tasks.nano.task import INSTRUCTION
from tad.tasks.nano.tokenizer import pieces
from tad.tasks.task import privileged_prompt

# What chat templates put around a turn, and digits wherever they may stand.
_ALWAYS = ("user", "assistant", "system", "\n", "\n\n", "You", " are", " a", " helpful", " assistant", ".")
_SAMPLE = 40_000  # problems per family; the rarest piece occurs a few hundred times in them


def collect_vocabulary(sample: int = _SAMPLE) -> list[str]:
    """Every piece that occurs in the world, in a stable order: layout, digits, symbols, words."""
    found = {*_ALWAYS, *"0123456789", *(f" {digit}" for digit in range(10))}
    for family in WORLD.values():
        for index in range(sample):
            problem = family.problem("train", index)
            prompt = privileged_prompt(problem.question, problem.reference, INSTRUCTION).text
            for text in (problem.question, problem.solution, prompt):
                found.update(pieces(text))
    return sorted(found, key=_order)


def _order(piece: str) -> tuple[int, str, str]:
    bare = piece.strip()
    group = 0 if not bare else 1 if bare[0].isdigit() else 3 if bare[0].isalpha() else 2
    return group, bare, piece


if __name__ == "__main__":
    path = Path(__file__).with_name("vocabulary.txt")
    path.write_text("".join(json.dumps(piece) + "\n" for piece in collect_vocabulary()), encoding="utf-8")
