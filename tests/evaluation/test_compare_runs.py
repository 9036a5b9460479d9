"""Comparisons: paired, on the same examples only, with what they could have shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from eval_world import EXAMPLES, recipe_of

from tad.errors import TadError
from tad.evaluation import compare_runs, evaluate
from tad.evaluation.analysis import PairedDifference, mcnemar, minimum_detectable_effect
from tad.evaluation.compare import Comparison
from tad.evaluation.tables import show_comparison
from tad.models import LM


def test_the_minimum_detectable_effect_is_seen_four_times_in_five() -> None:
    examples, share = 1000, 0.2
    effect = minimum_detectable_effect(examples, int(share * examples)) / 100
    draws = np.random.default_rng(0)
    chances = [(share + effect) / 2, (share - effect) / 2, 1 - share]
    found = draws.multinomial(examples, chances, size=400)
    seen = np.mean([mcnemar(int(gained), int(lost)) < 0.05 for gained, lost, _ in found])
    assert 0.72 < seen < 0.86
    assert minimum_detectable_effect(100, 0) == minimum_detectable_effect(
        100, 3
    )  # no disagreement is no proof


@pytest.fixture(scope="module")
def runs(lm: LM, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    evaluate(lm, recipe_of(world), folder / "slow")
    evaluate(lm, recipe_of(world, decoder="tad", settings={"block": 8, "threshold": 4.0}), folder / "fast")
    evaluate(lm, recipe_of(world, limit=5), folder / "few")
    return folder


def difference(found: Comparison) -> PairedDifference:
    (scope,) = found.table.scopes
    pair = found.table.rows[1].scopes[scope].to_base
    assert pair is not None
    return pair


def test_differences_are_paired_on_the_same_examples(runs: Path) -> None:
    found = compare_runs([runs / "slow", runs / "fast"], resamples=200)
    only = difference(found)
    slow, fast = (row.scopes[found.table.scope] for row in found.table.rows)
    assert only.n == EXAMPLES
    assert only.accuracy.value == pytest.approx(fast.accuracy.value - slow.accuracy.value)
    assert only.lost > only.gained == 0
    assert only.p_value == mcnemar(only.gained, only.lost)
    for one in (only.accuracy, only.tpf, only.speedup):
        assert one.interval is not None
        assert one.interval[0] <= one.value <= one.interval[1]
    assert only.tpf.value > 0.5
    assert found.notes == []


def test_a_run_against_itself_shows_nothing(lm: LM, world: Path, runs: Path, tmp_path: Path) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "again")
    only = difference(compare_runs([runs / "slow", tmp_path / "again"]))
    assert (only.accuracy.value, only.accuracy.interval, only.p_value, only.tpf.value) == (0, (0, 0), 1.0, 0)
    assert only.minimum_detectable_effect is not None
    assert only.minimum_detectable_effect > 10


def test_fewer_examples_compare_what_both_have_and_say_so(runs: Path) -> None:
    found = compare_runs([runs / "slow", runs / "few"])
    assert difference(found).n == 5
    (note,) = found.notes
    assert "12 rows" in note
    assert f"note: {note}" in show_comparison(found.table, found.notes)


def test_runs_that_asked_other_things_are_refused(lm: LM, world: Path, runs: Path, tmp_path: Path) -> None:
    name = f"jsonl:{world / 'questions.jsonl'}"

    def refused(folder: str, message: str, **changes: object) -> None:
        evaluate(lm, recipe_of(world, **changes), tmp_path / folder)
        with pytest.raises(TadError, match=message):
            compare_runs([runs / "slow", tmp_path / folder])

    refused(
        "template",
        "templates",
        tasks=[{"name": name, "templates": ["plain"]}],
    )
    other = tmp_path / "questions.jsonl"
    other.write_text(json.dumps({"question": "why", "answer": "1"}) + "\n")
    refused("task", "no task in common", tasks=[{"name": f"jsonl:{other}"}])


def test_other_splits_are_refused(lm: LM, world: Path, tmp_path: Path) -> None:
    for split in ("test", "validation"):
        tasks = [{"name": "nano-word", "limit": 2, "split": split}]
        evaluate(lm, recipe_of(world, tasks=tasks), tmp_path / split)
    with pytest.raises(TadError, match="split of 'nano-word'"):
        compare_runs([tmp_path / "test", tmp_path / "validation"])


def test_other_data_behind_the_same_names_are_refused(lm: LM, world: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    for answer in ("1", "2"):
        file.write_text(json.dumps({"question": "why", "answer": answer}) + "\n")
        evaluate(lm, recipe_of(world, tasks=[{"name": f"jsonl:{file}"}]), tmp_path / answer)
    with pytest.raises(TadError, match="another question"):
        compare_runs([tmp_path / "1", tmp_path / "2"])


def test_ungraded_runs_one_run_and_no_run_are_refused(
    lm: LM, world: Path, runs: Path, tmp_path: Path
) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "plain", grade=False)
    for folders, message in (
        ([runs / "slow", tmp_path / "plain"], "without a verdict"),
        ([runs / "slow"], "at least two runs"),
        ([runs / "slow", runs / "slow"], "is named twice"),
        ([runs / "slow", tmp_path], "no run here"),
    ):
        with pytest.raises(TadError, match=message):
            compare_runs(folders)
