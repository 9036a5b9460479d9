"""`tad study`: cells are named by what decides them, done once, shared, and shown with what they rest on."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from eval_world import EXAMPLES
from run_world import Listener
from study_world import BASE, assert_same_answers, rounds_recipe, study_recipe, study_values
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.errors import TadError
from tad.evaluation import Results
from tad.evaluation.methods import read_outcomes
from tad.evaluation.report.gather import gather
from tad.runs.record import read_record
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window_report import Decay, Window, WindowReport, write_report
from tad_lab.study import Study
from tad_lab.study.cells import Source
from tad_lab.study.plan import COLLECTED, DONE, MISSING, TRAINED, UNGRADED, WAITING

# Work


def test_cells_share_stores_students_and_first_runs(done: tuple[Path, Listener]) -> None:
    out, watch = done
    assert len(list((out / "stores").iterdir())) == 1  # nothing in the tables trains on the other one
    assert len(list((out / "students").iterdir())) == 4  # tad twice, two windows
    assert len(list((out / "answers").iterdir())) == 5  # base and fast-dllm are one model's answers
    assert sum(name.startswith("one-by-one") for name in watch.settings) == 5


def test_a_second_call_has_nothing_left_to_do(world: Path, done: tuple[Path, Listener]) -> None:
    watch = Listener()
    assert Study(study_recipe(world), done[0], watch).run()
    assert (watch.stages, watch.settings) == ([], [])


def test_another_decoder_of_the_same_student_trains_nothing(world: Path, done: tuple[Path, Listener]) -> None:
    recipe = study_recipe(world, tables={"cached": {"title": "Cached", "methods": ["cached"]}})
    watch = Listener()
    assert Study(recipe, done[0], watch).run()
    assert watch.stages == []
    assert watch.settings == [f"tad-cached,threshold={value},block=8" for value in (0.5, 3.0)]


def test_a_table_may_compare_with_a_student_of_all_seeds(world: Path, done: tuple[Path, Listener]) -> None:
    recipe = study_recipe(world, tables={"windows": {"baseline": "tad"}})
    main, windows = Study(recipe, done[0]).tables()
    assert (main.baseline, windows.baseline) == ("fast-dllm", "tad")
    own = next(row for row in main.rows if row.method == "tad").scopes[main.scope]
    for row in windows.rows:
        found = row.scopes[windows.scope]
        assert own.tpf_at_target is not None
        assert found.tpf_at_target is not None
        assert found.to_baseline is not None
        theirs, mine = own.tpf_at_target.tpf, found.tpf_at_target.tpf
        expected = None if theirs is None or mine is None else mine / theirs
        assert (found.times_baseline and found.times_baseline.value) == (expected and pytest.approx(expected))
        assert found.to_baseline.accuracy.value == pytest.approx(found.accuracy.value - own.accuracy.value)


def test_a_call_for_some_seeds_takes_no_others_out_of_the_tables_and_the_report(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    shutil.copytree(done[0], tmp_path / "study")
    part = Study(study_recipe(world, seeds=[1]), tmp_path / "study", watch := Listener())
    assert part.run(only=["tad"])
    assert watch.stages == []
    rows = {
        row["method"]: row for row in json.loads((tmp_path / "study/tables/main.json").read_text())["rows"]
    }
    assert (rows["tad"]["seeds"], rows["base"]["seeds"]) == ([0, 1], [None])
    found = gather([tmp_path / "study"])
    assert {row.method: row.seeds for row in found.parts[0].main.rows}["tad"] == [0, 1]
    assert sorted(run.seed for run in found.trainings if run.title == part.methods["tad"].title) == [0, 1]
    # what another recipe has answered is no seed of this one
    other = study_recipe(world, seeds=[1], distill={"learning": {"steps": 4}})
    assert {row.method: row.planned_seeds for row in Study(other, part.out).tables()[0].rows}["tad"] == 1


def test_a_table_names_the_students_whose_window_is_the_cap(world: Path, tmp_path: Path) -> None:
    measured = {"tad": {"title": "TAD-S", "distill": {"objective": {"window": "speed"}}}}
    study = Study(study_recipe(world, methods=measured), tmp_path)
    cell = study.cell("tad", 0)
    assert cell is not None
    assert cell.source is not None
    cap, decay = Window(0.2, math.nan, 8, math.nan, math.nan), Decay([0.9], [0.9], [0.9], [1], 1, 1, False)
    store = study.store_folder(cell.source)
    store.mkdir(parents=True)
    write_report(WindowReport("teacher", "m", decay, decay, {"speed": cap}), store)
    main, windows = study.tables()
    assert main.note is not None
    assert main.note.count(f"TAD-S {cap}") == 1  # of two seeds
    assert windows.note is None  # windows 1 and all


def test_rows_are_kept_without_what_no_table_needs(done: tuple[Path, Listener]) -> None:
    runs = [Results.open(path.parent) for path in (done[0] / "answers").rglob("rows.jsonl")]
    assert all(run.is_complete() for run in runs)
    for row in runs[0].rows():
        assert (row.prompt, row.ids, row.steps) == ("", [], [])
        assert row.text
        assert row.correct is not None


def test_a_study_stopped_anywhere_goes_on_to_the_same_numbers(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    calls, stop = 0, 1
    while not Study(study_recipe(world), tmp_path, Listener(stop)).run():
        calls, stop = calls + 1, stop + 6
        assert calls < 20
    assert calls >= 2
    assert_same_answers(tmp_path, done[0])


def test_only_limits_the_work_to_tables_or_methods(world: Path, tmp_path: Path) -> None:
    study = Study(study_recipe(world), tmp_path)
    assert study.run(only=["base"])
    assert [(one.method, one.state) for one in study.states() if one.table == "main"] == [
        ("base", DONE),
        ("fast-dllm", MISSING),
        ("tad", MISSING),
        ("tad", MISSING),
    ]
    assert {one.table for one in study.states(only=["windows"])} == {"windows"}
    rows = {row.method: row for row in study.tables()[0].rows}
    assert rows["tad"].state == "not run yet"
    assert rows["base"].scopes


def test_what_only_names_first_comes_first_and_each_cell_once(world: Path, tmp_path: Path) -> None:
    study = Study(study_recipe(world), tmp_path)
    study.__dict__["base"] = BASE
    every = [(table, name, seed) for table, name, seed, _ in study.cells()]
    assert every[:2] == [("main", "base", None), ("main", "fast-dllm", None)]
    asked = [(table, name, seed) for table, name, seed, _ in study.cells(["windows/*", "main", "w*"])]
    assert asked[:2] == [("windows", "windows/window=1", 0), ("windows", "windows/window=all", 0)]
    assert asked[2] == ("main", "base", None)
    assert sorted(map(str, asked)) == sorted(map(str, every))


def test_only_with_a_name_that_is_not_there_is_refused_before_anything_is_written(
    world: Path, tmp_path: Path
) -> None:
    study = Study(study_recipe(world), tmp_path / "study")
    for act in (study.run, study.states):
        with pytest.raises(TadError, match=r"--only mian: .* no such table .* did you mean 'main'"):
            act(only=["base", "mian"])
    assert not (tmp_path / "study").exists()


def test_a_study_of_another_base_is_refused(world: Path, done: tuple[Path, Listener], tmp_path: Path) -> None:
    record = json.loads((done[0] / "study.json").read_text())
    record["base"]["model"] = "another"
    (tmp_path / "study.json").write_text(json.dumps(record))
    with pytest.raises(TadError, match="is a study of another base"):
        Study(study_recipe(world), tmp_path).run()


def test_what_cannot_be_graded_here_is_graded_later(
    world: Path, done: tuple[Path, Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(study_recipe(world), tmp_path, watch := Listener())
    with monkeypatch.context() as patch:
        patch.setattr("tad.evaluation.questions.Questions.gradable", lambda _: set())
        assert study.run(only=["base"])
    assert any("cannot be graded here" in line for line in watch.lines)
    entry = study.states(["base"])[0]
    assert entry.state == UNGRADED
    table = study.tables()[0]
    assert not table.tasks
    assert "no verdicts yet" in (tmp_path / "tables" / "main.md").read_text()
    later = Study(study_recipe(world), tmp_path)
    assert later.run(only=["base"])
    assert later.states(["base"])[0].state == DONE
    folder = later.answers_folder(later.cell("base", None)) / "one-by-one,block=8"
    theirs = Study(study_recipe(world), done[0])
    other = theirs.answers_folder(theirs.cell("base", None)) / "one-by-one,block=8"
    assert np.array_equal(read_outcomes(folder).correct, read_outcomes(other).correct)


def test_a_student_without_answers_is_seen_as_trained(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    shutil.copytree(done[0], tmp_path / "copy")
    study = Study(study_recipe(world), tmp_path / "copy")
    shutil.rmtree(study.answers_folder(study.cell("tad", 1)))
    assert {one.seed: one.state for one in study.states(["tad"])} == {0: DONE, 1: TRAINED}


# Trajectories that are graded later


def graded_later(world: Path) -> dict:
    tasks = [{"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}, "graded": "later"}]
    return {"collect": {"tasks": tasks}}


def test_a_study_waits_for_the_verdicts_on_its_trajectories_and_then_goes_on(
    world: Path, done: tuple[Path, Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = study_recipe(world, seeds=[0], **graded_later(world))
    study = Study(recipe, tmp_path, watch := Listener())
    assert not study.run(only=["base", "tad"], grade=False)
    assert [one.state for one in study.states(["base", "tad"])] == [DONE, COLLECTED]
    with monkeypatch.context() as patch:
        patch.setattr(TrajectoryStore, "read", refuse)  # known from before
        assert {one.state for one in study.states(["windows/*"])} == {COLLECTED}
    assert not (tmp_path / "students").exists()
    assert any("tad of table 'main' waits for the grading of" in line for line in watch.lines)
    with monkeypatch.context() as patch:
        patch.setattr("tad.trajectories.grading.judge", refuse)
        assert not Study(recipe, tmp_path, watch).run(only=["tad"])
    assert "no sandbox" in watch.lines
    assert [one.state for one in study.states(["tad"])] == [COLLECTED]
    assert Study(recipe, tmp_path, watch).run(only=["tad"])
    theirs = Study(study_recipe(world), done[0])  # graded while collecting: the same names and numbers
    for kind in ("stores", "students"):
        (folder,) = (tmp_path / kind).iterdir()
        assert (done[0] / kind / folder.name).is_dir()
    for path in study.store_folder(Source("teacher")).iterdir():
        if path.suffix in (".json", ".parquet", ".hash"):
            assert path.read_bytes() == (theirs.store_folder(Source("teacher")) / path.name).read_bytes()
    for mine, other in zip(
        study.runs_of(study.cell("tad", 0)), theirs.runs_of(theirs.cell("tad", 0)), strict=True
    ):
        assert np.array_equal(read_outcomes(mine).correct, read_outcomes(other).correct)


def refuse(*_: object) -> None:
    raise TadError("no sandbox")


@pytest.mark.slow
def test_rounds_of_trajectories_that_are_graded_later_come_to_the_same_numbers(
    world: Path, tmp_path: Path
) -> None:
    stores, last = {"stores": {"ltr": {"reference": "gold"}}}, "ltr/round=2"
    graded = Study(rounds_recipe(world, **stores), tmp_path / "graded")
    assert graded.run(only=[last])
    later = Study(rounds_recipe(world, **stores, **graded_later(world)), tmp_path / "later")
    assert not later.run(only=[last], grade=False)
    assert [one.state for one in later.states([last])] == [COLLECTED]
    assert later.run(only=[last])
    for a, b in zip(*(study.runs_of(study.cell(last, 0)) for study in (graded, later)), strict=True):
        assert np.array_equal(read_outcomes(a).correct, read_outcomes(b).correct)


# Tuning


def tuned(world: Path, **changes: object) -> dict:
    task = {"name": f"jsonl:{world / 'questions.jsonl'}", "split": "all", "limit": 6}
    section = {
        "tasks": [task],
        "trials": [{"learning": {"lr": 1e-4}}, {"learning": {"lr": 1.0}}],
        "methods": {"tad": None},
    }
    return {"tuning": section | changes}


def test_trials_come_first_and_the_best_one_is_taken_over_by_its_likes(world: Path, tmp_path: Path) -> None:
    recipe = study_recipe(world, seeds=[0], **tuned(world))
    study = Study(recipe, tmp_path)
    states = {(one.table, one.method): one.state for one in study.states()}
    assert states["main", "tad"] == WAITING
    assert states["windows", "windows/window=1"] == WAITING
    assert states["tuning", "tad"] == MISSING
    assert study.run()
    trials = json.loads((tmp_path / "tables" / "tuning.json").read_text())
    assert [trial["number"] for trial in trials] == [0, 1]
    best = max(trials, key=lambda trial: trial["score"])
    assert best["chosen"]
    assert sum(trial["chosen"] for trial in trials) == 1
    for name in ("tad", "windows/window=1"):
        assert study.cell(name, 0).changes["learning"] == best["changes"]["learning"]
    text = (tmp_path / "tables" / "tuning.md").read_text()
    assert "2 trials for each method" in text
    runs = [Results.open(path.parent).meta for path in (tmp_path / "answers").rglob("eval.json")]
    assert {run.planned for run in runs} == {6, 12}


def test_trials_without_any_verdict_wait_for_one(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(study_recipe(world, seeds=[0], **tuned(world)), tmp_path, watch := Listener())
    with monkeypatch.context() as patch:
        patch.setattr("tad.evaluation.questions.Questions.gradable", lambda _: set())
        assert not study.run(only=["tad"])
    assert any("waits for its tuning" in line for line in watch.lines)
    assert "not run yet" in (tmp_path / "tables" / "tuning.md").read_text()
    assert Study(study_recipe(world, seeds=[0], **tuned(world)), tmp_path).run(only=["tad"])


# Rounds


def test_every_round_is_a_method_that_rests_on_the_one_before(world: Path, tmp_path: Path) -> None:
    study = Study(rounds_recipe(world, seeds=[0, 1]), tmp_path)
    study.__dict__["base"] = BASE
    first, second = study.cell("ltr/round=1", 0), study.cell("ltr/round=2", 0)
    assert second.source.teacher == first
    assert (first.source.part, second.source.part) == ((1, 3), (2, 3))
    assert study.methods["ltr/round=2"].title == "round 2"
    assert study.hashes.student(study.cell("blocks/round=2", 0)) == study.hashes.student(second)
    stores = [
        study.hashes.store(study.cell(f"ltr/round={number}", seed).source)
        for number in (1, 2)
        for seed in (0, 1)
    ]
    assert stores[0] == stores[1]  # the base's trajectories are the same for every seed
    assert len(set(stores)) == 3
    other = Study(rounds_recipe(world, distill={"learning": {"lr": 0.5}}), tmp_path)
    other.__dict__["base"] = BASE
    assert other.hashes.store(other.cell("ltr/round=1", 0).source) == stores[0]
    assert other.hashes.store(other.cell("ltr/round=2", 0).source) != stores[2]


def test_rounds_train_from_the_student_before_on_what_it_rolled_out(
    world: Path, rounds: tuple[Path, Listener]
) -> None:
    study = Study(rounds_recipe(world), rounds[0])
    assert {one.state for one in study.states()} == {DONE}
    base = study.base.model
    models = []
    for number in (1, 2, 3):
        cell = study.cell(f"ltr/round={number}", 0)
        meta = TrajectoryStore.open(study.store_folder(cell.source)).meta
        models.append(meta.model)
        assert meta.examples == 4
        record = read_record(study.student_folder(cell))
        assert bool(record["recipe"]["start"]) == (number > 1)
        adapter = study.student_folder(cell) / "adapter"
        lm = tad.load(world / "llada", adapter=adapter, device="cpu")
        assert lm.peft.peft_config["default"].r == 2 * number
    assert models[0] == base
    assert len(set(models)) == 3
    whole = read_record(study.student_folder(study.cell("whole/round=2", 0)))["recipe"]
    assert whole["model"].endswith("model")  # what the first round has left
    costs = {cost["student"]: cost for cost in json.loads((rounds[0] / "tables" / "costs.json").read_text())}
    assert [costs[f"ltr/round={number}"]["steps"] for number in (1, 2, 3)] == [3, 6, 9]
    assert costs["ltr/round=3"]["rollouts"] >= EXAMPLES
    assert costs["last"]["rollouts"] == costs["ltr/round=2"]["rollouts"] + EXAMPLES


@pytest.mark.slow
def test_rounds_stopped_anywhere_or_begun_at_the_end_come_to_the_same_numbers(
    world: Path, rounds: tuple[Path, Listener], tmp_path: Path
) -> None:
    assert Study(rounds_recipe(world), tmp_path).run(only=["ltr/round=3"])  # makes the rounds before it
    calls, stop = 0, 3
    while not Study(rounds_recipe(world), tmp_path, Listener(stop)).run():
        calls, stop = calls + 1, stop + 6
        assert calls < 20
    assert calls
    assert_same_answers(tmp_path, rounds[0])


def test_trials_of_rounds_change_every_round(world: Path, tmp_path: Path) -> None:
    section = tuned(world, methods={"ltr": None})["tuning"]
    study = Study(rounds_recipe(world, tuning=section), tmp_path)
    study.__dict__["base"] = BASE
    (trial, _) = study.trials_of("ltr")
    assert trial.method == "ltr/round=3"
    assert trial.source.teacher.source.teacher.changes["learning"] == {"lr": 1e-4}
    assert study.cell("blocks/round=1", 0) is None  # waits for it
    assert {one.state for one in study.states() if one.method == "ltr/round=1"} == {WAITING}


def test_a_page_of_rounds_that_are_tuned_names_their_trials(world: Path, tmp_path: Path) -> None:
    section = tuned(world, methods={"ltr": None})["tuning"]
    assert Study(rounds_recipe(world, tuning=section), tmp_path).run(only=["base"])
    (part,) = gather([tmp_path]).parts
    assert part.tuning is not None
    assert [trial["title"] for trial in part.tuning.records] == ["round 3", "round 3"]


@pytest.mark.parametrize("after", ["nothing", "base", "last"])
def test_after_names_a_method_that_is_trained(world: Path, tmp_path: Path, after: str) -> None:
    with pytest.raises(TadError, match=r"methods\.last\.after"):
        Study(rounds_recipe(world, methods={"last": {"after": after}}), tmp_path)


# The command


def test_the_command_lists_runs_and_writes_tables(
    world: Path, done: tuple[Path, Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study_values(world), sort_keys=False))
    words = ["study", str(file), "--out", str(done[0])]
    listed = CliRunner().invoke(app, [*words, "--list"], catch_exceptions=False)
    assert "windows/window=all" in listed.output
    assert "6 of 6 cells are decoded" in listed.output
    ran = CliRunner().invoke(app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    assert "| Fast-dLLM v2 |" in ran.output
    assert "another base model; not built" in ran.output
    rows = list(csv.DictReader((done[0] / "tables" / "main.csv").open()))
    assert {row["method"] for row in rows} == {"base", "fast-dllm", "tad", "v2"}
    monkeypatch.setattr("tad.cli.run.ConsoleListener.stopping", lambda _: True)
    late = CliRunner().invoke(app, ["study", str(file), "--out", str(tmp_path / "new")])
    assert late.exit_code == 130
    assert f"go on with: tad study {file} --out {tmp_path / 'new'}" in late.output


@pytest.mark.slow
def test_a_study_that_is_killed_again_and_again_comes_to_the_same_numbers(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(study_values(world), sort_keys=False))
    words = [sys.executable, "-m", "tad", "study", str(file), "--out", str(out)]
    for pieces in (1, 4, 7, 11):  # killed in the middle of whatever comes after so many pieces of work
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len([*out.glob("*/*/*.json"), *out.glob("answers/*/*")]) < pieces:
            time.sleep(0.02)
        process.kill()
        process.wait()
    subprocess.run(words, check=True, capture_output=True)
    assert_same_answers(out, done[0])
