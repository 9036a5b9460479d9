"""Tokens per forward of generations made by hand, by both definitions, and the standard errors beside them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from eval_world import content, made_row, recipe_of

from tad.decoding import Decoded
from tad.evaluation import evaluate
from tad.evaluation.summary import OWN, measure, summarise, wilson
from tad.evaluation.tables import show_summary
from tad.models import LM

END, FILLER = 2, 0


@pytest.mark.parametrize(
    ("tokens", "forwards", "tpf", "tpf_all"),
    [
        (
            [7, 8, 9, END, FILLER, FILLER, FILLER, FILLER],
            2,
            2.0,
            4.0,
        ),  # the end token counts, the filler does not
        ([7, 8, 9, 10, 11, 12, 13, 14], 4, 2.0, 2.0),  # no end: both are the same
        ([END, FILLER, FILLER, FILLER], 1, 1.0, 4.0),  # an empty answer still has its end token
        ([7, END, 8, END], 4, 0.5, 1.0),  # what stands behind the first end is not content
        ([7, FILLER, FILLER, FILLER], 2, 1.0, 2.0),  # the filler's own token ends an answer, too
    ],
)
def test_a_row_counts_content_and_all_positions(
    tokens: list[int], forwards: int, tpf: float, tpf_all: float
) -> None:
    row = Decoded(tokens, [1] * len(tokens), [1.0] * len(tokens), forwards, 1.0, ends=(END, FILLER))
    found = measure([made_row(tokens=len(row.content), tokens_all=len(row.tokens), forwards=row.forwards)])
    assert (found["tpf"], found["tpf_all"]) == (row.tpf, row.tpf_all) == (tpf, tpf_all)


def test_over_rows_it_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    rows = [made_row(tokens=10, tokens_all=64, forwards=1), made_row(tokens=60, tokens_all=64, forwards=60)]
    assert (measure(rows)["tpf"], measure(rows)["tpf_all"]) == (70 / 61, 128 / 61)


def test_rows_that_were_not_decoded_count_neither_tokens_nor_forwards() -> None:
    unfit = made_row(tokens=0, tokens_all=0, forwards=0, correct=False)
    assert measure([made_row(), unfit])["tpf"] == measure([made_row()])["tpf"]
    assert math.isnan(measure([unfit])["tpf"])


def test_answers_that_cannot_be_judged_count_as_wrong_and_are_said() -> None:
    unjudged = made_row(id="1", correct=False, reason="cannot judge: compares a handle")
    summary = {**summarise([made_row(), unjudged, made_row(id="2", correct=False)]), "complete": True}
    found = summary["tasks"]["made"]["tad"]
    assert (found["graded"], found["correct"], found["cannot_judge"]) == (3, 1, 1)
    assert "1 answers cannot be judged" in show_summary(summary)
    none = {**summarise([made_row()]), "complete": True}
    assert "cannot" not in show_summary(none)


def test_error_of_the_ratio_is_that_of_resampled_rows() -> None:
    draws = np.random.default_rng(0)
    forwards = draws.integers(5, 60, size=400)
    tokens = (forwards * draws.uniform(1, 4, size=400)).astype(int)
    rows = [made_row(tokens=int(t), forwards=int(f)) for t, f in zip(tokens, forwards, strict=True)]
    picked = draws.integers(0, 400, size=(2000, 400))
    resampled = tokens[picked].sum(1) / forwards[picked].sum(1)
    assert measure(rows)["tpf_se"] == pytest.approx(resampled.std(), rel=0.1)


def test_accuracy_is_of_graded_rows_with_its_binomial_standard_error() -> None:
    rows = [made_row(id=str(i), correct=i < 30) for i in range(40)] + [made_row(correct=None)]
    found = measure(rows)
    assert (found["n"], found["graded"], found["accuracy"]) == (41, 40, 75.0)
    assert found["se"] == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 39))
    assert found["interval"][0] < 75 < found["interval"][1]


@pytest.mark.parametrize(
    ("correct", "low", "high"), [(0, 0.0, 0.1611), (20, 0.8389, 1.0), (10, 0.2993, 0.7007)]
)
def test_wilson_interval_has_its_published_values(correct: int, low: float, high: float) -> None:
    assert wilson(20, correct / 20) == pytest.approx((low, high), abs=1e-4)


def test_summary_has_levels_tasks_and_both_averages() -> None:
    rows = [made_row(task="a", id=str(i), level=str(i % 2), correct=i % 2 == 0) for i in range(4)]
    rows += [made_row(task="b", id=str(i), correct=True, forwards=10) for i in range(12)]
    found = summarise(rows)
    assert found["tasks"]["a"]["tad"]["levels"]["0"]["accuracy"] == 100
    assert found["tasks"]["a"]["tad"]["levels"]["1"]["accuracy"] == 0
    overall = found["overall"]["tad"]
    assert overall["accuracy"] == pytest.approx(100 * 14 / 16)
    assert overall["mean_of_tasks"]["accuracy"] == 75
    assert overall["mean_of_tasks"]["se"] == pytest.approx(found["tasks"]["a"]["tad"]["se"] / 2)
    assert "spread" not in found


def test_templates_are_summed_up_apart_with_their_spread() -> None:
    rows = [
        made_row(id=str(i), template=name, correct=i < n)
        for name, n in (("tad", 1), ("plain", 3))
        for i in range(4)
    ]
    found = summarise(rows)
    assert found["tasks"]["made"]["plain"]["accuracy"] == 75
    assert found["spread"]["made"] == {"templates": 2, "accuracy": 50.0, "tpf": 0.0, "best": "plain"}


def test_tasks_with_a_template_of_their_own_have_a_mean_over_tasks() -> None:
    rows = [made_row(task="a", template="plain", id=str(i), correct=True) for i in range(2)]
    rows += [made_row(task="b", id=str(i), correct=i == 0) for i in range(4)]
    found = summarise(rows)["overall"][OWN]
    assert (found["n"], found["mean_of_tasks"]["tasks"], found["mean_of_tasks"]["accuracy"]) == (6, 2, 62.5)


def test_rows_of_a_run_hold_the_counts_of_their_tokens(lm: LM, world: Path, tmp_path: Path) -> None:
    results = evaluate(lm, recipe_of(world, decoder="tad"), tmp_path / "r")
    for row in content(results):
        ends = [i for i, token in enumerate(row["ids"]) if token in lm.tokens.ends]
        assert row["tokens"] == (ends[0] + 1 if ends else 16)
        assert row["tokens_all"] == len(row["ids"]) == len(row["steps"]) == 16
        assert row["forwards"] == max(row["steps"])
