"""`tad init`: a recipe for one's own questions that `tad run` accepts, what it warns of and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tad.cli import app
from tad.config import load_recipe
from tad.errors import TadError
from tad.pipeline.own_data import warn_of_few, write_recipe
from tad.pipeline.recipe import RunRecipe
from tad.training.batches import warn_of_epochs
from tad.trajectories.store import ShardStats, StoreMeta, TrajectoryStore
from tiny_lm import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"tad": {"gen_length": 64}}')
    return str(folder)


def write_questions(path: Path, count: int, first: int = 0) -> Path:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_file_becomes_a_recipe_with_every_fifth_question_held_out(tmp_path: Path, model: str) -> None:
    data, out = write_questions(tmp_path / "all.jsonl", 16), tmp_path / "my.yaml"
    words = ["init", "--data", str(data), "--model", model, "--out", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert f"tad run {out}" in done.stdout
    assert "4 test questions" in done.stderr
    recipe = load_recipe(RunRecipe, out)
    recipe.check()
    assert (recipe.collect_recipe().gen_length, recipe.collect_recipe().block) == (64, 32)
    parts = [(tmp_path / f"my-{part}.jsonl").read_text().splitlines() for part in ("train", "test")]
    assert [len(part) for part in parts] == [12, 4]
    assert sorted(parts[0] + parts[1]) == sorted(data.read_text().splitlines())
    assert "# options: {instruction:" in out.read_text()


def test_two_files_and_an_instruction_stand_in_the_recipe(tmp_path: Path, model: str) -> None:
    data, test = write_questions(tmp_path / "a.jsonl", 150), write_questions(tmp_path / "b.jsonl", 120, 500)
    found = write_recipe(tmp_path / "my.yaml", model, data, test, "Show: every 'step'.")
    values = load_recipe(RunRecipe, found.recipe)
    assert values.collect["tasks"][0]["options"] == {"instruction": "Show: every 'step'."}
    assert found.files == ()
    assert not any(line.startswith("WARNING") for line in found.warnings)


def test_what_makes_no_sense_is_refused(tmp_path: Path, model: str) -> None:
    data, test = write_questions(tmp_path / "a.jsonl", 8), write_questions(tmp_path / "b.jsonl", 8, 7)
    with pytest.raises(TadError, match=r"b\.jsonl: 'What is 7"):
        write_recipe(tmp_path / "my.yaml", model, data, test)
    with pytest.raises(TadError, match=r"few\.jsonl"):
        write_recipe(tmp_path / "my.yaml", model, write_questions(tmp_path / "few.jsonl", 3))
    (tmp_path / "my.yaml").write_text("mine")
    with pytest.raises(TadError, match=r"my\.yaml"):
        write_recipe(tmp_path / "my.yaml", model, data)
    assert (tmp_path / "my.yaml").read_text() == "mine"


def test_many_epochs_and_few_questions_are_warned_of(tmp_path: Path, model: str) -> None:
    found = write_recipe(tmp_path / "my.yaml", model, write_questions(tmp_path / "a.jsonl", 20))
    recipe = load_recipe(RunRecipe, found.recipe)
    meta = StoreMeta("m", "t", "llada", 2, 1, [1], 64, 44, 1)
    store = TrajectoryStore.open_or_create(tmp_path / "store", meta)
    store.write(0, [], ShardStats(44, 44, 44, {}, 44 * 40, 0, {}))
    student = recipe.students["student"]
    few = recipe.distill_recipe("student", "store", student)
    many = recipe.distill_recipe("student", "store", {**student, "learning": {"steps": 400}, "batch": {"size": 256, "micro": 16}})  # fmt: skip
    assert warn_of_epochs(few, [store]) is None
    assert "291 epochs of 44 trajectories" in str(warn_of_epochs(many, [store]))
    assert "standard error of 18 points" in str(warn_of_few(5))
    assert warn_of_few(100) is None


def test_a_block_diffusion_model_keeps_its_own_decoder(tmp_path: Path) -> None:
    found = write_recipe(tmp_path / "my.yaml", "nano-fast-dllm-v2", write_questions(tmp_path / "a.jsonl", 20))
    recipe = load_recipe(RunRecipe, str(found.recipe), [])
    assert recipe.decoders == recipe.student_decoders == ["fast-dllm-v2"]
