"""Accuracy under parallelism (AUP): the area under a curve of accuracy over tokens per forward, as the TAD paper defines it.

Beside the area stands the tokens per forward at a target accuracy: the area's floor hangs on each curve's own first point,
that number does not. Both are computed over arrays of curves at once, [points, curves], since bootstrap intervals need
thousands of them; a single curve is a list of points. Accuracies are percentages. Knows no models and no files.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tad.errors import TadError

ALPHA = 3.0
DROP = 5.0


@dataclass(frozen=True, order=True)
class Point:
    """Tokens per forward and accuracy in percent. Points order by speed, equal speeds by accuracy."""

    tpf: float
    accuracy: float


@dataclass(frozen=True)
class TpfAtAccuracy:
    """The highest tokens per forward at which a curve is at least `accuracy`.

    `tpf` is None where the curve is never that accurate. `at_least`: its fastest point still is, so the true value is higher.
    """

    accuracy: float
    tpf: float | None
    at_least: bool = False

    def __str__(self) -> str:
        if self.accuracy <= 0:
            return "-"  # the base itself is not that far above zero
        if self.tpf is None:
            return "not reached"
        return f">= {self.tpf:.2f}" if self.at_least else f"{self.tpf:.2f}"


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
    tpf, accuracy = (np.array([[getattr(point, name)] for point in points]) for name in ("tpf", "accuracy"))
    return float(areas(tpf, accuracy, y_max, alpha, drop)[0])


def areas(
    tpf: np.ndarray, accuracy: np.ndarray, y_max: float, alpha: float = ALPHA, drop: float = DROP
) -> np.ndarray:
    """`aup` of every curve: [points, curves] -> [curves]. Points at infinity are not there."""
    tpf, accuracy = _by_speed(tpf, accuracy)
    weighted = accuracy * np.minimum(np.exp(-alpha * (1 - accuracy / y_max)), 1.0)
    with np.errstate(invalid="ignore"):
        area = tpf[0] * accuracy[0]
        last_tpf, last_weighted = tpf[0], weighted[0]
        for x, y, w in zip(tpf[1:], accuracy[1:], weighted[1:], strict=True):
            counts = np.isfinite(x) & (accuracy[0] - y <= drop)
            area = np.where(counts, area + (x - last_tpf) * (w + last_weighted) / 2, area)
            last_tpf, last_weighted = np.where(counts, x, last_tpf), np.where(counts, w, last_weighted)
    return area


def without_slower(tpf: np.ndarray) -> np.ndarray:
    """Speeds [points, curves] with those of later points that are not above the first one's at infinity.

    The first point is the run one token at a time. Some samplers spend more forwards than it at a careful setting; such a
    point would become the slowest of the curve, and the floor would hang on it.
    """
    found = np.where(tpf > tpf[0], tpf, np.inf)
    found[0] = tpf[0]
    return found


def tpf_at_accuracy(points: Sequence[Point], accuracy: float) -> TpfAtAccuracy:
    """The highest tokens per forward at which straight lines between the points are still at `accuracy`."""
    if not points:
        return TpfAtAccuracy(accuracy, None)
    tpf, own = (np.array([[getattr(point, name)] for point in points]) for name in ("tpf", "accuracy"))
    found = float(tpfs_at_accuracy(tpf, own, np.array([accuracy]))[0])
    at_least = max(points).accuracy >= accuracy
    return TpfAtAccuracy(accuracy, None if math.isnan(found) else found, at_least)


def tpfs_at_accuracy(tpf: np.ndarray, accuracy: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """`tpf_at_accuracy` of every curve: [points, curves] and [curves] -> [curves]; nan where it is not reached."""
    tpf, accuracy = _by_speed(tpf, accuracy)
    found = np.full(tpf.shape[1], np.nan)
    for i in range(len(tpf) - 1):  # a faster crossing takes the place of a slower one
        crossed = (accuracy[i] >= targets) & (targets > accuracy[i + 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (accuracy[i] - targets) / (accuracy[i] - accuracy[i + 1])
            found = np.where(crossed, tpf[i] + share * (tpf[i + 1] - tpf[i]), found)
    return np.where(accuracy[-1] >= targets, tpf[-1], found)


def accuracies_at_tpf(tpf: np.ndarray, accuracy: np.ndarray, speed: float) -> np.ndarray:
    """The highest accuracy at `speed` tokens per forward or more, on straight lines between the points: [points, curves] ->
    [curves]; nan where the fastest point is slower. Unlike the speed at an accuracy it does not jump where a curve is flat."""
    tpf, accuracy = _by_speed(tpf, accuracy)
    found = np.where(tpf >= speed, accuracy, -np.inf).max(0)
    for i in range(len(tpf) - 1):
        crossed = (tpf[i] < speed) & (tpf[i + 1] >= speed)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (speed - tpf[i]) / (tpf[i + 1] - tpf[i])
            between = accuracy[i] + share * (accuracy[i + 1] - accuracy[i])
        found = np.where(crossed, np.maximum(found, between), found)
    return np.where(np.isfinite(found), found, np.nan)


def _by_speed(tpf: np.ndarray, accuracy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every curve's points in the order of their speed, of equal speeds the less accurate first."""
    order = np.lexsort((accuracy, tpf), axis=0)
    return np.take_along_axis(tpf, order, 0), np.take_along_axis(accuracy, order, 0)


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
