"""A study on the page of `tad report`: its tables, trials and names, and what is left to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import report_world as made
from report_page import Elements, embedded
from study_world import study_recipe, write_tuned_study

from tad.evaluation.report import Report, write_report
from tad.evaluation.report.gather import gather
from tad_lab.study import Study


@pytest.fixture(scope="module")
def study(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tuned_study(world, tmp_path_factory.mktemp("made") / "tiny-study")


@pytest.fixture(scope="module")
def study_page(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report([study], tmp_path_factory.mktemp("out") / "page.html")


@pytest.fixture
def without_pngs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named and not drawn, where a test is about the page."""
    monkeypatch.setattr("tad.evaluation.report.charts.as_png", lambda shown, path, *_: path)


def test_a_study_is_shown_as_its_recipe_sees_it(study: Path, study_page: Report) -> None:
    text = study_page.page.read_text()
    (part,) = embedded(text)["parts"]
    for table in part["tables"]:
        assert table["rows"] == json.loads((study / "tables" / f"{table['name']}.json").read_text())["rows"]
    assert [row["title"] for row in part["tables"][0]["rows"]] == [
        "base",
        "Fast-dLLM",
        "TAD-Q",
        "Fast-dLLM v2",
    ]
    assert part["tables"][0]["rows"][2]["seeds"] == [0, 1]
    assert [trial["number"] for trial in part["tuning"]] == [0, 1]
    shown = Elements(text)
    assert "2 seeds" in shown.open
    for words in (
        "Fast-dLLM v2: another base model; not built",
        "windows, window all: not run yet",
        "learning.lr 0.01",
    ):
        assert words in shown.folded
    assert not any("trial" in one or "not run yet" in one for one in shown.open)


def test_what_a_study_has_left_to_do_is_said(study_page: Report) -> None:
    # Of the base twice, two trials, Fast-dLLM, two seeds, two windows: one window.
    assert any(note.startswith("tiny: 1 of 9 cells are not done") for note in study_page.notes)


def test_no_directory_of_the_study_is_named_in_what_can_be_seen(study: Path, study_page: Report) -> None:
    text = Elements(study_page.page.read_text()).text
    paths = [path for kind in ("stores", "students", "answers") for path in (study / kind).iterdir()]
    assert len(paths) > 8
    for path in paths:
        assert path.name.rpartition("-")[2] not in text  # the hash


def test_training_runs_are_named_by_method_and_those_of_trials_say_so(study: Path) -> None:
    names = [(run.name, run.seed, run.trial) for run in gather([study]).trainings]
    assert names[:-1] == [("TAD-Q", 0, False), ("TAD-Q", 1, False), ("windows, window 1", 0, False)]
    assert names[-1][0] in ("TAD-Q, trial 0", "TAD-Q, trial 1")  # the other one is seed 0's training


def test_a_study_that_cannot_be_made_out_is_shown_run_by_run(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "study")
    record = json.loads((tmp_path / "study" / "study.json").read_text())
    record["recipe"]["methods"]["tad"]["wings"] = 2
    (tmp_path / "study" / "study.json").write_text(json.dumps(record))
    found = gather([tmp_path], resamples=5)
    assert sum(len(part.runs) for part in found.parts) > 10
    assert any("is shown run by run" in note and "wings" in note for note in found.notes)


def test_a_study_of_the_earlier_names_is_read(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "study")
    path = tmp_path / "study" / "study.json"
    record = json.loads(path.read_text())
    recipe = record["recipe"]
    recipe |= {"rival": recipe.pop("baseline"), "below": recipe.pop("tolerance"), "keep": []}
    path.write_text(json.dumps(record))
    (part,) = gather([tmp_path]).parts
    assert (part.main.baseline, part.main.tolerance) == ("fast-dllm", 1.5)


@pytest.mark.usefixtures("without_pngs")
def test_two_studies_and_other_runs_share_a_page(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "other")
    path = tmp_path / "other" / "study.json"
    record = json.loads(path.read_text())
    record["recipe"]["name"] = "other"
    path.write_text(json.dumps(record))
    made.write_sweep(tmp_path / "sweep", ("tad",), examples=4)
    done = write_report([study, tmp_path], tmp_path / "p.html", resamples=5)
    assert [part["name"] for part in embedded(done.page.read_text())["parts"]] == [
        "tiny",
        "other",
        "nano-llada",
    ]
    names = [path.name for path in done.pictures]
    assert {"p-accuracy-tiny.png", "p-accuracy-tiny-windows.png", "p-accuracy-nano-llada.png"} <= set(names)
    assert [store.name for store in gather([study, tmp_path], resamples=5).stores] == [
        "teacher, tiny",
        "teacher, other",
    ]


def test_a_study_that_has_hardly_begun_has_a_page(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    assert Study(study_recipe(world), out).run(["base"])
    shown = Elements(write_report([out], tmp_path / "p.html").page.read_text())
    assert "base" in shown.open
    assert "tad: not run yet" in shown.folded
    shutil.rmtree(out / "answers")
    done = write_report([out], tmp_path / "q.html")
    assert done.pictures == []
    assert "No numbers: nothing has been run yet." in Elements(done.page.read_text()).open
