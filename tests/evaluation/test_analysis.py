"""The one analysis, held to a small study whose numbers are kept, and to what its definitions say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analysis_world import GOLDEN, TASKS, N, write_golden, write_run, write_training
from hypothesis import given
from hypothesis import strategies as st

from tad.errors import TadError
from tad.evaluation import aup, compare_runs, tabulate_folders
from tad.evaluation.analysis import (
    MEAN,
    POOLED,
    SPEEDS,
    ResultRow,
    ResultTable,
    RowSpec,
    analyse,
    mcnemar,
)
from tad.evaluation.aup import Point, tpf_at_accuracy
from tad.evaluation.measurement import Bootstrap, MethodRuns, Outcomes, measure_task
from tad.evaluation.results import Results
from tad.evaluation.summary import summarise, wilson
from tad.evaluation.sweep import FIRST, Setting
from tad.evaluation.tables import as_csv, as_markdown, show_comparison, show_points, show_table
from tad.evaluation.verdict import list_verdicts

STUDY = {row["method"]: row["numbers"] for row in GOLDEN["study"]["rows"]}
STUDY["base, one-by-one"] = STUDY.pop("base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def table(folder: Path) -> ResultTable:
    (found,) = tabulate_folders([folder / "evaluation"])
    return found


def row_of(table: ResultTable, method: str) -> ResultRow:
    return next(row for row in table.rows if row.method == method)


# The kept numbers


def test_methods_are_models_and_decoders_and_seeds_of_one_training_are_one_method(table: ResultTable) -> None:
    assert [row.method for row in table.rows] == [
        "base, one-by-one",
        "base, fast-dllm",
        "base, tad",
        "quality, tad",
        "speed, tad",
    ]
    assert row_of(table, "speed, tad").seeds == [0, 1]
    assert (table.base, table.baseline, table.tolerance) == ("base, one-by-one", "base, fast-dllm", 1.5)


@pytest.mark.parametrize("method", STUDY)
def test_pooled_numbers_are_those_of_the_kept_study(table: ResultTable, method: str) -> None:
    found, kept = row_of(table, method).scopes[POOLED], STUDY[method]
    assert found.setting == kept["setting"]
    for name in ("accuracy", "tpf"):
        assert getattr(found, name).value == pytest.approx(kept[name]["mean"])
        assert getattr(found, name).sd == (
            None if kept[name]["sd"] is None else pytest.approx(kept[name]["sd"])
        )
    assert found.to_base is not None
    for difference, name in ((found.to_base.accuracy, "to_base"), (found.to_base.tpf, "tpf_to_base")):
        assert difference.value == pytest.approx(kept[name]["value"], abs=1e-9)
        assert difference.interval == pytest.approx(kept[name]["interval"])
    assert found.tpf_at_target is not None
    assert found.tpf_at_target.accuracy == pytest.approx(kept["reach"]["accuracy"])
    assert found.tpf_at_target.tpf == (
        None if kept["reach"]["tpf"] is None else pytest.approx(kept["reach"]["tpf"])
    )
    assert found.tpf_at_target_interval == pytest.approx(kept["reach_interval"])
    if kept["times_rival"] is None:
        assert found.times_baseline is None
    else:
        assert found.times_baseline is not None
        assert found.times_baseline.value == pytest.approx(kept["times_rival"]["value"])
        assert found.times_baseline.interval == pytest.approx(kept["times_rival"]["interval"])


@pytest.mark.parametrize("method", STUDY)
def test_areas_are_the_mean_over_tasks_of_the_kept_study(table: ResultTable, method: str) -> None:
    area, kept = row_of(table, method).scopes[MEAN].aup, STUDY[method]["aup"]
    assert area is not None
    assert area.value == pytest.approx(kept["mean"])
    assert area.sd == (None if kept["sd"] is None else pytest.approx(kept["sd"]))
    assert row_of(table, method).scopes[POOLED].aup is None


@pytest.mark.parametrize(
    "curve", GOLDEN["points"]["curves"], ids=lambda c: f"{c['model']}-{c['decoder']}-{c['task']}"
)
def test_points_of_a_task_are_the_kept_ones(folder: Path, curve: dict) -> None:
    label = curve["model"].replace("-0", "-seed0").replace("-1", "-seed1")
    (alone,) = tabulate_folders(
        [folder / "evaluation" / label], y_max=GOLDEN_Y_MAX, base=folder / "evaluation" / "base"
    )
    method = f"{curve['model'].partition('-')[0]}, {curve['decoder']}"
    found = row_of(alone, method).scopes[curve["task"]]
    assert len(found.points) == len(curve["points"])
    for mine, kept in zip(found.points, curve["points"], strict=True):
        assert (mine.value, mine.dropped) == (kept["setting"], kept["dropped"])
        assert mine.accuracy.value == pytest.approx(kept["accuracy"])
        assert mine.accuracy.se == pytest.approx(kept["se"])
        assert mine.tpf.value == pytest.approx(kept["tpf"])
        assert mine.tpf.se == pytest.approx(kept["tpf_se"])
    assert found.aup is not None
    assert found.aup.value == pytest.approx(curve["aup"])
    low, high = curve["aup_interval"]
    wide = high - low  # tasks have resamples of their own, so ends agree up to the noise of a thousand
    assert found.aup.interval == (pytest.approx(low, abs=0.25 * wide), pytest.approx(high, abs=0.25 * wide))


GOLDEN_Y_MAX = {key.partition("/")[0]: top for key, top in GOLDEN["points"]["y_max"].items()}


def test_a_comparison_is_the_kept_one(folder: Path) -> None:
    runs = folder / "evaluation"
    found = compare_runs([runs / "base" / "one-by-one", runs / "quality-seed0" / "tad,threshold=0.4"])
    assert [row.title for row in found.table.rows] == ["base, one-by-one", "quality, tad"]
    for kept in GOLDEN["compare"]:
        scope = POOLED if kept["task"] == "all" else kept["task"]
        mine = found.table.rows[1].scopes[scope].to_base
        assert mine is not None
        assert (mine.n, mine.gained, mine.lost, mine.p_value) == (
            kept["n"],
            kept["gained"],
            kept["lost"],
            kept["p_value"],
        )
        assert mine.accuracy.value == pytest.approx(kept["accuracy"])
        assert mine.tpf.value == pytest.approx(kept["tpf"])
        assert mine.minimum_detectable_effect == pytest.approx(kept["resolvable"])
        if scope in (POOLED, TASKS[0]):  # the resamples of the first task are those of the kept numbers
            assert mine.accuracy.interval == pytest.approx(kept["accuracy_interval"])
            assert mine.tpf.interval == pytest.approx(kept["tpf_interval"])


def test_y_max_is_the_highest_accuracy_of_any_method_with_seeds_averaged(table: ResultTable) -> None:
    assert table.y_max == pytest.approx(GOLDEN["study"]["y_max"])


# One number everywhere


def test_a_comparison_and_a_table_say_the_same_of_the_same_runs(folder: Path, table: ResultTable) -> None:
    runs = folder / "evaluation"
    pair = compare_runs([runs / "base" / "one-by-one", runs / "quality-seed0" / "tad,threshold=0.4"]).table
    for scope in table.scopes:
        one, two = row_of(table, "quality, tad").scopes[scope], pair.rows[1].scopes[scope]
        assert (one.to_base, one.accuracy, one.tpf) == (two.to_base, two.accuracy, two.tpf)


def test_a_summary_and_a_table_say_the_same_of_a_run(folder: Path, table: ResultTable) -> None:
    summary = summarise(Results.open(folder / "evaluation" / "base" / "one-by-one").rows())
    found = row_of(table, "base, one-by-one").scopes
    for task in TASKS:
        kept = summary["tasks"][task]["tad"]
        assert (found[task].accuracy.value, found[task].accuracy.se) == pytest.approx(
            (kept["accuracy"], kept["se"])
        )
        assert found[task].accuracy.interval == pytest.approx(tuple(kept["interval"]))
        assert (found[task].tpf.value, found[task].tpf.se) == pytest.approx((kept["tpf"], kept["tpf_se"]))
    overall = summary["overall"]["tad"]
    assert found[POOLED].accuracy.value == pytest.approx(overall["accuracy"])
    mean = overall["mean_of_tasks"]
    assert (found[MEAN].accuracy.value, found[MEAN].accuracy.se) == pytest.approx(
        (mean["accuracy"], mean["se"])
    )
    assert found[MEAN].tpf.value == pytest.approx(mean["tpf"])


# Which runs are one method


def test_trainings_that_differ_in_more_than_the_seed_are_two_methods(tmp_path: Path) -> None:
    rows = GOLDEN["runs"][0]["rows"]
    for label, seed, changes in (
        ("mine/speed", 0, {}),
        ("other/speed", 1, {"learning": {"steps": 8}}),
        ("third/speed", 1, {"trajectories": 20}),
        ("mine/speed-seed1", 1, {}),
    ):
        write_training(tmp_path / label, "speed", seed, **changes)
        write_run(
            tmp_path / "eval" / label.replace("/", "-"),
            "tad",
            rows,
            tmp_path / label / "adapter",
            threshold=0.5,
        )
    (found,) = tabulate_folders([tmp_path / "eval"])
    assert {row.method: row.seeds for row in found.rows} == {
        "mine/speed, tad": [0, 1],
        "other/speed, tad": [1],
        "third/speed, tad": [1],
    }


def test_without_a_record_only_the_same_weights_are_one_method(tmp_path: Path) -> None:
    rows = GOLDEN["runs"][0]["rows"]
    for label in ("a-seed0", "a-seed1"):
        for threshold in (0.1, 0.5):
            write_run(
                tmp_path / "eval" / f"{label}-{threshold}",
                "tad",
                rows,
                tmp_path / label / "adapter",
                threshold=threshold,
            )
    (found,) = tabulate_folders([tmp_path / "eval"])
    assert len(found.rows) == 2
    assert len({row.method for row in found.rows}) == 2
    assert all(len(row.scopes[MEAN].points) == 2 for row in found.rows)


def test_decoders_with_other_settings_are_other_methods(tmp_path: Path) -> None:
    rows = GOLDEN["runs"][0]["rows"]
    for block in (16, 32):
        write_run(tmp_path / f"{block}", "tad", rows, threshold=0.5, block=block)
    (found,) = tabulate_folders([tmp_path])
    assert len(found.rows) == 2
    assert any("block 16" in row.method for row in found.rows)


def test_tasks_asked_in_another_order_are_the_same_problems(tmp_path: Path) -> None:
    rows = GOLDEN["runs"][0]["rows"]
    write_run(tmp_path / "one", FIRST, rows)
    write_run(tmp_path / "two", "tad", [*rows[N:], *rows[:N]], threshold=0.5)
    (found,) = tabulate_folders([tmp_path])
    pair = row_of(found, "base, tad").scopes[POOLED].to_base
    assert pair is not None
    assert (pair.gained, pair.lost) == (0, 0)


def test_tasks_that_only_some_runs_have_stand_in_tables_of_their_own(tmp_path: Path) -> None:
    rows = GOLDEN["runs"][0]["rows"]
    write_run(tmp_path / "both", FIRST, rows)
    write_run(tmp_path / "one", "tad", [row for row in rows if row[0] == "word"], threshold=0.5)
    found = {tuple(table.tasks): [row.method for row in table.rows] for table in tabulate_folders([tmp_path])}
    assert found == {("word",): ["base, one-by-one", "base, tad"], ("math",): ["base, one-by-one"]}


# Definitions


def outcomes(right: float, forwards: int, roll: int = 0, tasks: tuple[str, ...] = TASKS) -> Outcomes:
    """A run in which the first share of each task is right; every answer has 60 tokens."""
    each = 40 // len(tasks)
    correct = np.tile((np.arange(each) < round(right * each)).astype(float), len(tasks))
    return Outcomes(
        np.repeat(tasks, each),
        np.array([f"q{i}" for i in range(40)]),
        np.roll(correct, roll),
        np.full(40, 60.0),
        np.full(40, 96.0),
        np.full(40, float(forwards)),
        np.ones(40),
    )


def made(name: str, points: list[tuple[float | None, float, int]]) -> MethodRuns:
    """A method of one seed: (threshold, share right, forwards) of each setting."""
    settings = [
        Setting(FIRST, {}) if at is None else Setting("tad", {"threshold": at}, at) for at, _, _ in points
    ]
    return MethodRuns(name, settings, [None], [[outcomes(right, forwards) for _, right, forwards in points]])


BASE = made("base", [(None, 0.8, 60)])


def table_of(*methods: MethodRuns, base: MethodRuns | None = BASE, **rest: object) -> ResultTable:
    specs = [RowSpec(one.name, one.name, one, len(one.seeds)) for one in methods]
    return analyse("main", "Main", specs, base, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decoder", "name", "values", "expected"),
    [
        ("tad", "threshold", [0.1, 0.5, 1.0], 0.5),  # the published threshold was run
        ("tad", "threshold", [0.1, 0.4, 0.7], 0.4),  # the nearest one
        ("fast-dllm", "threshold", [0.98, 0.95, 0.7], 0.95),
        ("llada", "steps", [48, 24], 48),  # without a threshold, the most careful one
    ],
)
def test_the_default_setting_is_the_published_threshold_or_the_nearest(
    decoder: str, name: str, values: list[float], expected: float
) -> None:
    settings = [Setting(FIRST, {}), *(Setting(decoder, {name: value}, value) for value in values)]
    method = MethodRuns("m", settings, [None], [[outcomes(0.8, 30) for _ in settings]])
    assert method.settings[method.default_point].value == expected


def test_the_target_accuracy_is_the_bases_less_the_tolerance() -> None:
    method = made("m", [(None, 0.8, 60), (0.5, 0.7, 20)])
    for tolerance in (1.5, 5.0):
        found = table_of(BASE, method, tolerance=tolerance)
        assert found.targets[MEAN] == pytest.approx(80 - tolerance)
        at = row_of(found, "m").scopes[MEAN].tpf_at_target
        assert at == tpf_at_accuracy([Point(1.0, 80.0), Point(3.0, 70.0)], 80 - tolerance)


def test_without_a_base_a_method_is_held_to_its_own_one_token_run() -> None:
    found = table_of(made("m", [(None, 0.9, 60), (0.5, 0.8, 20)]), base=None)
    result = found.rows[0].scopes[MEAN]
    assert found.targets == {}
    assert result.to_base is not None
    assert result.to_base.accuracy.value == pytest.approx(-10.0)
    assert result.tpf_at_target is not None
    assert result.tpf_at_target.accuracy == pytest.approx(88.5)
    assert "held to its own" in show_table(found)


def test_the_mean_over_tasks_weighs_tasks_and_the_pool_weighs_problems() -> None:
    task = np.array(["a"] * 30 + ["b"] * 10)
    run = Outcomes(
        task,
        np.arange(40).astype(str),
        np.r_[np.ones(30), np.zeros(10)],
        np.full(40, 60.0),
        np.full(40, 96.0),
        np.r_[np.full(30, 10.0), np.full(10, 60.0)],
        np.ones(40),
    )
    found = table_of(MethodRuns("m", [Setting(FIRST, {})], [None], [[run]]), base=None).rows[0].scopes
    assert found[MEAN].accuracy.value == pytest.approx(50.0)
    assert found[POOLED].accuracy.value == pytest.approx(75.0)
    assert found[MEAN].tpf.value == pytest.approx((6 + 1) / 2)
    assert found[POOLED].tpf.value == pytest.approx(40 * 60 / (300 + 600))
    assert list(found) == [MEAN, POOLED, "a", "b"]


def test_differences_are_paired() -> None:
    same = made("same", [(None, 0.8, 60)])
    rolled = MethodRuns("rolled", [Setting(FIRST, {})], [None], [[outcomes(0.8, 60, roll=7)]])
    found = table_of(same, rolled)
    one, two = (row.scopes[POOLED].to_base for row in found.rows)
    assert one is not None
    assert two is not None
    assert one.accuracy.interval == (0.0, 0.0)
    assert two.accuracy.interval is not None
    assert two.accuracy.interval[0] < -5 < 5 < two.accuracy.interval[1]


def test_all_right_has_wilsons_interval_instead_of_no_error() -> None:
    table = table_of(made("m", [(None, 1.0, 60)]), base=None)
    found = table.rows[0].scopes
    low, high = found[MEAN].accuracy.interval or (0, 0)
    assert found["word"].accuracy.se == 0
    assert f"100.0 [{low:.1f}, 100.0]" in show_table(table)
    assert 100 * wilson(20, 1.0)[0] < low < high == 100.0
    method = MethodRuns("m", [Setting(FIRST, {})], [None], [[outcomes(0.5, 60, tasks=("word",))]])
    single = table_of(method, base=None)
    assert list(single.rows[0].scopes) == ["word"]
    assert "50.0 ± " in show_table(single)


def test_a_task_without_verdicts_is_left_out_and_said() -> None:
    run = outcomes(0.5, 60)
    blank = replace(run, correct=np.where(run.task == "math", np.nan, run.correct))
    found = table_of(BASE, MethodRuns("half", [Setting(FIRST, {})], [None], [[blank]]))
    assert list(found.tasks) == ["word"]
    assert found.ungraded == ["math"]
    assert "Not graded yet, and not in the numbers: math." in as_markdown(found)


def test_rows_that_were_not_run_say_so_and_have_no_numbers() -> None:
    specs = [
        RowSpec("base", "base", BASE),
        RowSpec("later", "later", None, 3),
        RowSpec("v2", "v2", None, 0, "not built: it is another base model"),
    ]
    text = as_markdown(analyse("main", "Main", specs, BASE))
    assert "| later | not run yet |" in text
    assert "| v2 | not built: it is another base model |" in text


def test_runs_on_other_questions_are_refused() -> None:
    run = outcomes(0.5, 60)
    other = replace(run, problem=np.roll(run.problem, 1))
    with pytest.raises(TadError, match="'other'"):
        table_of(MethodRuns("other", [Setting(FIRST, {})], [None], [[other]]))


def test_y_max_may_be_given_for_all_tasks_or_for_each() -> None:
    method = made("m", [(None, 0.8, 60), (0.5, 0.8, 20)])
    for y_max in (90.0, {"word": 90.0, "math": 90.0}):
        found = table_of(method, y_max=y_max)
        assert found.y_max == {"word": 90.0, "math": 90.0}
        area = found.rows[0].scopes[MEAN].aup
        assert area is not None
        assert area.value == pytest.approx(aup.aup([Point(1.0, 80.0), Point(3.0, 80.0)], 90.0))
    with pytest.raises(TadError, match="gsm8k"):
        table_of(method, y_max={"gsm8k": 80.0})
    asked = MethodRuns("m", [Setting(FIRST, {})], [None], [[outcomes(0.5, 60, tasks=("gsm8k (plain)",))]])
    assert table_of(asked, base=None, y_max={"gsm8k": 80.0}).y_max == {"gsm8k (plain)": 80.0}


def test_an_area_without_a_right_answer_or_a_one_token_run_is_undefined() -> None:
    assert table_of(made("m", [(None, 0.0, 60), (0.5, 0.0, 20)]), base=None).rows[0].scopes[MEAN].aup is None
    short = table_of(made("m", [(0.5, 0.8, 20)])).rows[0].scopes[MEAN]
    assert (short.aup, short.first) == (None, None)


@given(st.lists(st.tuples(st.floats(0.5, 9), st.floats(1, 100)), min_size=1, max_size=6), st.floats(5, 100))
def test_many_curves_at_once_are_what_each_is_alone(points: list[tuple[float, float]], level: float) -> None:
    curve = [Point(*point) for point in points]
    tpf, accuracy = (np.array([[getattr(p, name)] * 3 for p in curve]) for name in ("tpf", "accuracy"))
    many = aup.tpfs_at_accuracy(tpf, accuracy, np.full(3, level))
    alone = tpf_at_accuracy(curve, level).tpf
    assert many.tolist() == [pytest.approx(math.nan if alone is None else alone, nan_ok=True)] * 3
    first = aup.areas(aup.without_slower(tpf), accuracy, 80.0)
    faster = [curve[0], *(point for point in curve[1:] if point.tpf > curve[0].tpf)]
    assert first.tolist() == [pytest.approx(aup.aup(faster, 80.0))] * 3


def test_intervals_hold_the_share_they_say() -> None:
    """Of 200 samples of a known population, about 95 % of the intervals have the true accuracy in them."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        run = outcomes(0.5, 60)
        drawn = replace(run, correct=(draw.random(40) < 0.7).astype(float))
        method = MethodRuns("m", [Setting(FIRST, {})], [None], [[drawn]])
        found = measure_task(method, np.full(40, True), Bootstrap(run.task, 300).pooled)
        low, high = np.quantile(found.drawn_accuracy[0, 0], [0.025, 0.975])
        held += low <= 70 <= high
    assert 180 <= held <= 199


def test_draws_of_prompts_that_do_not_fit_do_not_cost_the_interval() -> None:
    run = outcomes(0.5, 60)
    few = np.arange(40) % 20 < 2
    blank = [
        replace(
            run, correct=run.correct * few, tokens=60.0 * few, tokens_all=96.0 * few, forwards=forwards * few
        )
        for forwards in (60.0, 20.0)
    ]
    method = MethodRuns("m", [Setting(FIRST, {}), Setting("tad", {"threshold": 0.5}, 0.5)], [None], [blank])
    area = table_of(method, base=None, resamples=200).rows[0].scopes["word"].aup
    assert area is not None
    assert area.interval is not None
    assert area.interval[0] <= area.value <= area.interval[1]


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (3, 3, 1.0), (1, 9, 22 / 1024)]
)
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p) == mcnemar(lost, gained)


# Text


def test_the_verdict_comes_first(table: ResultTable) -> None:
    text = show_table(table)
    found = row_of(table, "quality, tad").scopes[MEAN]
    assert found.tpf_at_target is not None
    assert found.times_baseline is not None
    first = text.splitlines()[0]
    assert first == list_verdicts(table)[0]
    assert first.startswith("quality, tad: ")
    for number in (found.tpf_at_target.tpf, found.times_baseline.value):
        assert f"{number:.2f}" in first
    assert first.endswith(f"n = {2 * N}")


def test_every_format_has_every_method(table: ResultTable) -> None:
    for text in (show_table(table), as_markdown(table), as_csv(table), show_points(table)):
        assert all(row.method in text for row in table.rows)
    blocks = [block.splitlines() for block in as_markdown(table).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 2  # the methods, and their accuracies at fixed speed
    assert all(len({line.count("|") for line in block}) == 1 for block in blocks)


def test_accuracies_at_fixed_speed_are_read_off_the_printed_points(table: ResultTable) -> None:
    found = row_of(table, "speed, tad").scopes[MEAN]
    fastest = max(point.tpf.value for point in found.points)
    assert set(found.accuracy_at) == {speed for speed in SPEEDS if speed <= fastest}
    for speed, one in found.accuracy_at.items():
        faster = [point.accuracy.value for point in found.points if point.tpf.value >= speed]
        assert max(faster) <= one.value <= max(point.accuracy.value for point in found.points)
        assert one.interval is not None
        assert one.interval[0] <= one.value <= one.interval[1]


def test_a_printed_comparison_names_its_runs_and_tells_them_apart(folder: Path) -> None:
    runs = folder / "evaluation"
    chosen = [
        runs / "base" / "one-by-one",
        *(runs / "base" / f"tad,threshold={value}" for value in (0.1, 0.5)),
    ]
    text = show_comparison(compare_runs(chosen).table, ["a note"])
    assert text.startswith("note: a note")
    for word in ("base, tad at 0.1", "base, tad at 0.5", "McNemar", "against base, one-by-one", MEAN, POOLED):
        assert word in text
