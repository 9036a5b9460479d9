"""Laws of the area under a curve and of the speed at a target accuracy, on any curve."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad.errors import TadError
from tad.evaluation.aup import DROP, Point, TpfAtAccuracy, aup, tpf_at_accuracy

TPF = st.floats(0.5, 20, allow_nan=False)
ACCURACY = st.one_of(st.just(0.0), st.floats(1, 100))  # below 1 it warns
CURVES = st.lists(st.builds(Point, TPF, ACCURACY), min_size=1, max_size=8)
Y_MAX = st.floats(1, 100)


def keep(points: list[Point]) -> list[Point]:
    """The points that count, in the order of their speed."""
    ordered = sorted(points)
    return [point for point in ordered if ordered[0].accuracy - point.accuracy <= DROP]


@given(CURVES, Y_MAX, st.randoms())
def test_area_does_not_depend_on_the_order_of_the_points(
    points: list[Point], y_max: float, draws: object
) -> None:
    mixed = list(points)
    draws.shuffle(mixed)  # type: ignore[attr-defined]
    assert aup(mixed, y_max) == aup(points, y_max)


@given(CURVES, Y_MAX, st.integers(0, 7), st.floats(0, 30))
def test_a_more_accurate_point_never_makes_the_area_smaller(
    points: list[Point], y_max: float, which: int, gain: float
) -> None:
    """As long as the same points count: the floor hangs on the first one, so that one is left as it is."""
    first, *kept = keep(points)
    if not kept:
        return
    raised = kept[which % len(kept)]
    kept[which % len(kept)] = Point(raised.tpf, raised.accuracy + gain)
    assert aup([first, *kept], y_max) >= aup(points, y_max) - 1e-9


@given(CURVES, Y_MAX)
def test_points_far_below_the_first_change_nothing(points: list[Point], y_max: float) -> None:
    slowest = min(points)
    if slowest.accuracy < 6:
        return
    low = [
        Point(slowest.tpf + extra, slowest.accuracy - 5.5) for extra in (0.25, 30.0)
    ]  # inside, and as the last
    assert aup([*points, *low], y_max) == pytest.approx(aup(keep(points), y_max))
    assert aup([*points, *low], y_max) == aup(points, y_max)


@given(CURVES, Y_MAX)
def test_area_lies_between_the_first_rectangle_and_the_unweighted_area(
    points: list[Point], y_max: float
) -> None:
    kept = keep(points)
    top = max(point.accuracy for point in kept)
    area = aup(points, y_max)
    assert kept[0].tpf * kept[0].accuracy - 1e-9 <= area <= kept[-1].tpf * top + 1e-6


@given(CURVES)
def test_at_y_max_the_weights_are_one(points: list[Point]) -> None:
    """With every accuracy at or above y_max the area is that of plain trapezoids."""
    flat = [Point(point.tpf, 60.0) for point in points]
    assert aup(flat, 60.0) == pytest.approx(60.0 * max(flat).tpf)


@given(CURVES, Y_MAX, st.floats(1.01, 3))
def test_a_higher_y_max_never_makes_the_area_larger(points: list[Point], y_max: float, factor: float) -> None:
    assert aup(points, y_max * factor) <= aup(points, y_max) + 1e-9


@pytest.mark.parametrize(
    ("points", "y_max", "message"),
    [
        ([], 70, "at least one point"),
        ([Point(0.0, 70)], 70, "positive number"),
        ([Point(math.nan, 70)], 70, "positive number"),
        ([Point(1.0, -1)], 70, "percentage"),
        ([Point(1.0, math.nan)], 70, "percentage"),
        ([Point(1.0, 70)], 0, "y_max"),
        ([Point(1.0, 70)], math.inf, "y_max"),
    ],
)
def test_curves_that_are_none_are_refused(points: list[Point], y_max: float, message: str) -> None:
    with pytest.raises(TadError, match=message):
        aup(points, y_max)


LINE = [Point(1.0, 80), Point(3.0, 76), Point(5.0, 60)]


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (79, TpfAtAccuracy(79, 1.5)),
        (77, TpfAtAccuracy(77, 2.5)),
        (76, TpfAtAccuracy(76, 3.0)),
        (68, TpfAtAccuracy(68, 4.0)),
        (60, TpfAtAccuracy(60, 5.0, at_least=True)),
        (50, TpfAtAccuracy(50, 5.0, at_least=True)),
        (80.5, TpfAtAccuracy(80.5, None)),
    ],
)
def test_tpf_at_accuracy_is_read_off_the_lines_between_the_points(
    accuracy: float, expected: TpfAtAccuracy
) -> None:
    assert tpf_at_accuracy(LINE, accuracy) == expected
    assert tpf_at_accuracy(LINE[::-1], accuracy) == expected


def test_tpf_at_accuracy_is_the_fastest_of_several_crossings() -> None:
    wave = [Point(1.0, 80), Point(2.0, 70), Point(3.0, 80), Point(4.0, 70)]
    assert tpf_at_accuracy(wave, 75) == TpfAtAccuracy(75, 3.5)


@given(CURVES, ACCURACY, st.floats(0, 20))
def test_asking_for_less_accuracy_is_at_least_as_fast(
    points: list[Point], accuracy: float, less: float
) -> None:
    strict, loose = tpf_at_accuracy(points, accuracy).tpf, tpf_at_accuracy(points, accuracy - less).tpf
    assert strict is None or (loose is not None and loose >= strict - 1e-9)


def test_words_say_what_was_not_reached() -> None:
    assert str(TpfAtAccuracy(70, None)) == "not reached"
    assert str(TpfAtAccuracy(70, 3.456)) == "3.46"
    assert str(TpfAtAccuracy(70, 3.456, at_least=True)) == ">= 3.46"
    assert str(TpfAtAccuracy(-2, None)) == "-"
