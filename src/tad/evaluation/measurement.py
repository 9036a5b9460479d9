"""A method in numbers: accuracy, tokens per forward and their errors at every setting, on a task, over tasks, and pooled.

Outcomes of runs in, a `Measurement` per scope out. Intervals resample problems, all methods of a table together, so that
differences are paired; training seeds are averaged within a resample. Makes no table and compares nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tad.decoding import DECODERS, get_decoder
from tad.decoding.decoders import parameters
from tad.evaluation import aup
from tad.evaluation.aup import Point
from tad.evaluation.row import Row
from tad.evaluation.summary import ratio_error, ratio_residuals, wilson
from tad.evaluation.sweep import FIRST, Setting

RESAMPLES = 1000
FEW = 5  # right or wrong answers of a task below which a standard error misleads
Interval = tuple[float, float]


@dataclass(frozen=True)
class Outcomes:
    """A run without its texts: one entry per problem, in the order of the data."""

    task: np.ndarray  # names, with the template where it is not the default one
    problem: np.ndarray  # identities, to see that two runs were asked the same
    correct: np.ndarray  # 1, 0, or nan where not graded
    tokens: np.ndarray
    tokens_all: np.ndarray
    forwards: np.ndarray
    seconds: np.ndarray  # of decoding, the batch's time over its rows

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Outcomes:
        names = ("tokens", "tokens_all", "forwards", "share")
        counts = ([getattr(row, name) for row in rows] for name in names)
        tasks = [row.task if row.template == "tad" else f"{row.task} ({row.template})" for row in rows]
        problems = [f"{row.task} {row.template} {row.id} {row.question}" for row in rows]
        # Runs share these texts: a study has hundreds of runs on the same problems.
        return cls(
            np.array([sys.intern(text) for text in tasks], dtype=object),
            np.array([sys.intern(text) for text in problems], dtype=object),
            np.array([np.nan if row.correct is None else float(row.correct) for row in rows]),
            *(np.array(values, dtype=np.float64) for values in counts),
        )

    def take(self, chosen: np.ndarray) -> Outcomes:
        """Some of the problems, by mask or by index."""
        return Outcomes(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class MethodRuns:
    """Everything one method answered: the same settings for each training seed, one token at a time first if it was run."""

    name: str
    settings: list[Setting]
    seeds: list[int | None]  # of training; [None] where nothing was trained
    runs: list[list[Outcomes]]  # [seeds][settings]
    family: str = "llada"
    trained: bool = False  # whether it is a student

    @cached_property
    def graded(self) -> set[str]:
        """Tasks of which every answer has a verdict."""
        tasks = set(np.unique(self.runs[0][0].task).tolist())
        for run in (run for runs in self.runs for run in runs):
            tasks -= set(np.unique(run.task[np.isnan(run.correct)]).tolist())
        return tasks

    @property
    def has_first(self) -> bool:
        """Whether the run one token at a time is among them; without it there is no area."""
        return self.settings[0].decoder == FIRST

    @property
    def default_point(self) -> int:
        """The setting that stands for the method: the decoder's published threshold if it was run, else the nearest one;
        of decoders without a threshold the most careful one that was run."""
        setting = self.settings[-1]
        swept = [i for i, one in enumerate(self.settings) if one.value is not None] or [0]
        own = {key: value for key, value in setting.settings.items() if key not in ("threshold", "steps")}
        known = setting.decoder in DECODERS
        default = (
            parameters(get_decoder(setting.decoder, self.family, **own)).get("threshold") if known else None
        )
        if default is None:
            return swept[0]
        return min(swept, key=lambda i: abs(float(self.settings[i].value or 0.0) - default))


class Bootstrap:
    """How often each problem is drawn in each resample: pooled, and of each task. Shared by all methods of a table."""

    def __init__(self, task: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> None:
        self.tasks = list(dict.fromkeys(task.tolist()))
        self.masks = {name: task == name for name in self.tasks}
        self.pooled = self._draw(len(task), resamples, seed)
        sizes = (int(mask.sum()) for mask in self.masks.values())
        self.of_task = {
            name: self._draw(size, resamples, seed + i)
            for i, (name, size) in enumerate(zip(self.masks, sizes, strict=True))
        }

    @staticmethod
    def _draw(problems: int, resamples: int, seed: int) -> np.ndarray:
        shares = np.full(problems, 1 / problems)
        drawn = np.random.default_rng(seed).multinomial(problems, shares, size=resamples)
        return drawn.T.astype(np.float64)  # [problems, resamples]


def interval(values: np.ndarray, share: float = 0.95) -> Interval:
    """The middle `share` of resampled values; nan where there are none."""
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Measurement:
    """A method in one scope, at every setting: accuracies in percent, tokens per forward, forwards per problem."""

    n: int
    accuracy: np.ndarray  # [seeds, points]
    tpf: np.ndarray
    tpf_all: np.ndarray
    tokens_per_second: np.ndarray
    forwards: np.ndarray
    accuracy_se: np.ndarray  # [points], over problems, seeds averaged
    tpf_se: np.ndarray
    accuracy_interval: np.ndarray  # [points, 2], Wilson's
    correct: np.ndarray  # [seeds, points, problems]
    few: np.ndarray  # [points]: so few right or wrong answers that the standard error misleads
    drawn_accuracy: np.ndarray  # [seeds, points, resamples]
    drawn_tpf: np.ndarray
    drawn_forwards: np.ndarray

    def points(self) -> list[Point]:
        """Seeds averaged."""
        return [
            Point(float(t), float(a)) for t, a in zip(self.tpf.mean(0), self.accuracy.mean(0), strict=True)
        ]

    def areas(self, y_max: float) -> tuple[np.ndarray, np.ndarray]:
        """AUP of each seed, and of each resample with seeds averaged."""
        own = np.array(
            [
                self._areas(t[:, None], a[:, None], y_max)[0]
                for t, a in zip(self.tpf, self.accuracy, strict=True)
            ]
        )
        drawn = [self._areas(t, a, y_max) for t, a in zip(self.drawn_tpf, self.drawn_accuracy, strict=True)]
        return own, np.mean(drawn, axis=0)

    @staticmethod
    def _areas(tpf: np.ndarray, accuracy: np.ndarray, y_max: float) -> np.ndarray:
        answered = np.isfinite(tpf).all(0)  # a draw of nothing but prompts that do not fit has no speed
        return np.where(answered, aup.areas(aup.without_slower(tpf), accuracy, y_max), np.nan)


def measure_task(method: MethodRuns, chosen: np.ndarray, times: np.ndarray) -> Measurement:
    """A method on the chosen problems [problems, boolean], with resamples [chosen problems, resamples]."""
    n = int(chosen.sum())

    def stack(name: str) -> np.ndarray:  # [seeds, points, n]
        return np.stack([[getattr(run, name)[chosen] for run in runs] for runs in method.runs])

    correct, tokens, tokens_all, forwards, seconds = (
        stack(name) for name in ("correct", "tokens", "tokens_all", "forwards", "seconds")
    )
    share, total = correct.mean(0), forwards.sum(-1)  # [points, n], [seeds, points]
    spread = n / (n - 1) if n > 1 else math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        tpf = tokens.sum(-1) / total
        drawn_tpf = (tokens @ times) / (forwards @ times)
        tpf_all = tokens_all.sum(-1) / total
        tokens_per_second = tokens.sum(-1) / seconds.sum(-1)
    right = share.sum(-1)
    return Measurement(
        n=n,
        accuracy=100 * correct.mean(-1),
        tpf=tpf,
        tpf_all=tpf_all,
        tokens_per_second=tokens_per_second,
        forwards=total / n,
        accuracy_se=100 * np.sqrt(share.var(-1) * spread / n),
        tpf_se=ratio_error(ratio_residuals(tokens, forwards).mean(0)),  # seeds averaged
        accuracy_interval=100 * np.array([wilson(n, value / n) for value in right]),
        correct=correct,
        few=np.minimum(right, n - right) < FEW,
        drawn_accuracy=100 * (correct @ times) / n,
        drawn_tpf=drawn_tpf,
        drawn_forwards=(forwards @ times) / n,
    )


def average(tasks: Sequence[Measurement]) -> Measurement:
    """The mean over tasks. Tasks are independent, so errors add in squares; Wilson's intervals too, each side by itself."""

    def mean(name: str) -> np.ndarray:
        return np.mean([getattr(one, name) for one in tasks], axis=0)

    def error(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.sqrt(np.sum(np.square(values), axis=0)) / len(tasks)

    centres = [one.accuracy.mean(0) for one in tasks]
    low, high = (
        error([one.accuracy_interval[:, side] - centre for one, centre in zip(tasks, centres, strict=True)])
        for side in (0, 1)
    )
    centre = np.mean(centres, axis=0)
    names = (
        "accuracy",
        "tpf",
        "tpf_all",
        "tokens_per_second",
        "forwards",
        "drawn_accuracy",
        "drawn_tpf",
        "drawn_forwards",
    )
    return Measurement(
        n=sum(one.n for one in tasks),
        accuracy_se=error([one.accuracy_se for one in tasks]),
        tpf_se=error([one.tpf_se for one in tasks]),
        accuracy_interval=np.stack([centre - low, centre + high], axis=-1),
        correct=np.concatenate([one.correct for one in tasks], axis=-1),
        few=np.any([one.few for one in tasks], axis=0),
        **{name: mean(name) for name in names},
    )
