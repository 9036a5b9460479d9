"""Sweeps: equal grids, one shared first point, and tables that never show an area without its points."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_world import EXAMPLES, content, recipe_of

from tad.decoding import DECODERS, get_decoder
from tad.errors import TadError
from tad.evaluation import Results, run_sweep, tabulate_folders
from tad.evaluation import sweep as sweep_module
from tad.evaluation.methods import find_runs
from tad.evaluation.sweep import FIRST, GRIDS, plan
from tad.evaluation.tables import show_points
from tad.models import LM, load

LOSSLESS = ["autoregressive", "verified"]
SWEPT = [name for name in DECODERS if name not in (FIRST, *LOSSLESS)]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("decoder", SWEPT)
@pytest.mark.parametrize("gen_length", [96, 256])
def test_every_named_decoder_can_be_swept(decoder: str, family: str, gen_length: int) -> None:
    runs = plan(decoder, family, gen_length)
    assert runs[0].decoder == FIRST
    assert len(runs) == 7
    assert len({run.name for run in runs}) == 7
    for run in runs:
        get_decoder(run.decoder, family, **run.settings).check(gen_length)


@pytest.mark.parametrize("decoder", LOSSLESS)
def test_decoders_that_always_give_the_same_text_are_not_swept(decoder: str) -> None:
    with pytest.raises(TadError, match="nothing to sweep"):
        plan(decoder, "qwen2", 96)


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
    ("decoder", "settings", "values"),
    [
        ("tad", {}, [0.3]),
        ("fast-dllm", {}, [0.8]),
        ("dparallel", {"rule": "contiguous-prefix"}, [0.3]),
        ("llada", {}, list(GRIDS["quota"])),  # of a kind that is not given: the default grid
    ],
)
def test_thresholds_may_be_given_by_kind(decoder: str, settings: dict, values: list[float]) -> None:
    runs = plan(decoder, "llada", 256, settings, {"entropy": [0.3], "confidence": [0.8]})
    assert [run.value for run in runs] == [None, *values]


@pytest.mark.parametrize(
    ("decoder", "settings", "thresholds", "message"),
    [
        ("tad", {"threshold": 0.5}, None, "'threshold'"),
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
    (table,) = tabulate_folders([swept], resamples=50)
    assert [row.method for row in table.rows] == ["base, one-by-one", "base, fast-dllm", "base, tad"]
    found = table.rows[2].scopes[table.scope]
    assert found.n == EXAMPLES
    assert [point.value for point in found.points] == [None, 0.5, 4.0]
    first, last = found.points[0], found.points[2]
    assert (first.accuracy.value, first.tpf.value) == (50.0, pytest.approx(1.0, abs=0.2))
    rows = Results.open(swept / last.setting).rows()
    assert last.tpf.value == sum(row.tokens for row in rows) / sum(row.forwards for row in rows)
    assert last.tpf.value > first.tpf.value


def test_the_printed_points_have_n_y_max_and_what_is_not_in_the_area(swept: Path) -> None:
    (table,) = tabulate_folders([swept], resamples=50)
    text = show_points(table)
    assert f"n = {EXAMPLES}" in text
    for words in (
        "TPF at base - 1.5",
        "one token",
        "50.0 ±",
        "not in the area",
        "y_max questions.jsonl 50.0",
    ):
        assert words in text


def test_the_base_is_the_same_model_without_its_adapter(world: Path, swept: Path, tmp_path: Path) -> None:
    adapted = load(world / "llada", device="cpu")
    adapted.attach(rank=2)
    for name, weight in adapted.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5)
    run_sweep(adapted, recipe_of(world, limit=None), tmp_path / "adapted", ["tad"], [0.5])
    (alone,) = tabulate_folders([tmp_path / "adapted"], resamples=0)
    assert (alone.base, alone.targets) == (None, {})
    (both,) = tabulate_folders([swept, tmp_path / "adapted"], resamples=0)
    mine = next(row for row in both.rows if row.trained)
    assert both.targets == {both.scope: 48.5}
    (given,) = tabulate_folders([tmp_path / "adapted"], base=swept, resamples=0)
    assert given.rows[0].scopes[given.scope].tpf_at_target == mine.scopes[both.scope].tpf_at_target


def test_a_base_on_other_examples_is_refused(lm: LM, world: Path, swept: Path, tmp_path: Path) -> None:
    run_sweep(lm, recipe_of(world, limit=3), tmp_path / "few", [FIRST])
    with pytest.raises(TadError, match="asked other questions"):
        tabulate_folders([swept], base=tmp_path / "few")


def test_unfinished_and_ungraded_runs_are_no_points(lm: LM, world: Path, tmp_path: Path) -> None:
    run_sweep(lm, recipe_of(world), tmp_path / "s", [FIRST])
    run_sweep(lm, recipe_of(world), tmp_path / "s", ["tad"], [0.5], grade=False)
    (table,) = tabulate_folders([tmp_path / "s"])
    assert [row.method for row in table.rows] == ["base, one-by-one"]
    run_sweep(lm, recipe_of(world), tmp_path / "t", [FIRST], grade=False)
    with pytest.raises(TadError, match="no finished, graded run"):
        tabulate_folders([tmp_path / "t"])


def test_runs_of_two_sweeps_are_not_mixed(lm: LM, world: Path, tmp_path: Path) -> None:
    run_sweep(lm, recipe_of(world), tmp_path, [FIRST])
    with pytest.raises(TadError, match="tasks"):
        run_sweep(lm, recipe_of(world, limit=3), tmp_path, ["tad"], [0.5])


def test_a_sweep_that_was_stopped_is_continued(lm: LM, world: Path, swept: Path, tmp_path: Path) -> None:
    calls = iter([False, False, False, True, True, True, True])
    some = run_sweep(lm, recipe_of(world), tmp_path, ["tad"], [0.5, 4.0], stopping=lambda: next(calls))
    assert len(some) < 3
    run_sweep(lm, recipe_of(world), tmp_path, ["tad"], [0.5, 4.0])
    for path in find_runs(tmp_path):
        assert content(Results.open(path)) == content(Results.open(swept / path.name))
