"""Recipes, rows and results for the tests of evaluation."""

from __future__ import annotations

from pathlib import Path

from tad.config import parse_recipe
from tad.evaluation import EvalRecipe, Results, Row

EXAMPLES = 12
GEN_LENGTH = 16


def recipe_of(world: Path, family: str = "llada", limit: int | None = None, **changes: object) -> EvalRecipe:
    """One token at a time on the file, with which every other example is right."""
    task = {"name": f"jsonl:{world / 'questions.jsonl'}", "limit": limit}
    values = {
        "model": str(world / family),
        "tasks": [task],
        "decoder": "one-by-one",
        "settings": {"block": 8},
        "gen_length": GEN_LENGTH,
        "batch_size": 4,
        "device": "cpu",
    }
    return parse_recipe(EvalRecipe, values | changes)


def content(results: Results) -> list[dict]:
    """The rows without what the machine adds."""
    return [
        {k: v for k, v in row.as_record().items() if k not in ("seconds", "share")} for row in results.rows()
    ]


def made_row(**changes: object) -> Row:
    """A row by hand."""
    values = {
        "task": "made", "template": "tad", "id": "0", "level": None, "question": "q", "prompt": "p", "text": "t",
        "correct": True, "reason": "equal", "extracted": "t", "tokens": 10, "tokens_all": 16, "forwards": 5,
        "seconds": 1.0, "share": 1.0, "ids": [], "steps": [],
    }  # fmt: skip
    return Row(**{**values, **changes})
