"""Recipes of a chain on the tiny model of the evaluation tests, seconds on a CPU; and the paper's datasets as their
repositories on the hub lay them out."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from tad.config import parse_recipe
from tad.pipeline import RunRecipe
from tad.pipeline.listener import Silent
from tad.pipeline.recipe import lay_over

GEN_LENGTH = 16


def shared_sections(world: Path) -> dict[str, Any]:
    task = f"jsonl:{world / 'questions.jsonl'}"
    return {
        "name": "tiny",
        "model": str(world / "llada"),
        "device": "cpu",
        "allow_contamination": True,  # there are twelve questions
        "collect": {
            "tasks": [{"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}}],
            "gen_length": GEN_LENGTH, "block": 8, "keep": "all", "shard_size": 6, "batch_size": 6,
        },
        "window": {"limit": 8, "states": 2},
        "distill": {
            "states": 2, "adapter": {"rank": 2, "dropout": 0.0}, "learning": {"lr": 1e-2, "steps": 3},
            "batch": {"size": 4, "micro": 4}, "precision": "fp32",
        },
        "evaluate": {
            "tasks": [{"name": task}], "batch_size": 12, "settings": {"block": 8},
            "thresholds": {"entropy": [0.5, 3.0], "confidence": [0.9, 0.1]},
        },
    }  # fmt: skip


def run_recipe(world: Path, **changes: Any) -> RunRecipe:
    own = {
        "students": {
            "quality": {"objective": {"name": "tad", "window": "quality"}},
            "speed": {"objective": {"name": "tad", "window": 2}},
        }
    }
    return parse_recipe(RunRecipe, lay_over(shared_sections(world) | own, changes))


class Listener(Silent):
    """Keeps what it is told; asks to stop before the n-th piece of work."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.lines: list[str] = []
        self.stages: list[str] = []
        self.settings: list[str] = []
        self.stop_after = stop_after

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def stage(self, title: str):
        self.stages.append(title)
        yield

    def decoding(self, setting):
        self.settings.append(setting.name)

    def stopping(self) -> bool:
        return self.stop_after is not None and len(self.settings) + len(self.stages) > self.stop_after


IN_BOTH = {
    "problem": "Compute $9 + 9$.",
    "solution": r"It is $\boxed{18}$.",
    "level": "Level 1",
    "type": "Algebra",
}


def write_repositories(root: Path) -> Path:
    """The datasets, three problems a split; one of MATH's is in both of its splits."""
    files: dict[str, list[dict[str, Any]]] = {}
    for split, first in (("train", 1), ("test", 4)):
        numbers = range(first, first + 3)
        files[f"gsm8k/main/{split}"] = [
            {"question": f"{n} + {n}?", "answer": f"So. #### {2 * n}"} for n in numbers
        ]
        sums = [
            {**IN_BOTH, "problem": f"Compute ${n} + {n}$.", "solution": rf"$\boxed{{{2 * n}}}$"}
            for n in numbers
        ]
        files[f"math/algebra/{split}"] = [*sums[:2], IN_BOTH]
    files["humaneval/openai_humaneval/test"] = [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n", "canonical_solution": "    return x\n",
         "test": "def check(candidate):\n    assert candidate(1) == 1\n", "entry_point": f"f{n}"}
        for n in range(2)
    ]  # fmt: skip
    files["mbpp/full/test"] = [
        {"task_id": n, "text": f"Write f{n}.", "code": f"def f{n}(x): return x", "test_list": [f"assert f{n}({x}) == {x}" for x in range(3)],
         "test_setup_code": ""}
        for n in (11, 12)
    ]  # fmt: skip
    files["kodcode/data/train"] = [
        {"question_id": f"k{n}", "question": f"Write g{n}.", "solution": f"def g{n}(x):\n    return x",
         "test": f"from solution import g{n}\n\ndef test_g():\n    assert g{n}(1) == 1\n"}
        for n in range(8)
    ]  # fmt: skip
    files["prm12k/train"] = [
        {"problem": f"Compute ${n}^2$.", "solution": rf"$\boxed{{{n * n}}}$", "answer": str(n * n), "unique_id": f"p{n}"}
        for n in (2, 3)
    ]  # fmt: skip
    for name, rows in files.items():
        path = root / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return root
