"""bench/study_gpu.py: a study travels in a few files, goes on elsewhere without doing anything twice, and is graded there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from run_world import Listener
from study_world import rounds_recipe, study_recipe, study_values

import study_archive
import study_gpu as bench
from study_archive import pack, unpack
from tad.errors import TadError
from tad.evaluation import Results
from tad.evaluation.methods import read_outcomes
from tad.evaluation.tables import as_markdown
from tad.trajectories.store import TrajectoryStore, UngradedError
from tad_lab.study import Study
from tad_lab.study.plan import DONE, UNGRADED

ONLY = ["base", "tad"]


@pytest.fixture(scope="module")
def half(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The base is done; the first student is trained and has begun to answer."""
    study = Study(study_recipe(world), tmp_path_factory.mktemp("half"), Listener(stop_after=5))
    assert not study.run(only=ONLY)
    assert [one.state for one in study.states(["tad"])] == ["trained", "missing"]
    return study


@pytest.fixture(scope="module")
def whole(world: Path, half: Study, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The same study, finished where it was begun."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    study = Study(study_recipe(world), shutil.copytree(half.out, folder))
    assert study.run(only=ONLY)
    return study


def test_a_packed_study_goes_on_elsewhere(world: Path, half: Study, whole: Study, tmp_path: Path) -> None:
    assert pack(half, tmp_path / "dest") == []
    unpack(tmp_path / "dest", tmp_path / "there")
    there = Study(study_recipe(world), tmp_path / "there", watch := Listener())
    assert there.run(only=ONLY)
    (title,) = watch.stages  # no store, no first student again
    assert "tad-seed1" in title
    assert not any(name.startswith("one-by-one") for name in watch.settings[:1])
    for seed in (0, 1):
        cell = whole.cell("tad", seed)
        for mine, theirs in zip(whole.runs_of(cell), there.runs_of(there.cell("tad", seed)), strict=True):
            assert np.array_equal(read_outcomes(mine).correct, read_outcomes(theirs).correct)
            assert np.array_equal(read_outcomes(mine).forwards, read_outcomes(theirs).forwards)


def test_rows_that_stay_columns_are_enough_to_go_on_and_to_pack_again(
    world: Path, half: Study, tmp_path: Path
) -> None:
    pack(half, tmp_path / "dest")
    for _ in range(2):  # the second time changes nothing
        unpack(tmp_path / "dest", tmp_path / "there", half.recipe)
    there = Study(study_recipe(world), tmp_path / "there", watch := Listener())
    base = there.answers_folder(there.cell("base", None)) / "one-by-one,block=8"
    assert not (base / "rows.jsonl").exists()
    assert there.run(only=ONLY, grade=False, tables=False)
    assert not any("tad-seed0" in title for title in watch.stages)
    pack(there, tmp_path / "again")
    unpack(tmp_path / "again", tmp_path / "last")
    last = Study(study_recipe(world), tmp_path / "last")
    assert [one.state for one in last.states(ONLY)] == [DONE] * 3
    unpack(tmp_path / "again", there.out)
    assert as_markdown(there.tables()[0]) == as_markdown(last.tables()[0])
    assert len(Results.open(last.answers_folder(last.cell("base", None)) / "one-by-one,block=8").rows()) == 12


def test_adapters_travel_only_where_they_are_needed(world: Path, whole: Study, tmp_path: Path) -> None:
    for keep, count in (([], 0), (["tad"], 2)):
        pack(whole, tmp_path / "dest", keep=keep)
        unpack(tmp_path / "dest", tmp_path / f"out{count}")
        found = list((tmp_path / f"out{count}" / "students").glob("*/adapter"))
        assert len(found) == count
        there = Study(study_recipe(world), tmp_path / f"out{count}", watch := Listener())
        assert there.run(only=ONLY)
        assert (watch.stages, watch.settings) == ([], [])


@pytest.mark.slow
def test_rounds_go_on_elsewhere_from_the_last_student(world: Path, tmp_path: Path) -> None:
    """What a student has rolled out stays behind; the student itself travels while its next round is not trained."""
    recipe, only = rounds_recipe(world), ["ltr/*"]
    here = Study(recipe, tmp_path / "here", Listener())
    assert here.run(only=["ltr/round=2"])
    pack(here, tmp_path / "dest")
    unpack(tmp_path / "dest", tmp_path / "there", recipe)
    assert (
        len(list((tmp_path / "there").glob("students/*/adapter"))) == 2
    )  # one has no answers yet, one no next round
    there = Study(recipe, tmp_path / "there", watch := Listener())
    assert there.run(only=only, grade=False, tables=False)
    assert [title.partition(" ")[0] for title in watch.stages] == ["Collect:", "Window:", "Distil"]
    assert {"ltr/round=2", "ltr/round=3"} <= {cost.student for cost in there.costs()}
    pack(there, tmp_path / "dest")
    unpack(tmp_path / "dest", tmp_path / "last")
    last = Study(recipe, tmp_path / "last", watch := Listener())
    assert last.run(only=only)
    assert (watch.stages, watch.settings) == ([], [])
    assert not list((tmp_path / "last").glob("stores/*round*/*.parquet"))


def test_files_are_small_and_what_does_not_fit_is_named(
    half: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(half, tmp_path)
    needed = sum(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr(study_archive, "PART", needed // 3 + 1)
    monkeypatch.setattr(study_archive, "gzip", Uncompressed(needed))
    left = pack(half, tmp_path, parts=3)
    assert [name.split("/")[-1] for name in left] == ["adapter"]
    monkeypatch.setattr(study_archive, "gzip", Uncompressed(10 * needed))
    with pytest.raises(TadError, match="more than 3 files of 15 MB; pack without texts"):
        pack(half, tmp_path, parts=3)


class Uncompressed:
    """Stands in for gzip: says how large things are."""

    def __init__(self, size: int) -> None:
        self.size = size

    def compress(self, data: bytes, level: int) -> bytes:
        return data[:1] * self.size


def test_texts_without_a_verdict_always_travel(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gradable in (True, False):
        study = Study(study_recipe(world), tmp_path / f"{gradable}")
        with monkeypatch.context() as patch:
            if not gradable:
                patch.setattr("tad.evaluation.questions.Questions.gradable", lambda _: set())
            study.run(only=["base"])
        pack(study, tmp_path / f"dest{gradable}", texts=False)
        unpack(tmp_path / f"dest{gradable}", tmp_path / f"to{gradable}")
        there = Study(study_recipe(world), tmp_path / f"to{gradable}")
        assert there.states(["base"])[0].state == (DONE if gradable else UNGRADED)
        run = there.answers_folder(there.cell("base", None)) / "one-by-one,block=8"
        assert {bool(row.text) for row in Results.open(run).rows()} == {not gradable}
    assert there.run(only=["base"])
    unpack(tmp_path / "destFalse", there.out)  # without the verdicts that are there now
    assert there.states(["base"])[0].state == DONE


def test_verdicts_that_stay_columns_are_not_lost_to_an_older_archive(half: Study, tmp_path: Path) -> None:
    folder = half.answers_folder(half.cell("base", None)) / "one-by-one,block=8"
    pack(half, tmp_path / "new")
    shutil.copytree(half.out, tmp_path / "older")
    older = Study(half.recipe, tmp_path / "older")
    run = tmp_path / "older" / folder.relative_to(half.out)
    results = Results.open(run)
    rows = [replace(row, correct=None) for row in results.rows()]
    results.settle([row.key for row in rows], rows)
    pack(older, tmp_path / "old")
    unpack(tmp_path / "new", tmp_path / "out", half.recipe)
    unpack(tmp_path / "old", tmp_path / "out", half.recipe)
    unpack(tmp_path / "new", tmp_path / "out")
    found = read_outcomes(tmp_path / "out" / folder.relative_to(half.out))
    assert not np.isnan(found.correct).any()


def test_the_bench_runs_packs_resumes_and_grades(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, dest = tmp_path / "study.yaml", tmp_path / "dest"
    file.write_text(yaml.safe_dump(study_values(world), sort_keys=False))
    with pytest.raises(TadError, match=r"no study\.tar\.gz"):
        bench.main(["grade", str(file), str(dest)])
    words = ["run", str(file), str(dest), "seeds=[0]", "--resume", str(dest), "--only", "base", "fast-dllm"]
    bench.main([*words, "--work", str(tmp_path / "one"), "--minutes", "0"])
    assert "0 of 2 cells are decoded" in capsys.readouterr().out
    bench.main([*words, "--work", str(tmp_path / "one")])
    assert "2 of 2 cells are decoded" in capsys.readouterr().out
    bench.main([*words, "--work", str(tmp_path / "two")])
    captured = capsys.readouterr().out
    assert "unpacked" in captured
    assert "runs in" not in captured  # all of it came with the archive
    bench.main(["grade", str(file), str(dest), "seeds=[0]", "--out", str(tmp_path / "graded")])
    text = capsys.readouterr().out
    assert "### Main" in text
    assert "| tad | not run yet |" in text
    assert (tmp_path / "graded" / "tables" / "main.json").is_file()


def test_stores_that_are_graded_later_travel_to_the_grader_and_back(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, file = study_values(world), tmp_path / "study.yaml"
    values["collect"] = values["collect"] | {"tasks": [{**values["collect"]["tasks"][0], "graded": "later"}]}
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    dest, back, work = tmp_path / "dest", tmp_path / "back", tmp_path / "work"
    words = ["run", str(file), str(dest), "seeds=[0]", "--only", "tad", "--work"]
    bench.main([*words, str(work)])
    assert "waits for grading" in capsys.readouterr().out
    bench.main(
        ["grade", str(file), str(dest), "seeds=[0]", "--out", str(tmp_path / "home"), "--back", str(back)]
    )
    assert capsys.readouterr().err.count("shard ") == 2
    for place in (tmp_path / "elsewhere", work):  # with nothing there, and with the store as it was collected
        bench.main([*words, str(place), "--resume", str(back)])
        assert "1 of 1 cells are decoded" in capsys.readouterr().out
        (graded,) = (place / "stores").iterdir()
        home = tmp_path / "home" / "stores" / graded.name
        for shard in graded.glob("shard-*"):
            assert shard.read_bytes() == (home / shard.name).read_bytes()
    unpack(dest, tmp_path / "home")  # an archive of the first run, later: verdicts stay
    assert not TrajectoryStore.open(home).pending()


def test_the_tiny_sizes_fit_every_bundled_study(tmp_path: Path) -> None:
    for name in ("study-nano-llada", "study-nano-dream", "study-small-llada"):
        options = bench.read_options(["run", name, str(tmp_path), "--tiny"])
        recipe = bench.read_recipe(options)
        assert {task.options["size"] for task in recipe.evaluate.tasks} == {2}
        assert {task["options"]["size"] for task in recipe.collect["tasks"]} == {2}
        assert len(Study(recipe, tmp_path / name).methods) > 30


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_every_store_and_every_training_of_the_bundled_studies_works(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One problem of each task and one step; nothing is decoded."""
    monkeypatch.setattr(bench, "TINY_SIZE", 1)
    words = ["run", f"study-nano-{family}", str(tmp_path), "tuning=null", "--tiny"]
    small = ["distill.learning.steps=1", "distill.batch={size: 2, micro: 2}", "distill.states=2"]
    recipe = bench.read_recipe(bench.read_options([*words[:4], *small, "--tiny"]))
    (tmp_path / "study").mkdir()
    study = Study(recipe, tmp_path / "study")
    trained = set()
    for name, method in study.methods.items():
        if method.store is not None:
            cell = study.cell(name, 0)
            try:
                study.train(cell)
            except UngradedError:
                study.grade()
                study.train(cell)
            trained.add(study.student_folder(cell))
    assert len(list((tmp_path / "study" / "stores").iterdir())) == len(recipe.stores)
    assert all((folder / "adapter").is_dir() for folder in trained)
    assert len(trained) == 56
