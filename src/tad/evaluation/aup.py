"""Accuracy under parallelism: the area under a curve of accuracy over tokens per forward, as the TAD paper defines it.

Points are pairs of tokens per forward and accuracy in percent. Beside the area stand the speeds at which a curve is still
within some points of a base's accuracy: the area's floor hangs on each curve's own first point, these do not. Knows no
models and no files.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tad.errors import TadError

ALPHA = 3.0
DROP = 5.0


@dataclass(frozen=True, order=True)
class Point:
    """Tokens per forward and accuracy in percent. Points order by speed, equal speeds by accuracy."""

    tpf: float
    accuracy: float


@dataclass(frozen=True)
class Reach:
    """The highest speed at which a curve is at least `accuracy`.

    `tpf` is None where the curve is never that accurate. `open`: its fastest point still is, so the true speed is at least this.
    """

    accuracy: float
    tpf: float | None
    open: bool = False

    def __str__(self) -> str:
        if self.accuracy <= 0:
            return "-"  # the base itself is not that far above zero
        if self.tpf is None:
            return "not reached"
        return f">= {self.tpf:.2f}" if self.open else f"{self.tpf:.2f}"


def curve(tpfs: Sequence[float], accuracies: Sequence[float]) -> list[Point]:
    """Points from two lists."""
    if len(tpfs) != len(accuracies):
        raise TadError(f"{len(tpfs)} speeds and {len(accuracies)} accuracies do not make points")
    return [Point(tpf, accuracy) for tpf, accuracy in zip(tpfs, accuracies, strict=True)]


def aup(points: Sequence[Point], y_max: float, alpha: float = ALPHA, drop: float = DROP) -> float:
    """The area: the first point's rectangle unweighted, then trapezoids of the weighted accuracies.

    `y_max` is the accuracy at which a point counts in full; it belongs to a table, not to a curve, and changes every value
    in it. Points more than `drop` below the first are left out and bridged. The published function does the same inside a
    curve and raises where the *last* point is that low; here that one is left out too.
    """
    _check(points, y_max)
    kept = keep(points, drop)

    def weighted(y: float) -> float:
        return y * min(math.exp(-alpha * (1 - y / y_max)), 1.0)

    area = kept[0].tpf * kept[0].accuracy
    for before, after in pairwise(kept):
        area += (after.tpf - before.tpf) * (weighted(after.accuracy) + weighted(before.accuracy)) / 2
    return area


def keep(points: Sequence[Point], drop: float = DROP) -> list[Point]:
    """The points that count, in the order of their speed: those at most `drop` below the slowest one's accuracy."""
    ordered = sorted(points)
    return [point for point in ordered if ordered[0].accuracy - point.accuracy <= drop]


def past_first(points: Sequence[Point]) -> list[Point]:
    """The first point, which is the run one token at a time, and those that are faster than it.

    Some samplers spend more forwards at a careful setting than the one-token run. Such a point would become the slowest of
    the curve, and the floor would hang on it.
    """
    return [*points[:1], *(point for point in points[1:] if point.tpf > points[0].tpf)]


def reach(points: Sequence[Point], accuracy: float) -> Reach:
    """The highest speed at which straight lines between the points are still at `accuracy`."""
    ordered = sorted(points)
    if not ordered:
        return Reach(accuracy, None)
    if ordered[-1].accuracy >= accuracy:
        return Reach(accuracy, ordered[-1].tpf, open=True)
    for before, after in zip(ordered[-2::-1], ordered[:0:-1], strict=True):
        if before.accuracy >= accuracy > after.accuracy:
            share = (before.accuracy - accuracy) / (before.accuracy - after.accuracy)
            return Reach(accuracy, before.tpf + share * (after.tpf - before.tpf))
    return Reach(accuracy, None)


def _check(points: Sequence[Point], y_max: float) -> None:
    if not points:
        raise TadError("a curve needs at least one point: its run one token at a time")
    for point in points:
        if not (point.tpf > 0 and math.isfinite(point.tpf)):
            raise TadError(f"a point has {point.tpf} tokens per forward; it must be a positive number")
        if not (point.accuracy >= 0 and math.isfinite(point.accuracy)):
            raise TadError(f"a point has accuracy {point.accuracy}; it must be a percentage")
    if not (y_max > 0 and math.isfinite(y_max)):
        raise TadError(f"y_max is {y_max}; it must be a positive percentage")
    if 0 < max(point.accuracy for point in points) < 1:
        warnings.warn("accuracies below 1: AUP takes percentages, not fractions", stacklevel=3)
