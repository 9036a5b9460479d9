"""Experiments with factors: effects and interactions over several bases, training seeds and problems.

A design crosses k factors of two levels, on every base alike, each arm trained with several seeds. The analysis of one table
averages seeds and resamples problems; here the bases and the seeds are resampled as well, since a conclusion that is meant
for other bases and other trainings has to vary with them. Reads no files and makes no text.

A resample adds the deviations of three levels to the estimate. Problems: all are drawn with replacement, the same ones for every
arm. Seeds: in every arm one fewer is drawn than there are. Bases: one fewer than there are; since bases differ by their
seeds too, seeds are not drawn beside them. One fewer makes the variance of a mean unbiased for few draws, where as many
would halve it for two. What chance does to single answers is in the first level and in one of the others, so that intervals are
somewhat too wide rather than too narrow. With one base, or one seed, that level cannot vary: `bases` and `seeds` say how many there
were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tad.errors import TadError
from tad.evaluation.analysis import Estimate, check_same
from tad.evaluation.aup import accuracies_at_tpf, tpfs_at_accuracy
from tad.evaluation.measurement import (
    RESAMPLES,
    Bootstrap,
    Measurement,
    MethodRuns,
    average,
    interval,
    measure_task,
)


@dataclass(frozen=True)
class Arm:
    """A method on a base, at one level (low or high) of every factor."""

    base: str
    high: Mapping[str, bool]  # factor -> whether it is at its high level
    runs: MethodRuns


class Statistic(Protocol):
    """A number of every curve: [points, curves] of both, and each curve's target accuracy [curves] -> [curves]."""

    def __call__(self, tpf: np.ndarray, accuracy: np.ndarray, target: np.ndarray) -> np.ndarray: ...


def tpf_at_target(tpf: np.ndarray, accuracy: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Tokens per forward at the target accuracy; 0 where it is not reached."""
    return np.nan_to_num(tpfs_at_accuracy(tpf, accuracy, target))


@dataclass(frozen=True)
class AccuracyAt:
    """The accuracy at fixed tokens per forward; the last point's where the curve is not so fast."""

    speed: float

    def __call__(self, tpf: np.ndarray, accuracy: np.ndarray, target: np.ndarray) -> np.ndarray:
        found = accuracies_at_tpf(tpf, accuracy, self.speed)
        last = np.take_along_axis(accuracy, tpf.argmax(0)[None], 0)[0]
        return np.where(np.isnan(found), last, found)


@dataclass(frozen=True)
class Effect:
    """What the high level of a factor adds, averaged over all others; of two factors (an interaction) half of what one adds
    at the high level of the other less what it adds at its low level, and so on.

    `over` has the interval by what was resampled: problems alone, seeds and problems, and all. `by_base`: the estimates.
    """

    factors: tuple[str, ...]
    estimate: Estimate  # its interval is that over everything
    over: dict[str, tuple[float, float]]
    by_base: dict[str, float]
    bases: int
    seeds: int  # the fewest of any arm

    @property
    def name(self) -> str:
        return " x ".join(self.factors)


PROBLEMS, SEEDS, ALL = "problems", "seeds and problems", "bases, seeds and problems"


def analyse_factors(
    arms: Sequence[Arm],
    references: Mapping[str, MethodRuns],
    statistic: Statistic = tpf_at_target,
    tolerance: float = 1.5,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Effect]:
    """Main effects, then interactions, of a full two-level design.

    `references`: every base's own runs, whose first setting less `tolerance` is the target accuracy. All methods of all bases
    must have been asked the same problems.
    """
    factors, cells = _design(arms)
    check_same([*references.values(), *(arm.runs for arm in arms)])
    problems = next(iter(references.values())).runs[0][0].task
    bootstrap = Bootstrap(problems, resamples, seed)
    bases = list(references)
    values: dict[tuple[str, tuple[bool, ...]], Parts] = {}
    rng = np.random.default_rng(seed)
    fewest = min(len(arm.runs.seeds) for arm in arms)
    for base in bases:
        reference = _measure(references[base], bootstrap)
        own = float(reference.accuracy[:, 0].mean()) - tolerance
        drawn = reference.drawn_accuracy[:, 0].mean(0) - tolerance
        for levels in itertools.product((False, True), repeat=len(factors)):
            found = _measure(cells[base, levels].runs, bootstrap)
            values[base, levels] = _values(found, statistic, own, drawn, rng)
    picked = _pick(rng, len(bases), resamples)  # [bases drawn, resamples]
    effects = []
    for size in range(1, len(factors) + 1):
        for chosen in itertools.combinations(range(len(factors)), size):
            point, by_problems, by_seeds = (
                np.stack(part)
                for part in zip(
                    *(_contrast(values, base, len(factors), chosen) for base in bases), strict=True
                )
            )  # [bases], [bases, resamples] twice
            of_problems = by_problems.mean(0)
            of_seeds = of_problems + by_seeds.mean(0)
            of_bases = of_problems + point[picked].mean(0) - point.mean()
            every = of_bases if len(bases) > 1 else of_seeds
            over = {
                PROBLEMS: interval(of_problems),
                SEEDS: interval(of_seeds),
                ALL: interval(every),
            }
            estimate = Estimate(float(point.mean()), se=float(np.nanstd(every)), interval=over[ALL])
            names = tuple(factors[i] for i in chosen)
            effects.append(
                Effect(
                    names,
                    estimate,
                    over,
                    dict(zip(bases, point.tolist(), strict=True)),
                    len(bases),
                    fewest,
                )
            )
    return effects


def _design(arms: Sequence[Arm]) -> tuple[list[str], dict[tuple[str, tuple[bool, ...]], Arm]]:
    """The factors, and every arm by base and levels; all of them must be there once."""
    if not arms:
        raise TadError("an experiment needs arms")
    factors = list(arms[0].high)
    cells: dict[tuple[str, tuple[bool, ...]], Arm] = {}
    for arm in arms:
        if list(arm.high) != factors:
            raise TadError(f"arm '{arm.runs.name}' names the factors {list(arm.high)}, others {factors}")
        place = arm.base, tuple(arm.high.values())
        if place in cells:
            raise TadError(f"arm '{arm.runs.name}' on {arm.base} is there twice: {dict(arm.high)}")
        cells[place] = arm
    for base in {arm.base for arm in arms}:
        for levels in itertools.product((False, True), repeat=len(factors)):
            if (base, levels) not in cells:
                missing = dict(zip(factors, levels, strict=True))
                raise TadError(f"base '{base}' has no arm with {missing}: a design needs all of them")
    return factors, cells


def _measure(runs: MethodRuns, bootstrap: Bootstrap) -> Measurement:
    """The mean over tasks."""
    found = [measure_task(runs, mask, bootstrap.of_task[task]) for task, mask in bootstrap.masks.items()]
    return found[0] if len(found) == 1 else average(found)


def _pick(rng: np.random.Generator, count: int, resamples: int) -> np.ndarray:
    """Which of `count` are drawn in every resample, one fewer than there are: [drawn, resamples]."""
    return rng.integers(count, size=(max(1, count - 1), resamples))


Parts = tuple[
    float, np.ndarray, np.ndarray
]  # the estimate; its resamples of problems; what drawing seeds adds to it


def _values(
    found: Measurement, statistic: Statistic, target: float, targets: np.ndarray, rng: np.random.Generator
) -> Parts:
    """The statistic of the seeds' mean curve."""
    resamples = found.drawn_tpf.shape[2]
    own = statistic(found.tpf.mean(0)[:, None], found.accuracy.mean(0)[:, None], np.array([target]))[0]
    drawn = statistic(found.drawn_tpf.mean(0), found.drawn_accuracy.mean(0), targets)
    picked = _pick(rng, len(found.tpf), resamples)
    tpf, accuracy = (side[picked].mean(0).T for side in (found.tpf, found.accuracy))  # [points, resamples]
    return float(own), drawn, statistic(tpf, accuracy, np.full(resamples, target)) - own


def _contrast(
    values: Mapping[tuple[str, tuple[bool, ...]], Parts], base: str, factors: int, chosen: Sequence[int]
) -> Parts:
    """The effect on one base."""
    signed = [
        (math.prod(1 if levels[i] else -1 for i in chosen) / 2 ** (factors - 1), values[base, levels])
        for levels in itertools.product((False, True), repeat=factors)
    ]
    own = sum(sign * one[0] for sign, one in signed)
    by_problems, by_seeds = (np.sum([sign * one[i] for sign, one in signed], axis=0) for i in (1, 2))
    return own, by_problems, by_seeds
