"""Sweeps: equal grids, one shared first point, and tables that never show an area without its points."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from eval_world import EXAMPLES, content, made_row, recipe_of

from tad.decoding import DECODERS, get_decoder
from tad.errors import TadError
from tad.evaluation import Results, run_sweep, tabulate
from tad.evaluation import sweep as sweep_module
from tad.evaluation.aup import Point, aup
from tad.evaluation.bootstrap import Resampled, interval
from tad.evaluation.curves import find_runs
from tad.evaluation.row import UNFIT
from tad.evaluation.sweep import FIRST, GRIDS, plan
from tad.evaluation.tables import show_curves
from tad.models import LM, load

SWEPT = [name for name in DECODERS if name != FIRST]


def test_every_kind_of_threshold_has_as_many_points() -> None:
    assert {len(grid) for grid in GRIDS.values()} == {6}


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("decoder", SWEPT)
@pytest.mark.parametrize("gen_length", [96, 256])
def test_every_named_decoder_can_be_swept(decoder: str, family: str, gen_length: int) -> None:
    runs = plan(decoder, family, gen_length)
    assert runs[0].decoder == FIRST
    assert len(runs) == 7
    assert len({run.name for run in runs}) == 7
    for run in runs:
        get_decoder(run.decoder, family, **run.settings).prepared(gen_length, shift=family == "dream")


@pytest.mark.parametrize("kind", ["entropy", "confidence"])
def test_methods_of_a_kind_share_one_grid(kind: str) -> None:
    grids = {
        tuple(run.settings["threshold"] for run in plan(name, "llada", 256)[1:])
        for name in SWEPT
        if type(get_decoder(name).rule).__name__ == f"{kind.capitalize()}Threshold"
    }
    assert grids == {GRIDS[kind]}


def test_published_settings_are_on_the_grids() -> None:
    for name in SWEPT:
        for family in ("llada", "dream"):
            rule = get_decoder(name, family).rule
            if hasattr(rule, "threshold"):
                assert rule.threshold in [run.value for run in plan(name, family, 256)[1:]]


def test_grids_go_from_careful_to_fast() -> None:
    steps = [run.settings["steps"] for run in plan("llada", "llada", 256)[1:]]
    assert steps == sorted(steps, reverse=True) == [192, 128, 96, 64, 48, 32]
    assert list(GRIDS["entropy"]) == sorted(GRIDS["entropy"])
    assert list(GRIDS["confidence"]) == sorted(GRIDS["confidence"], reverse=True)


def test_the_first_point_shares_the_layout_but_not_the_rule() -> None:
    first = plan("tad", "llada", 64, {"block": 16, "block_add": 0.5, "temperature": 0.5})[0]
    assert first.settings == {"block": 16, "temperature": 0.5}


@pytest.mark.parametrize(
    ("decoder", "settings", "thresholds", "message"),
    [
        ("tad", {"threshold": 0.5}, None, "a sweep sets 'threshold'"),
        ("fast-dllm", {"rule": "factor"}, None, "has no threshold to sweep"),
        ("llada", {}, [0.5], "has no threshold; --sweep varies its steps"),
        ("tda", {}, None, "unknown decoder 'tda'; did you mean 'tad'"),
    ],
)
def test_sweeps_that_make_no_sense_are_refused(
    decoder: str, settings: dict, thresholds: list[float] | None, message: str
) -> None:
    with pytest.raises(TadError, match=message):
        plan(decoder, "llada", 256, settings, thresholds)


@pytest.fixture(scope="module")
def swept(lm: LM, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods at two thresholds each; with a fixed number of tokens a forward the texts change with the speed."""
    out = tmp_path_factory.mktemp("sweep")
    recipe = recipe_of(world)
    run_sweep(lm, recipe, out, ["tad"], [0.5, 4.0])
    run_sweep(lm, recipe, out, ["fast-dllm"], [0.9, 0.01])
    return out


def test_sweeps_in_one_directory_share_the_first_run(swept: Path) -> None:
    names = [path.name for path in find_runs(swept)]
    assert len(names) == 5
    assert sum(name.startswith(FIRST) for name in names) == 1


def test_the_first_run_is_not_made_twice(
    lm: LM, world: Path, swept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(sweep_module, "evaluate", lambda *args, **rest: begun.append(args[2].name))
    run_sweep(lm, recipe_of(world), swept, ["tad", "fast-dllm"], [0.5])
    assert begun == [f"{FIRST},block=8", "tad,threshold=0.5,block=8", "fast-dllm,threshold=0.5,block=8"]


def test_points_are_those_of_the_runs(swept: Path) -> None:
    table = tabulate([swept], resamples=50)
    assert [curve.decoder for curve in table.curves] == ["fast-dllm", "tad"]
    tad = table.curves[1]
    assert tad.n == EXAMPLES
    assert [point.setting for point in tad.points] == [None, 0.5, 4.0]
    first = tad.points[0]
    assert (first.accuracy, first.n, first.tpf) == (50.0, EXAMPLES, pytest.approx(1.0, abs=0.2))
    rows = Results.open(swept / tad.points[2].run).rows()
    assert tad.points[2].tpf == sum(row.tokens for row in rows) / sum(row.forwards for row in rows)
    assert tad.points[2].tpf > first.tpf


def test_area_follows_from_the_points_and_the_tables_y_max(swept: Path) -> None:
    question = f"{tabulate([swept], resamples=0).curves[0].task}/tad"
    table = tabulate([swept], resamples=0)
    assert table.y_max == {question: 50.0}
    assert table.y_max_from == {question: "highest in this table"}
    for given in (80.0, {question.rpartition("/")[0]: 80.0}, {question: 80.0}):
        other = tabulate([swept], y_max=given, resamples=0)
        assert other.y_max_from == {question: "given"}
        for curve in other.curves:
            assert curve.aup == aup([Point(p.tpf, p.accuracy) for p in curve.points], 80.0)
    with pytest.raises(TadError, match="y_max of 'gsm8k', which is not in the table"):
        tabulate([swept], y_max={"gsm8k": 80.0})


def test_dropped_points_are_marked(swept: Path) -> None:
    for curve in tabulate([swept], resamples=0).curves:
        for point in curve.points:
            assert point.dropped == (curve.points[0].accuracy - point.accuracy > 5)
    assert any(point.dropped for curve in tabulate([swept], resamples=0).curves for point in curve.points)


def test_the_printed_table_has_points_n_and_y_max(swept: Path) -> None:
    text = show_curves(tabulate([swept], resamples=50))
    assert f"n = {EXAMPLES}, y_max = 50.00 (highest in this table)" in text
    assert "TPF at base - 1" in text
    assert "one token" in text
    assert "50.0 ±" in text
    assert "x: more than 5 below the one-token run" in text


def test_the_base_is_the_same_model_without_its_adapter(world: Path, swept: Path, tmp_path: Path) -> None:
    adapted = load(world / "llada", device="cpu")
    adapted.attach(rank=2)
    for name, weight in adapted.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5)
    run_sweep(adapted, recipe_of(world, limit=None), tmp_path / "adapted", ["tad"], [0.5])
    alone = tabulate([tmp_path / "adapted"], resamples=0).curves[0]
    assert alone.base == "its own first point"
    both = tabulate([swept, tmp_path / "adapted"], resamples=0)
    mine = next(curve for curve in both.curves if "new, rank 2" in curve.model)
    assert mine.base == f"llada, {FIRST}"
    assert [reach.accuracy for reach in mine.reaches] == [49.0, 47.0]
    given = tabulate([tmp_path / "adapted"], base=swept, resamples=0).curves[0]
    assert given.reaches == mine.reaches


def test_a_base_on_other_examples_is_refused(lm: LM, world: Path, swept: Path, tmp_path: Path) -> None:
    run_sweep(lm, recipe_of(world, limit=3), tmp_path / "few", [FIRST])
    with pytest.raises(TadError, match="are not the sweep's"):
        tabulate([swept], base=tmp_path / "few")


def test_unfinished_and_ungraded_runs_are_no_points(lm: LM, world: Path, tmp_path: Path) -> None:
    run_sweep(lm, recipe_of(world), tmp_path / "s", [FIRST])
    run_sweep(lm, recipe_of(world), tmp_path / "s", ["tad"], [0.5], grade=False)
    assert [curve.decoder for curve in tabulate([tmp_path / "s"]).curves] == [FIRST]
    run_sweep(lm, recipe_of(world), tmp_path / "t", [FIRST], grade=False)
    with pytest.raises(TadError, match="no finished, graded run"):
        tabulate([tmp_path / "t"])


def test_runs_of_two_sweeps_are_not_mixed(lm: LM, world: Path, tmp_path: Path) -> None:
    run_sweep(lm, recipe_of(world), tmp_path, [FIRST])
    with pytest.raises(TadError, match="holds another run: tasks"):
        run_sweep(lm, recipe_of(world, limit=3), tmp_path, ["tad"], [0.5])


def test_sweeps_with_other_settings_in_one_directory_are_not_one_curve(
    lm: LM, world: Path, tmp_path: Path
) -> None:
    for block in (8, 4):
        run_sweep(lm, recipe_of(world, settings={"block": block}), tmp_path, ["tad"], [0.5])
    with pytest.raises(TadError, match="are of two sweeps: block is 4 and 8"):
        tabulate([tmp_path])


def test_draws_of_prompts_that_do_not_fit_do_not_cost_the_interval(swept: Path, tmp_path: Path) -> None:
    shutil.copytree(swept, tmp_path / "s")
    for path in find_runs(tmp_path / "s"):
        rows = Results.open(path).rows()
        unfit = {"tokens": 0, "forwards": 0, "correct": False, "reason": UNFIT}
        records = [row.as_record() | (unfit if i > 1 else {}) for i, row in enumerate(rows)]
        (path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for curve in tabulate([tmp_path / "s"], resamples=200).curves:
        assert curve.aup_interval is not None
        assert curve.aup_interval[0] <= curve.aup <= curve.aup_interval[1]


def test_a_sweep_that_was_stopped_is_continued(lm: LM, world: Path, swept: Path, tmp_path: Path) -> None:
    calls = iter([False, False, False, True, True, True, True])
    some = run_sweep(lm, recipe_of(world), tmp_path, ["tad"], [0.5, 4.0], stopping=lambda: next(calls))
    assert len(some) < 3
    run_sweep(lm, recipe_of(world), tmp_path, ["tad"], [0.5, 4.0])
    for path in find_runs(tmp_path):
        assert content(Results.open(path)) == content(Results.open(swept / path.name))


def test_an_area_without_a_right_answer_is_undefined(lm: LM, world: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(json.dumps({"question": "why", "answer": "something else", "grader": "text"}) + "\n")
    recipe = recipe_of(world, tasks=[{"name": f"jsonl:{file}"}])
    run_sweep(lm, recipe, tmp_path / "s", ["tad"], [0.5])
    table = tabulate([tmp_path / "s"])
    assert table.curves[0].aup is None
    assert "undefined" in show_curves(table)
    assert table.as_record()["mean_aup"][0]["aup"] is None


def test_resampled_intervals_cover_what_was_measured() -> None:
    rows = [
        made_row(id=str(i), correct=i % 3 == 0, tokens=10 + i % 7, forwards=5 + i % 2) for i in range(300)
    ]
    drawn = Resampled([rows, rows], resamples=500)
    assert drawn.accuracy.shape == (2, 500)
    assert (drawn.accuracy[0] == drawn.accuracy[1]).all()  # the same examples in both lists
    low, high = interval(drawn.accuracy[0])
    assert low < 100 / 3 < high
    assert (high - low) / 2 == pytest.approx(1.96 * 100 * (2 / 9 / 300) ** 0.5, rel=0.2)
