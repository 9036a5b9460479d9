"""The replay that is decoded when the report is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_world import GEN_LENGTH, recipe_of

from tad.errors import TadError
from tad.evaluation import evaluate
from tad.evaluation.report import Live, write_report
from tad.evaluation.report.replay import decode_scenes
from tad.models import LM, load


@pytest.fixture(scope="module")
def student(world: Path) -> LM:
    lm = load(world / "llada", device="cpu")
    lm.attach(rank=2)
    return lm


def test_a_prompt_is_decoded_by_base_and_student(lm: LM, student: LM) -> None:
    (scene,) = decode_scenes(Live(lm, student, prompt="why", gen_length=32), [])
    base, other = scene.sides
    assert (base.label, other.label) == ("base, one-by-one", "new, rank 2, tad")
    assert len(base.cells) == len(other.cells) == 32
    assert base.forwards >= other.forwards
    assert max(cell.step for cell in base.cells) <= base.forwards
    assert base.correct is None
    assert scene.prompt == "why"


def test_the_examples_of_a_run_are_decoded_and_graded(lm: LM, world: Path, tmp_path: Path) -> None:
    results = evaluate(lm, recipe_of(world), tmp_path / "run")
    live = Live(lm, decoder="fast-dllm", gen_length=32)
    done = write_report([results.folder], tmp_path / "p.html", live=live, resamples=5)
    text = done.page.read_text(encoding="utf-8")
    assert "the first of the task; decoded for this report" in text
    assert "base, fast-dllm" in text
    (scene,) = decode_scenes(Live(lm, decoder="one-by-one", gen_length=32), [results.folder])
    row = results.rows()[0]
    assert scene.title.endswith(row.id)
    assert scene.sides[0].correct is not None
    assert scene.sides[0].cells == scene.sides[1].cells


def test_an_example_is_chosen_by_its_id(lm: LM, world: Path, tmp_path: Path) -> None:
    results = evaluate(lm, recipe_of(world), tmp_path / "run")
    wanted = results.rows()[3].id
    (scene,) = decode_scenes(Live(lm, gen_length=32), [results.folder], wanted)
    assert scene.title.endswith(wanted)
    with pytest.raises(TadError, match="--example nothing"):
        decode_scenes(Live(lm, gen_length=32), [results.folder], "nothing")


def test_a_replay_without_a_question_is_refused(lm: LM) -> None:
    assert GEN_LENGTH == 16
    with pytest.raises(TadError, match="--prompt"):
        decode_scenes(Live(lm), [])
