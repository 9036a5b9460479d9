"""A tiny model of each family, and a file of questions of which the first family's model answers every other one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from eval_world import EXAMPLES, GEN_LENGTH
from study_world import Listener, rounds_recipe, study_recipe

from tad.decoding import decode
from tad.evaluation.study import Study
from tad.models import DREAM, LLADA, LM, load
from tiny_lm import write_checkpoint


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
def _no_pictures_of_windows() -> Iterator[None]:
    """They are tested with the window; here every store would draw two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tad.trajectories.window.plot_decay", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def done(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:
    out, watch = tmp_path_factory.mktemp("study"), Listener()
    assert Study(study_recipe(world), out, watch).run()
    return out, watch


@pytest.fixture(scope="module")
def rounds(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:
    out, watch = tmp_path_factory.mktemp("rounds"), Listener()
    assert Study(rounds_recipe(world), out, watch).run()
    return out, watch
