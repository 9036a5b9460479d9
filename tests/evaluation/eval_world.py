"""A tiny model of each family, a file of questions of which the first family's model answers every other one, and recipes,
rows and results for the tests of evaluation, of whole chains and of the laboratory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tad.config import parse_recipe
from tad.decoding import decode
from tad.evaluation import EvalRecipe, Results, Row
from tad.models import DREAM, LLADA, LM, load
from tiny_lm import write_checkpoint

EXAMPLES = 12
GEN_LENGTH = 16


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    for family in (LLADA, DREAM):
        write_checkpoint(folder / family.name, family)
    lm = load(folder / "llada", device="cpu")
    questions = [f"{'why ' * (1 + i % 5)}{i}" for i in range(EXAMPLES)]
    rows = decode(lm, [lm.encode(question) for question in questions], "one-by-one", GEN_LENGTH, block=8)
    lines = []
    for i, (question, row) in enumerate(zip(questions, rows, strict=True)):
        known = lm.decode(row.answer).strip()
        assert known
        answer = known if i % 2 == 0 else "something else"
        lines.append({"question": question, "answer": answer, "grader": "text", "level": 1 + i % 3})
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def lm(world: Path) -> LM:
    return load(world / "llada", device="cpu")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real benchmark data: TAD_DATA, else a directory next to the repository."""
    chosen = os.environ.get("TAD_DATA")
    directory = Path(chosen) if chosen else Path(__file__).resolve().parents[3] / "shared" / "data"
    if not directory.is_dir():
        pytest.skip("needs the benchmark data: set TAD_DATA to a directory that holds it")
    return directory


@pytest.fixture(scope="module", autouse=True)
def no_pictures_of_windows() -> Iterator[None]:
    """They are tested with the window; here every store would draw two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tad.trajectories.window.plot_decay", lambda *_: [])
        yield


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
