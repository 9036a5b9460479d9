"""Effects over bases, seeds and problems, held to data whose variance components are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tad.errors import TadError
from tad.evaluation.aup import accuracies_at_tpf
from tad.evaluation.factors import ALL, PROBLEMS, SEEDS, AccuracyAt, Arm, Effect, analyse_factors
from tad.evaluation.measurement import MethodRuns, Outcomes
from tad.evaluation.sweep import FIRST, Setting

N = 150


def last_accuracy(tpf: np.ndarray, accuracy: np.ndarray, target: np.ndarray) -> np.ndarray:
    return accuracy[-1]


def made_runs(name: str, correct: np.ndarray, forwards: float = 4.0) -> MethodRuns:
    """correct [seeds, problems] at one setting; one token at a time everything is right."""
    n = correct.shape[1]
    problem = np.array([f"p{i}" for i in range(n)], dtype=object)

    def outcomes(right: np.ndarray, spent: float) -> Outcomes:
        full = np.full(n, 40.0)
        return Outcomes(
            np.array(["t"] * n, dtype=object),
            problem,
            right.astype(float),
            full,
            full,
            np.full(n, spent),
            full,
        )

    plan = [Setting(FIRST, {}), Setting("tad", {"threshold": 0.5}, 0.5)]
    runs = [[outcomes(np.ones(n), 40.0), outcomes(right, forwards)] for right in correct]
    return MethodRuns(name, plan, list(range(len(correct))), runs)


def experiment(
    rng: np.random.Generator, bases: int, seeds: int, base_sd: float, seed_sd: float, effect: float
) -> list[Effect]:
    """One factor; every base and every training has a deviation of its own, problems are of different difficulty."""
    arms, references = [], {}
    difficulty = rng.uniform(0.3, 0.7, N)
    for base in range(bases):
        of_base = rng.normal(0, base_sd)
        references[f"b{base}"] = made_runs("base", np.ones((1, N)))
        for high in (False, True):
            own = effect / 2 + of_base / 2 if high else -effect / 2 - of_base / 2
            p = difficulty + own + rng.normal(0, seed_sd, (seeds, 1))
            correct = rng.uniform(size=(seeds, N)) < p
            arms.append(Arm(f"b{base}", {"order": high}, made_runs(f"arm {high}", correct)))
    return analyse_factors(arms, references, last_accuracy, resamples=150, seed=int(rng.integers(2**31)))


def repeat(
    bases: int, seeds: int, base_sd: float, seed_sd: float, times: int = 60
) -> tuple[np.ndarray, list[Effect]]:
    rng = np.random.default_rng(bases * 100 + seeds)
    found = [experiment(rng, bases, seeds, base_sd, seed_sd, 0.05)[0] for _ in range(times)]
    return np.array([one.estimate.value for one in found]), found


@pytest.mark.parametrize(("bases", "seeds", "base_sd", "seed_sd"), [(3, 3, 0.06, 0.02), (2, 5, 0.0, 0.06)])
def test_the_error_over_everything_is_the_known_one_and_that_over_problems_is_too_small(
    bases: int, seeds: int, base_sd: float, seed_sd: float
) -> None:
    estimates, found = repeat(bases, seeds, base_sd, seed_sd)
    chance = 2 * 0.25 / N / seeds / bases
    known = 1e4 * (base_sd**2 / bases + 2 * seed_sd**2 / (bases * seeds) + chance)
    assert estimates.mean() == pytest.approx(5.0, abs=4 * np.sqrt(known / len(estimates)))
    assert estimates.var() == pytest.approx(known, rel=0.6)
    claimed = np.mean([(one.estimate.se or 0) ** 2 for one in found])
    assert 0.8 * known < claimed < 2.2 * known  # too wide rather than too narrow

    def covered(name: str) -> float:
        return float(np.mean([one.over[name][0] <= 5.0 <= one.over[name][1] for one in found]))

    assert covered(ALL) > covered(PROBLEMS) + 0.1
    assert covered(ALL) > 0.8


def test_without_seed_and_base_effects_the_three_errors_differ_little() -> None:
    _, found = repeat(2, 3, 0.0, 0.0)
    width = {
        name: np.mean([one.over[name][1] - one.over[name][0] for one in found])
        for name in (PROBLEMS, SEEDS, ALL)
    }
    assert width[PROBLEMS] < width[SEEDS] < 1.8 * width[PROBLEMS]
    assert width[PROBLEMS] < width[ALL] < 1.8 * width[PROBLEMS]


def test_main_effects_and_interactions_of_two_by_two_by_two_are_the_contrasts() -> None:
    """Accuracies that follow a formula exactly: +20 for a, +8 for b, and 6 more for both."""
    arms = []
    for a, b, c in itertools.product((False, True), repeat=3):
        right = np.arange(100) < 40 + 20 * a + 8 * b + 6 * (a and b)
        for base in ("x", "y"):
            runs = made_runs(f"{a} {b} {c}", np.stack([right, right]))
            arms.append(Arm(base, {"a": a, "b": b, "c": c}, runs))
    references = {base: made_runs("base", np.ones((1, 100))) for base in ("x", "y")}
    effects = {one.name: one for one in analyse_factors(arms, references, last_accuracy, resamples=100)}
    assert {name: round(one.estimate.value, 9) for name, one in effects.items()} == {
        "a": 23.0, "b": 11.0, "c": 0.0, "a x b": 3.0, "a x c": 0.0, "b x c": 0.0, "a x b x c": 0.0,
    }  # fmt: skip
    assert effects["a"].by_base == {"x": 23.0, "y": 23.0}
    low, high = effects["a"].over[ALL]
    assert low < 23 < high


def test_an_incomplete_design_and_other_problems_are_refused() -> None:
    right = np.ones((1, 10))
    arm = Arm("x", {"order": True}, made_runs("one", right))
    with pytest.raises(TadError, match="base 'x' has no arm with"):
        analyse_factors([arm], {"x": made_runs("base", right)})
    with pytest.raises(TadError, match="there twice"):
        analyse_factors([arm, arm], {"x": made_runs("base", right)})
    other = Arm("x", {"order": False}, made_runs("two", np.ones((1, 11))))
    with pytest.raises(TadError, match="other questions"):
        analyse_factors([arm, other], {"x": made_runs("base", right)})


points = st.lists(st.tuples(st.floats(0.5, 20), st.floats(0, 100)), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(points, st.floats(0.5, 20))
def test_the_accuracy_at_a_speed_is_the_best_on_the_curve_from_there_on(
    curve: list[tuple[float, float]], speed: float
) -> None:
    tpf, accuracy = (np.array(side)[:, None] for side in zip(*curve, strict=True))
    found = accuracies_at_tpf(tpf, accuracy, speed)[0]
    if tpf.max() < speed:
        assert np.isnan(found)
        assert AccuracyAt(speed)(tpf, accuracy, np.array([0.0]))[0] == accuracy[tpf.argmax(), 0]
        return
    faster = accuracy[tpf >= speed].max()
    assert faster - 1e-9 <= found <= accuracy.max() + 1e-9
    order = np.lexsort((accuracy[:, 0], tpf[:, 0]))
    grid = np.linspace(speed, tpf.max(), 200)
    on_lines = np.interp(grid, tpf[order, 0], accuracy[order, 0])
    assert found >= on_lines.max() - 1e-6
