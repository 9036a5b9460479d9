"""`tad demo` at its smallest: every stage, the table that says it is smoke size, and the bundled students if there are any."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.config import load_recipe
from tad.models import source
from tad.models.lora import CONFIG
from tad.models.source import BUNDLED
from tad.pipeline import RunRecipe, demo
from tad.pipeline.listener import Silent
from tad.runs.fingerprint import fingerprint_model
from tad.training.recipe import DistillRecipe
from tad.trajectories.recipe import CollectRecipe
from tad_lab.study import Study, StudyRecipe


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TASKS", ("nano-word",)), ("TRAJECTORIES", 2), ("STEPS", 1), ("STATES", 2)):
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "choose_threads", lambda lm: None)  # it would change them for all later tests


def call(*words: str) -> str:
    answer = CliRunner().invoke(app, ["demo", *words], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.output


def test_every_stage_is_shown_and_the_report_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_students", lambda _: {})
    text = call("--problems", "2", "--family", "dream", "--out", str(tmp_path / "out"))
    assert re.findall(r"^== (\w+)", text, re.MULTILINE) == [
        "One",
        "Collect",
        "Window",
        "Distil",
        "Distil",
        "Evaluate",
        "Evaluate",
        "Evaluate",
        "Report",
    ]
    assert "SMOKE SIZE" in text
    table = text[text.rindex("method ") :]
    assert [line.split("  ")[0].partition(" (")[0] for line in table.splitlines()[2:6]] == [
        "base, one-by-one",
        "base, fast-dllm",
        "quality, tad",
        "speed, tad",
    ]
    assert "n = 2 problems" in table
    assert "tokens per forward at equal accuracy" in text[: text.rindex("method ")]
    page = Path(re.search(r"The report: (\S+)", text)[1])  # type: ignore[index]
    assert page.is_file()
    assert (tmp_path / "out" / demo.FINISHED).is_file()


def test_bundled_students_stand_beside_the_live_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BUNDLED", tmp_path)
    assert demo.find_students("llada") == {}
    folder = tmp_path / "nano-llada-speed"
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    assert demo.find_students("llada") == {"nano-llada-speed": str(folder)}
    recipe = demo.demo_recipe("llada", 2, demo.find_students("llada"))
    assert recipe.adapters == {"nano-llada-speed": str(folder)}


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_bundled_students_are_small_and_load(family: str) -> None:
    found = demo.find_students(family)
    assert list(found) == [f"nano-{family}-{kind}" for kind in demo.STUDENTS]
    for path in found.values():
        assert sum(file.stat().st_size for file in Path(path).iterdir()) <= 3e6
        assert tad.load(f"nano-{family}", adapter=Path(path).name, device="cpu").peft is not None


def test_a_finished_demo_is_begun_anew_and_other_directories_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReachedError(Exception):
        pass

    def reached(*_: object) -> None:
        raise ReachedError

    monkeypatch.setattr(demo, "demo_recipe", reached)
    old, other = tmp_path / "old", tmp_path / "other"
    for folder in (old, other):
        folder.mkdir()
        (folder / "file").write_text("kept")
    (old / demo.FINISHED).touch()
    for folder in (old, other):
        with pytest.raises(ReachedError):
            demo.run("llada", 2, folder, Silent())
    assert not old.exists()
    assert (other / "file").read_text() == "kept"
    shutil.rmtree(other)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_nano_recipes_say_the_same_as_the_study(family: str, tmp_path: Path) -> None:
    """They may not drift from what the study measures; the rate is the study's to choose, on validation problems."""
    study = Study(load_recipe(StudyRecipe, f"study-nano-{family}", ["tuning=null"]), tmp_path)
    chain = load_recipe(RunRecipe, f"run-nano-{family}")
    where = ("batch_size", "shard_size", "dtype")  # how it is cut and where it runs
    alone = load_recipe(CollectRecipe, f"collect-nano-{family}").content_hash_fields()
    for other in (study.recipe.collect_recipe(study.recipe.stores["teacher"]), chain.collect_recipe()):
        assert without(other.content_hash_fields(), *where) == without(alone, *where)
    for name, method in (("quality", "tad-quality"), ("speed", "tad-speed"), ("sft", "sft")):
        own = load_recipe(DistillRecipe, f"nano-{family}-{name}").content_hash_fields()
        studied = study.recipe.distill_recipe(
            method, "store", study.methods[method].distill()
        ).content_hash_fields()
        for values in (own, studied):
            values["learning"] = without(values["learning"], "lr")
        assert without(own, "precision") == without(studied, "precision")


@pytest.mark.parametrize("name", ["quality", "speed"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_bundled_students_were_trained_with_the_committed_recipes(family: str, name: str) -> None:
    record = json.loads((BUNDLED / f"nano-{family}-{name}" / "run.json").read_text())
    trained = DistillRecipe.model_validate(record["recipe"]).content_hash_fields()
    chain = load_recipe(RunRecipe, f"run-nano-{family}")
    for recipe in (
        load_recipe(DistillRecipe, f"nano-{family}-{name}"),
        chain.distill_recipe(name, "store", chain.students[name]),
    ):
        assert without(recipe.content_hash_fields(), "precision") == without(trained, "precision")
    assert record["calls"][-1]["finished"]
    base = tad.load(f"nano-{family}", device="cpu")
    assert record["calls"][-1]["fingerprints"]["model"] == fingerprint_model(base)


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}
