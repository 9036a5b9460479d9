"""`tad run`: every stage leaves its directory, is passed over when complete, and goes on where it was stopped."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from run_world import Listener, run_recipe
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation import Results, tabulate_folders
from tad.evaluation.report import write_report
from tad.files import finite
from tad.models import find_defaults
from tad.pipeline import Chain
from tad.pipeline.pool import ModelPool
from tad.pipeline.recipe import RunRecipe, lay_over
from tad.runs.record import last_call, read_record
from tad.training.distill import distill
from tad.trajectories.store import Trajectory, TrajectoryStore
from tad.trajectories.window_report import Decay, Window, WindowReport, explain_windows, read_report
from tad.trajectories.window_report import write_report as write_window
from tad_sandbox import NoSandboxError, Sandbox

WORK = ("collect", "window", "distill", "evaluate")


@pytest.fixture(scope="module")
def done(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:
    out, watch = tmp_path_factory.mktemp("chain"), Listener()
    assert Chain(run_recipe(world), out, watch).run(WORK)
    return out, watch


def test_every_stage_leaves_its_directory(world: Path, done: tuple[Path, Listener]) -> None:
    out = done[0]
    assert (out / "trajectories" / "window.json").is_file()
    for name in ("quality", "speed"):
        assert tad.load(world / "llada", adapter=out / "students" / name / "adapter", device="cpu").peft
        assert not list((out / "students" / name).glob("checkpoint-*"))
    measured = read_report(out / "trajectories").windows["quality"]
    windows = [last_call(read_record(out / "students" / name))["window"] for name in ("quality", "speed")]
    assert windows == [str(measured), None]  # the second is given as a number
    assert sorted(path.name for path in (out / "evaluation").iterdir()) == ["base", "quality", "speed"]
    assert {path.suffix for path in (out / "tables").iterdir()} == {".md", ".csv", ".json"}


def test_the_command_measures_the_windows_that_a_run_measures(world: Path, tmp_path: Path) -> None:
    task = {"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}, "limit": 3}
    collect = {"tasks": [task], "gen_length": 48, "keep": "all"}
    recipe = run_recipe(world, collect=collect, window={"limit": 256, "states": 2})
    assert Chain(recipe, tmp_path).run(("collect", "window"))
    store = tmp_path / "trajectories"
    ran = read_report(store)
    words = [
        "window",
        str(store),
        "--model",
        str(world / "llada"),
        "--states",
        "2",
        "--device",
        "cpu",
        "--overwrite",
    ]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    measured = read_report(store)
    assert len(ran.decay.mean) == 24  # steps: half of the canvas
    assert measured == ran


def test_the_table_has_base_baseline_and_students_on_the_same_problems(done: tuple[Path, Listener]) -> None:
    table = json.loads((done[0] / "tables" / "main.json").read_text())
    names = ["base, one-by-one", "base, fast-dllm", "quality, tad", "speed, tad"]
    assert [row["method"] for row in table["rows"]] == names
    assert list(table["tasks"].values()) == [12]
    first = next(iter(table["rows"][0]["scopes"].values()))
    base = Results.open(done[0] / "evaluation" / "base" / "one-by-one,block=8").rows()
    right = 100 * sum(bool(row.correct) for row in base) / len(base)
    assert first["accuracy"]["value"] == pytest.approx(right)
    assert (first["to_base"]["accuracy"]["value"], first["to_base"]["accuracy"]["interval"]) == (
        0.0,
        [0.0, 0.0],
    )


def test_the_chain_the_points_and_the_page_say_the_same(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    table = Chain(run_recipe(world), done[0]).table()
    (points,) = tabulate_folders([done[0] / "evaluation"])
    assert points.rows == table.rows
    page = write_report([done[0]], tmp_path / "page.html").page.read_text()
    values = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (shown,) = values["parts"][0]["tables"]
    assert shown["rows"] == json.loads(json.dumps(finite(asdict(table))))["rows"]
    assert all(row.title in page for row in table.rows)


def test_a_complete_chain_does_nothing_again(
    world: Path, done: tuple[Path, Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr("tad.training.distill.distill", never)
    monkeypatch.setattr("tad.evaluation.run.decode", never)
    monkeypatch.setattr("tad.trajectories.collect.roll_out", never)
    monkeypatch.setattr("tad.pipeline.pool.measure_window", never)
    watch = Listener()
    assert Chain(run_recipe(world), done[0], watch).run(WORK)
    assert sum("trained before" in line for line in watch.lines) == 2


def test_a_chain_stopped_anywhere_goes_on_to_the_same_rows(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    calls, stop = 0, 1
    while not Chain(run_recipe(world), tmp_path, Listener(stop)).run(WORK):
        calls, stop = calls + 1, stop + 3
        assert calls < 20
    assert calls >= 2
    for path in (done[0] / "evaluation").rglob("rows.jsonl"):
        mine = Results.open(tmp_path / path.relative_to(done[0]).parent).rows()
        theirs = Results.open(path.parent).rows()
        assert [(row.id, row.ids, row.steps) for row in mine] == [
            (row.id, row.ids, row.steps) for row in theirs
        ]


def test_training_that_was_stopped_is_resumed(world: Path, tmp_path: Path) -> None:
    recipe = run_recipe(world)
    chain = Chain(recipe, tmp_path)
    chain.run(("collect", "window"))
    first = recipe.distill_recipe("quality", str(chain.out / "trajectories"), recipe.students["quality"])
    distill(first, chain.student("quality"), stop_at=2, quiet=True)
    assert list(chain.student("quality").glob("checkpoint-2"))
    assert chain.run(("distill",))
    log = (chain.student("quality") / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collect": {"seed": 7}}, "recipe.seed"),
        ({"window": {"states": 3}}, r"window\.states"),
        ({"distill": {"learning": {"lr": 0.5}}}, "learning"),
        ({"evaluate": {"gen_length": 32}}, "gen_length"),
    ],
)
def test_a_directory_of_another_recipe_is_refused(
    world: Path, done: tuple[Path, Listener], changes: dict, message: str
) -> None:
    with pytest.raises(TadError, match=message):
        Chain(run_recipe(world, **changes), done[0]).run(WORK)


def test_rounds_are_students_of_students(world: Path, tmp_path: Path) -> None:
    recipe = run_recipe(world, rounds=2, split_prompts=True, students={"speed": {"learning": {"steps": 2}}})
    assert not Chain(recipe, tmp_path, Listener(6)).run(WORK)  # in the second round
    assert Chain(recipe, tmp_path).run(WORK)
    names = [f"{name}-round{number}" for number in (1, 2) for name in ("quality", "speed")]
    assert sorted(path.name for path in (tmp_path / "evaluation").iterdir()) == sorted(["base", *names])
    stores = {
        name: TrajectoryStore.open(tmp_path / name)
        for name in ("trajectories", *(f"trajectories-{n}" for n in names[2:]))
    }
    assert {store.meta.examples for store in stores.values()} == {6}
    assert len({store.meta.model for store in stores.values()}) == 3
    for name, rank in zip(names, (2, 2, 4, 4), strict=True):
        lm = tad.load(world / "llada", adapter=tmp_path / "students" / name / "adapter", device="cpu")
        assert lm.peft.peft_config["default"].r == rank
    costs = {cost["student"]: cost for cost in json.loads((tmp_path / "tables" / "costs.json").read_text())}
    assert [costs[name]["steps"] for name in names] == [3, 2, 6, 4]
    assert [costs[name]["rollouts"] for name in names] == [6, 6, 12, 12]
    page = write_report([tmp_path], tmp_path / "page.html").page.read_text()
    assert all(name in page for name in names)
    watch = Listener()
    assert Chain(recipe, tmp_path, watch).run(WORK)
    assert sum("trained before" in line for line in watch.lines) == 4


def test_the_last_round_may_collect_and_train_in_another_way(world: Path, tmp_path: Path) -> None:
    students = {"ltr": {"objective": {"name": "tad", "window": "quality"}}}
    last = {"collect": {"order": "parallel", "threshold": 2.0}, "distill": {"objective": {"window": 2}}}
    recipe = run_recipe(world, rounds=2, split_prompts=True, last_round=last).model_copy(
        update={"students": students}
    )
    assert Chain(recipe, tmp_path).run(("collect", "window", "distill"))
    for number, order, window in ((1, "teacher", "quality"), (2, "parallel", 2)):
        store = "trajectories" if number == 1 else "trajectories-ltr-round2"
        assert TrajectoryStore.open(tmp_path / store).meta.recipe["order"] == order
        trained = read_record(tmp_path / "students" / f"ltr-round{number}")["recipe"]
        assert trained["objective"]["window"] == window
    with pytest.raises(TadError, match="thresold"):
        Chain(run_recipe(world, last_round={"collect": {"thresold": 1}}), tmp_path / "other")


def test_stages_in_the_wrong_order_say_which_one_is_missing(world: Path, tmp_path: Path) -> None:
    chain = Chain(run_recipe(world), tmp_path)
    with pytest.raises(TadError, match="'collect'"):
        chain.run(("window",))
    with pytest.raises(TadError, match="'distill'"):
        chain.run(("evaluate",))
    with pytest.raises(TadError, match="'destill'"):
        chain.run(("destill",))


def test_a_store_that_is_not_complete_is_neither_measured_nor_trained_on(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(done[0] / "trajectories", out / "trajectories")
    (out / "trajectories" / "shard-00001.parquet").unlink()
    for stage in ("window", "distill"):
        with pytest.raises(TadError, match="'collect'"):
            Chain(run_recipe(world), out).run((stage,))


def test_what_cannot_be_graded_here_is_said_before_anything_is_collected(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TadError("no sandbox here")

    monkeypatch.setattr("tad.evaluation.questions.Questions.check_graders", refuse)
    with pytest.raises(TadError, match="no sandbox here"):
        Chain(run_recipe(world), tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_two_processes_do_not_share_a_directory(world: Path, tmp_path: Path) -> None:
    from tad.files import writing

    with writing(tmp_path), pytest.raises(TadError, match="another process is writing"):
        Chain(run_recipe(world), tmp_path).run()


def test_an_adapter_that_is_there_is_evaluated_beside_the_others(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    recipe = run_recipe(
        world,
        students={"quality": {"objective": {"name": "tad", "window": 2}}},
        adapters={"ready": str(done[0] / "students" / "speed" / "adapter")},
    )
    recipe = recipe.model_copy(update={"students": {"quality": {"objective": {"name": "tad", "window": 2}}}})
    chain = Chain(recipe, tmp_path)
    assert chain.run(WORK)
    own = find_defaults(recipe.model, recipe.adapters["ready"])  # of its directory, and not of the recipe
    (run,) = (tmp_path / "evaluation" / "ready").iterdir()
    mine = Results.open(run)
    assert mine.meta.adapter is not None
    assert mine.meta.decoder["name"] == own.decoder
    assert [row.method for row in chain.table().rows][-1] == f"ready, {own.decoder}"


def test_the_base_comes_back_from_training_and_decoding_as_it_was(world: Path, tmp_path: Path) -> None:
    recipe = run_recipe(world)
    chain = Chain(recipe, tmp_path)
    chain.run(("collect", "window"))
    pool = ModelPool(recipe.model, "cpu")
    before = {name: value.clone() for name, value in pool.base().model.named_parameters()}
    values = recipe.distill_recipe(
        "speed", str(chain.out / "trajectories"), {**recipe.students["speed"], "precision": "bf16"}
    )

    def check() -> None:
        after = dict(pool.base().model.named_parameters())
        assert set(before) == set(after)
        assert all((before[name] == after[name]).all() for name in before)

    result = pool.train(values, tmp_path / "student", Listener())
    check()
    lm, identity = pool.decoded(result)
    assert lm.peft is None  # the adapter is in the weights
    assert identity.model == pool.fingerprint
    assert identity.adapter is not None
    check()


def test_a_window_that_is_not_reached_is_said_with_its_stand_in() -> None:
    decay = Decay([0.9, 0.6, 0.4], [0.9] * 3, [0.9] * 3, [5] * 3, 4, 8, False)
    windows = {"quality": Window(0.5, 2.4, 2, 1.0, 3.0), "speed": Window(0.2, math.nan, 3, 1.0, 3.0)}
    reached, cap, few = explain_windows(WindowReport("teacher", "m", decay, decay, windows))
    assert "quality window 2" in reached
    assert "speed window 3, the cap" in cap
    assert "4 trajectories" in few


def test_a_table_names_the_students_whose_window_is_the_cap(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(done[0], out)
    report = read_report(out / "trajectories")
    cap = Window(0.5, math.nan, 8, math.nan, math.nan)
    write_window(replace(report, windows={**report.windows, "quality": cap}), out / "trajectories")
    note = Chain(run_recipe(world), out).table().note
    assert note is not None
    assert f"quality {cap}" in note
    assert "speed" not in note  # a number


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"o": {"name": "tad", "window": 8}}, {"o": {"window": 4}}, {"o": {"name": "tad", "window": 4}}),
        ({"o": {"name": "tad", "window": 8}}, {"o": {"name": "sft"}}, {"o": {"name": "sft"}}),
        # An objective without a name is the default one.
        ({"o": {"lambda": 2}}, {"o": {"name": "tad", "window": 4}}, {"o": {"lambda": 2, "name": "tad", "window": 4}}),
        ({"o": {"lambda": 2}}, {"o": {"name": "d2f"}}, {"o": {"name": "d2f"}}),
    ],
)  # fmt: skip
def test_sections_are_laid_over_each_other_but_another_objective_replaces_the_first(
    below: dict, above: dict, expected: dict
) -> None:
    assert lay_over(below, above) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collect": {"blok": 3}}, "collect: unknown key 'blok'; did you mean 'block'"),
        ({"distill": {"learning": {"lr": -1}}}, "distill of 'quality': 'learning.lr'"),
        ({"collect": {"model": "x"}}, "'model' stands at the top of the recipe"),
        ({"students": {"base": {}}}, "'base' is taken"),
        ({"evaluate": {"thresholds": {"quota": [1.0]}}}, "not for 'quota'"),
    ],
)
def test_bad_recipes_are_refused_before_anything_is_loaded(
    world: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(TadError, match=message):
        Chain(run_recipe(world, **changes), tmp_path)


def test_the_command_prints_the_table_and_where_it_is(world: Path, tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(run_recipe(world).model_dump(mode="json", exclude_unset=True)))
    out = tmp_path / "out"
    words = ["run", str(file), "students={only: {objective: {name: tad, window: 2}}}", "--out", str(out)]
    answer = CliRunner().invoke(app, words, catch_exceptions=False)
    assert answer.exit_code == 0
    assert "only, tad" in answer.output
    assert f"written: {out}" in answer.output
    assert "== Collect" in answer.output
    assert "report.html" in answer.output


def test_the_command_says_how_to_go_on(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(run_recipe(world).model_dump(mode="json", exclude_unset=True)))
    monkeypatch.setattr("tad.cli.run.ConsoleListener.stopping", lambda _: True)
    answer = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 130
    assert f"go on with: tad run {file} --out {tmp_path / 'out'}" in answer.output


def test_the_window_command_takes_trajectories_from_all_over_the_store(
    done: tuple[Path, Listener], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shutil.copytree(done[0] / "trajectories", tmp_path / "store")
    asked: list[str] = []

    def measure(lm: object, rows: list[Trajectory], *rest: object, **options: object) -> None:
        asked.extend(row.example for row in rows)
        raise TadError("seen enough")

    monkeypatch.setattr("tad.trajectories.window.measure_decay", measure)
    words = ["window", str(store), "--model", str(world / "llada"), "--device", "cpu", "--limit", "3"]
    CliRunner().invoke(app, words)
    every = [row.example for row in TrajectoryStore.open(store).rows()]
    assert len(every) > 4
    assert asked == [every[0], every[round((len(every) - 1) / 2)], every[-1]]


# What is trained on is not evaluated


def check_problems(
    world: Path, collected: dict[str, Any], asked: dict[str, Any], allowed: bool = False
) -> None:
    changes = {
        "collect": {"tasks": [collected]},
        "evaluate": {"tasks": [asked]},
        "allow_contamination": allowed,
    }
    run_recipe(world, **changes).check()


@pytest.mark.parametrize(
    ("collected", "asked"),
    [
        ({"name": "gsm8k", "split": "test"}, {"name": "gsm8k"}),
        ({"name": "gsm8k"}, {"name": "gsm8k", "split": "train"}),
        ({"name": "nano-word", "options": {"size": 5}}, {"name": "nano-word", "split": "train"}),
        ({"name": "jsonl", "options": {"path": "FILE"}}, {"name": "jsonl:FILE"}),
        ({"name": "prm12k"}, {"name": "math"}),
    ],
)
def test_problems_that_are_collected_are_not_evaluated_unless_allowed(
    world: Path, collected: dict[str, Any], asked: dict[str, Any]
) -> None:
    text = json.dumps([collected, asked]).replace("FILE", str(world / "questions.jsonl"))
    collected, asked = json.loads(text)
    with pytest.raises(TadError, match=r"is also what trajectories are collected of|is refused: "):
        check_problems(world, collected, asked)
    check_problems(world, collected, asked, allowed=True)


def test_other_splits_and_other_files_are_other_problems(world: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text((world / "questions.jsonl").read_text())
    check_problems(world, {"name": "gsm8k"}, {"name": "gsm8k"})  # train, test
    check_problems(world, {"name": "math"}, {"name": "gsm8k", "split": "train"})
    paths = [{"name": "jsonl", "options": {"path": str(path)}} for path in (world / "questions.jsonl", other)]
    check_problems(world, *paths)


def test_a_question_that_is_evaluated_is_not_collected_whatever_task_it_is_from(
    world: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    lines = (world / "questions.jsonl").read_text().splitlines(keepends=True)
    other.write_text(lines[0] + '{"question": "something else", "answer": "1"}\n')
    collect = {"tasks": [{"name": "jsonl", "options": {"path": str(other)}}]}
    recipe = run_recipe(world, collect=collect, allow_contamination=False)
    with pytest.raises(TadError, match=r"collect\.tasks: 1 of 2 questions .*'exclude'"):
        Chain(recipe, tmp_path / "out").run(("collect",))
    name = f"jsonl:{world / 'questions.jsonl'}"
    collect = {"tasks": [{"name": f"jsonl:{other}", "exclude": [name]}]}
    recipe = run_recipe(world, collect=collect, allow_contamination=False)
    assert Chain(recipe, tmp_path / "out").run(("collect",))
    assert TrajectoryStore.open(tmp_path / "out" / "trajectories").meta.examples == 1


def test_programs_without_a_sandbox_are_refused_with_the_override_that_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(self: object) -> None:
        raise NoSandboxError("bubblewrap is missing")

    recipe = load_recipe(RunRecipe, "run-nano-llada-ltr")
    monkeypatch.setattr(Sandbox, "check", missing)
    with pytest.raises(TadError) as refused:
        Chain(recipe, tmp_path / "run").run()
    said = str(refused.value)
    assert "unsafe" not in said  # an option that this command has not
    override = re.findall(r"'(evaluate\.tasks=.*?)'$", said)
    changed = load_recipe(RunRecipe, "run-nano-llada-ltr", override)
    assert [task.name for task in changed.evaluate.tasks] == ["nano-word", "nano-math"]
    with pytest.raises(TadError, match=r"collect\.tasks="):  # the teacher's programs are graded, too
        Chain(changed, tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


def test_a_wrong_model_is_named_before_any_data_are_looked_for(tmp_path: Path) -> None:
    recipe = load_recipe(RunRecipe, "run-llada", [f"model={tmp_path / 'nothing'}"])
    with pytest.raises(TadError, match="nothing: no such directory"):
        Chain(recipe, tmp_path / "run").run()


def test_a_run_ends_with_commands_that_name_what_is_there(done: tuple[Path, Listener], world: Path) -> None:
    lines = Chain(run_recipe(world), done[0]).conclude()
    assert lines[0].startswith("Verdict: ")
    commands = [shlex.split(line) for line in lines[2:]]
    assert [words[1] for words in commands] == ["generate", "serve", "compare"]
    for words in commands[:2]:
        assert Path(words[words.index("--adapter") + 1], "adapter_config.json").is_file()
    for run in commands[2][2:]:
        Results.open(run)
