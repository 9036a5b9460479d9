"""The numbers of tables: paired, with seeds averaged, and honest about what is not there."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from eval_world import made_row
from hypothesis import given
from hypothesis import strategies as st

from tad.errors import TadError
from tad.evaluation import Results
from tad.evaluation.aup import Point, aup, reach
from tad.evaluation.results import RunMeta
from tad.evaluation.study.numbers import Answers, Draws, Numbers, measure, read_numbers
from tad.evaluation.study.tables import (
    Facts,
    Table,
    Wanted,
    as_csv,
    as_markdown,
    as_text,
    make_table,
    write_table,
)
from tad.evaluation.study.tuning import Trial, choose_trial, score_trial
from tad.evaluation.sweep import Setting

N = 40


def numbers(right: float, forwards: int, seed: int = 0, tasks: tuple[str, ...] = ("word", "math")) -> Numbers:
    """A run in which the first share of each task is right; every answer has 60 tokens."""
    each = N // len(tasks)
    correct = np.tile((np.arange(each) < round(right * each)).astype(float), len(tasks))
    return Numbers(
        np.repeat(tasks, each),
        np.array([f"q{i}" for i in range(N)]),
        np.roll(correct, seed),
        np.full(N, 60.0),
        np.full(N, float(forwards)),
    )


FIRST = Setting("one-by-one", {})
CURVE = [
    FIRST,
    Setting("tad", {"threshold": 0.2}, 0.2),
    Setting("tad", {"threshold": 0.5}, 0.5),
    Setting("tad", {"threshold": 1.0}, 1.0),
]
BASE = Answers("base", [FIRST], [None], [[numbers(0.8, 60)]])
TAD = Answers(
    "tad",
    CURVE,
    [0, 1],
    [
        [numbers(0.8, 60), numbers(0.8, 30), numbers(0.8, 20), numbers(0.4, 10)],
        [numbers(0.9, 60), numbers(0.9, 30), numbers(0.7, 15), numbers(0.3, 10)],
    ],
)
RIVAL = Answers(
    "rival",
    [FIRST, Setting("fast-dllm", {"threshold": 0.9}, 0.9)],
    [None],
    [[numbers(0.8, 60), numbers(0.8, 40)]],
)


def facts(table: Table, method: str) -> Facts:
    found = next(row for row in table.rows if row.method == method).numbers
    assert found is not None
    return found


def table_of(*methods: Answers, rival: Answers | None = RIVAL, below: float = 1.5) -> Table:
    wanted = [Wanted(one.name, one.name, one, len(one.seeds)) for one in methods]
    return make_table("main", "Main", wanted, BASE, rival, "llada", below)


def test_a_method_stands_at_its_published_setting_with_seeds_averaged() -> None:
    found = facts(table_of(BASE, TAD), "tad")
    assert found.setting == "tad,threshold=0.5"
    assert found.accuracy.mean == pytest.approx(75.0)
    assert found.accuracy.sd == pytest.approx(np.std([80, 70], ddof=1))
    assert found.tpf.mean == pytest.approx((60 / 20 + 60 / 15) / 2)
    assert found.first is not None
    assert found.first.mean == pytest.approx(85.0)
    assert found.to_base.value == pytest.approx(-5.0)
    assert found.n == N


def test_differences_are_paired() -> None:
    other = Answers("other", [FIRST], [None], [[numbers(0.8, 60, seed=0)]])
    rolled = Answers("rolled", [FIRST], [None], [[numbers(0.8, 60, seed=7)]])
    table = table_of(other, rolled)
    assert facts(table, "other").to_base.interval == (0.0, 0.0)
    low, high = facts(table, "rolled").to_base.interval
    assert low < -5
    assert high > 5


def test_speed_at_the_bar_is_that_of_the_curve_and_the_ratio_that_of_two_curves() -> None:
    table = table_of(BASE, TAD, RIVAL)
    found = facts(table, "tad")
    assert table.bar == pytest.approx(78.5)
    points = [Point(1.0, 85.0), Point(2.0, 85.0), Point(3.5, 75.0), Point(6.0, 35.0)]
    assert found.reach == reach(points, 78.5)
    low, high = found.reach_interval
    assert low <= (found.reach.tpf or 0) <= high
    assert found.times_rival is not None
    assert found.times_rival.value == pytest.approx((found.reach.tpf or 0) / 1.5)
    assert facts(table, "rival").times_rival.value == pytest.approx(1.0)  # type: ignore[union-attr]


def test_areas_share_one_y_max_per_task_over_all_methods() -> None:
    table = table_of(BASE, TAD)
    assert table.y_max == {"word": pytest.approx(85.0), "math": pytest.approx(85.0)}
    found = facts(table, "tad").aup
    assert found is not None
    by_seed = [
        aup([Point(1, 80.0), Point(2, 80.0), Point(3, 80.0), Point(6, 40.0)], 85.0),
        aup([Point(1, 90.0), Point(2, 90.0), Point(4, 70.0), Point(6, 30.0)], 85.0),
    ]
    assert found.mean == pytest.approx(np.mean(by_seed))
    assert found.sd == pytest.approx(np.std(by_seed, ddof=1))


def test_without_a_one_token_run_there_is_no_area() -> None:
    short = Answers("short", CURVE[1:], [0], [TAD.runs[0][1:]])
    found = facts(table_of(short), "short")
    assert found.first is None
    assert found.aup is None
    assert found.setting == "tad,threshold=0.5"


def test_a_task_without_verdicts_is_left_out_and_said() -> None:
    run = numbers(0.5, 60)
    blank = np.where(run.task == "math", np.nan, run.correct)
    half = Answers(
        "half", [FIRST], [None], [[Numbers(run.task, run.question, blank, run.tokens, run.forwards)]]
    )
    table = table_of(BASE, half)
    assert table.tasks == ["word"]
    assert facts(table, "half").n == N // 2
    assert "Not graded yet, and not in the numbers: math." in as_markdown(table)


def test_rows_that_were_not_run_say_so_and_have_no_numbers() -> None:
    wanted = [
        Wanted("base", "base", BASE, 1),
        Wanted("later", "later", None, 3),
        Wanted("v2", "v2", None, 0, "not built: it is another base model"),
        Wanted("tad", "tad", TAD, 3),
    ]
    text = as_markdown(make_table("main", "Main", wanted, BASE, None, "llada", 1.5))
    assert "| later | 0 | not run yet |" in text
    assert "| v2 |  | not built: it is another base model |" in text
    assert "| tad | 2 of 3 |" in text


def test_a_table_without_its_base_has_no_numbers() -> None:
    table = make_table("main", "Main", [Wanted("tad", "tad", TAD, 2)], None, None, "llada", 1.5)
    assert table.rows[0].numbers is None
    assert "the base has not been run yet" in as_text(table)


def test_runs_on_other_questions_are_refused() -> None:
    run = numbers(0.5, 60)
    other = Numbers(run.task, np.roll(run.question, 1), run.correct, run.tokens, run.forwards)
    with pytest.raises(TadError, match="'other' was asked other questions than 'base'"):
        table_of(Answers("other", [FIRST], [None], [[other]]))


def test_every_format_has_every_method(tmp_path: Path) -> None:
    table = table_of(BASE, TAD, RIVAL)
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert {row["method"] for row in rows} == {"base", "tad", "rival"}
    assert {row["task"] for row in rows} == {"all", "word", "math"}
    own = [row for row in rows if row["method"] == "tad" and row["task"] == "all" and row["own"] == "1"]
    assert [float(row["accuracy"]) for row in own] == [pytest.approx(75.0)]
    write_table(table, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main.csv", "main.json", "main.md"]
    widths = {line.count("|") for line in as_markdown(table).splitlines() if line.startswith("|")}
    assert len(widths) == 1


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=5), st.floats(0, 100))
def test_a_higher_bar_is_not_reached_faster(rights: list[float], bar: float) -> None:
    settings = [Setting("tad", {"threshold": t}, t) for t in np.linspace(0.1, 1, len(rights))]
    runs = [numbers(right, 40 - 5 * i) for i, right in enumerate(rights)]
    found = measure(Answers("m", settings, [0], [runs]), np.full(N, True), Draws(N, resamples=2))
    assert (found.reach(bar + 3).tpf or 0.0) <= (found.reach(bar).tpf or 0.0)
    assert (found.drawn_reach(np.full(2, bar + 3)) <= found.drawn_reach(np.full(2, bar))).all()


def test_intervals_hold_the_share_they_say() -> None:
    """Of 200 samples of a known population, about 95 % of the intervals have the true accuracy in them."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        run = numbers(0.5, 60)
        drawn = Numbers(
            run.task, run.question, (draw.random(N) < 0.7).astype(float), run.tokens, run.forwards
        )
        found = measure(Answers("m", [FIRST], [0], [[drawn]]), np.full(N, True), Draws(N, 300))
        low, high = np.quantile(found.drawn_accuracy[0], [0.025, 0.975])
        held += low <= 70 <= high
    assert 180 <= held <= 199


def test_numbers_are_kept_and_made_anew_when_the_rows_change(tmp_path: Path) -> None:
    meta = RunMeta(
        "m", None, "t", "llada", "float32", {"name": "tad"}, 16, 0, [], {"model": "m", "adapter": None}
    )
    results = Results.open_or_create(tmp_path / "run", meta)
    rows = [made_row(id=str(i), correct=None if i else True) for i in range(3)]
    results.settle([row.key for row in rows], rows)
    first = read_numbers(tmp_path / "run")
    assert np.isnan(first.correct).tolist() == [False, True, True]
    assert np.array_equal(read_numbers(tmp_path / "run").tokens, first.tokens)
    results.settle([row.key for row in rows], [made_row(id=str(i), correct=False) for i in range(3)])
    assert read_numbers(tmp_path / "run").correct.tolist() == [0.0, 0.0, 0.0]


def test_a_trial_is_scored_by_speed_and_else_by_what_it_lacks() -> None:
    fast = score_trial(Answers("a", CURVE[1:], [0], [TAD.runs[0][1:]]), BASE, 1.5)
    assert fast[0] == fast[2] == pytest.approx(reach([Point(2, 80), Point(3, 80), Point(6, 40)], 78.5).tpf)
    weak = score_trial(Answers("b", CURVE[3:], [0], [TAD.runs[0][3:]]), BASE, 1.5)
    assert (weak[0], weak[2]) == (pytest.approx(40 - 78.5), None)


def test_the_first_of_equal_trials_is_taken_and_none_before_all_are_there() -> None:
    trials = [Trial("m", i, {}, score, 1.0, None) for i, score in enumerate((-3.0, 2.0, 2.0))]
    assert choose_trial(trials) == 1
    assert choose_trial([*trials, Trial("m", 3, {}, None, None, None)]) is None
