"""The sentence at the end of a run says better, not better or not established, as the analysis's numbers do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tad.evaluation.analysis import ResultTable, RowSpec, analyse
from tad.evaluation.measurement import MethodRuns, Outcomes
from tad.evaluation.sweep import FIRST, Setting
from tad.evaluation.verdict import conclude, describe, list_verdicts

N = 400
TOKENS = 40.0


def answers(accuracy: float, tpf: float) -> Outcomes:
    """`N` problems; the same ones are right first in every run, so that differences are sharp."""
    right = (np.arange(N) * 7919 % N < accuracy * N).astype(float)
    forwards = np.full(N, TOKENS / tpf)
    names = np.array(["word"] * N, dtype=object)
    problems = np.array([f"word tad {i} q" for i in range(N)], dtype=object)
    return Outcomes(names, problems, right, np.full(N, TOKENS), np.full(N, TOKENS), forwards, forwards)


def table(base: float, student: float, tpf: float, rival: float = 4.0) -> ResultTable:
    """A base of an accuracy, Fast-dLLM at `rival` tokens per forward without loss, and a student."""
    slow = Setting(FIRST, {})
    first = answers(base, 0.8)
    plain = MethodRuns("base, one-by-one", [slow], [None], [[first]])
    fast = MethodRuns(
        "base, fast-dllm",
        [slow, Setting("fast-dllm", {"threshold": 0.9}, 0.9)],
        [None],
        [[first, answers(base, rival)]],
    )
    own = [Setting("tad", {"threshold": 0.5}, 0.5)]
    taught = MethodRuns("mine, tad", own, [0], [[answers(student, tpf)]], trained=True)
    specs = [RowSpec(one.name, one.name, one) for one in (plain, fast, taught)]
    return analyse("t", "t", specs, plain, fast, resamples=200)


@pytest.mark.parametrize(
    ("base", "student", "tpf", "says"),
    [
        (0.8, 0.8, 8.0, "Better"),
        (0.8, 0.8, 2.0, "Not better"),
        (0.8, 0.6, 8.0, "Not better"),
        (0.2, 0.2, 8.0, "This model can hardly do the task"),
    ],
)
def test_a_verdict_follows_the_numbers(base: float, student: float, tpf: float, says: str) -> None:
    assert conclude(table(base, student, tpf)).startswith(says)


def test_an_interval_that_includes_the_rival_establishes_nothing() -> None:
    found = table(0.8, 0.79, 8.0)  # often further below than allowed in a resample
    row = found.rows[-1].scopes[found.scope]
    assert row.times_baseline is not None
    assert row.times_baseline.interval is not None
    low, high = row.times_baseline.interval
    assert low <= 1 <= high
    assert conclude(found).startswith("Not established")


def test_the_share_of_kept_rollouts_is_said_where_the_model_cannot_do_the_task() -> None:
    assert "53 %" in conclude(table(0.2, 0.2, 8.0), kept=0.53)


def test_a_student_that_is_never_accurate_enough_is_described_at_its_own_setting() -> None:
    (line,) = list_verdicts(table(0.8, 0.6, 8.0))
    assert "10.0x fewer forwards at -20.0" in line


def test_without_the_base_there_is_no_verdict() -> None:
    found = replace(table(0.8, 0.8, 8.0), base=None)
    assert conclude(found).startswith("No verdict")
    assert "fewer forwards" in describe(found, found.rows[-1].scopes[found.scope])
