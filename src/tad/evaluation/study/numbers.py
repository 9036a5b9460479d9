"""Methods in numbers: points over thresholds, averaged over training seeds, with resampled examples behind every interval.

A method's answers are runs: one list of them per training seed, the same settings in each, the run one token at a time first.
Intervals resample examples, all methods of a table together, so that differences are paired; seeds are averaged within a
resample. They say how far other examples would move a number. How far other seeds would is the spread over seeds.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tad.decoding import get_decoder
from tad.decoding.decoders import parameters
from tad.errors import TadError
from tad.evaluation.aup import Point, Reach, aup, past_first, reach
from tad.evaluation.bootstrap import interval
from tad.evaluation.results import ROWS, Results
from tad.evaluation.sweep import FIRST, Setting
from tad.files import write_whole

RESAMPLES = 1000
CACHE = ".numbers.npz"
COLUMNS = "rows.parquet"  # beside the runs of a model, where their rows have not been unpacked
Interval = tuple[float, float]


@dataclass(frozen=True)
class Numbers:
    """A run without its texts: one entry per row, in the order of the data."""

    task: np.ndarray  # names
    question: np.ndarray  # digests, to see that two runs asked the same
    correct: np.ndarray  # 1, 0, or nan where not graded
    tokens: np.ndarray
    forwards: np.ndarray


def read_numbers(folder: Path) -> Numbers:
    """The numbers of a complete run; kept beside the rows, since a study reads them again and again."""
    rows_file, cache = folder / ROWS, folder / CACHE
    if not rows_file.is_file():
        return _read_columns(folder)
    names = ("task", "question", "correct", "tokens", "forwards")
    state = rows_file.stat()
    stamp = f"{state.st_size}-{state.st_mtime_ns}"
    if cache.is_file():
        with np.load(cache) as known:
            if str(known["stamp"]) == stamp:
                return Numbers(*(known[name] for name in names))
    rows = Results.open(folder).rows()
    found = Numbers(
        np.array([row.task for row in rows]),
        np.array([f"{row.id} {row.template} {row.question}" for row in rows]),
        np.array([np.nan if row.correct is None else float(row.correct) for row in rows]),
        np.array([row.tokens for row in rows], dtype=np.float64),
        np.array([row.forwards for row in rows], dtype=np.float64),
    )
    kept = io.BytesIO()
    np.savez_compressed(kept, stamp=np.array(stamp), **{name: getattr(found, name) for name in names})
    with suppress(TadError):  # a study that can only be read is read without it
        write_whole(cache, kept.getvalue())
    return found


def _read_columns(folder: Path) -> Numbers:
    """From what an archive holds of all runs of the model."""
    table = pq.read_table(folder.parent / COLUMNS, filters=[("run", "==", folder.name)])

    def column(name: str) -> np.ndarray:
        return np.asarray(table[name].to_numpy())

    parts = zip(*(table[name].to_pylist() for name in ("id", "template", "question")), strict=True)
    return Numbers(
        np.array(table["task"].to_pylist()),
        np.array([" ".join(entry) for entry in parts]),
        np.array([np.nan if value is None else float(value) for value in table["correct"].to_pylist()]),
        column("tokens").astype(np.float64),
        column("forwards").astype(np.float64),
    )


@dataclass(frozen=True)
class Answers:
    """Everything one method answered."""

    name: str
    settings: list[Setting]
    seeds: list[int | None]
    runs: list[list[Numbers]]  # [seeds][settings]

    @cached_property
    def graded(self) -> set[str]:
        """Tasks of which every answer has a verdict."""
        tasks = set(np.unique(self.runs[0][0].task).tolist())
        for run in (run for runs in self.runs for run in runs):
            tasks -= set(np.unique(run.task[np.isnan(run.correct)]).tolist())
        return tasks

    def own(self, family: str) -> int:
        """Which point stands for the method: its published threshold, or the nearest one that was run."""
        setting = self.settings[-1]
        own = {key: value for key, value in setting.settings.items() if key not in ("threshold", "steps")}
        default = parameters(get_decoder(setting.decoder, family, **own)).get("threshold")
        swept = [i for i, one in enumerate(self.settings) if one.value is not None] or [0]
        if default is None:
            return swept[0]
        return min(swept, key=lambda i: abs(float(self.settings[i].value or 0.0) - default))

    @property
    def has_first(self) -> bool:
        """Whether the run one token at a time is among them; without it there is no area."""
        return self.settings[0].decoder == FIRST


class Draws:
    """Resampled examples, shared by the methods of a table."""

    def __init__(self, examples: int, resamples: int = RESAMPLES, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        shares = np.full(examples, 1 / examples)
        self.times = draw.multinomial(examples, shares, size=resamples).T.astype(
            np.float64
        )  # [examples, draws]


@dataclass(frozen=True)
class Measured:
    """A method on a set of examples: accuracies in percent and tokens per forward."""

    n: int
    accuracy: np.ndarray  # [seeds, points]
    tpf: np.ndarray
    drawn_accuracy: np.ndarray  # [points, draws], seeds averaged
    drawn_tpf: np.ndarray

    @property
    def points(self) -> list[Point]:
        """Seeds averaged."""
        return [
            Point(float(t), float(a)) for t, a in zip(self.tpf.mean(0), self.accuracy.mean(0), strict=True)
        ]

    def points_of(self, seed: int) -> list[Point]:
        return [Point(float(t), float(a)) for t, a in zip(self.tpf[seed], self.accuracy[seed], strict=True)]

    def reach(self, bar: float) -> Reach:
        return reach(self.points, bar)

    def drawn_reach(self, bars: np.ndarray) -> np.ndarray:
        """Of every resample, against its own bar; 0 where the curve is never that accurate."""
        found = []
        for accuracy, tpf, bar in zip(self.drawn_accuracy.T, self.drawn_tpf.T, bars, strict=True):
            points = [Point(float(t), float(a)) for t, a in zip(tpf, accuracy, strict=True)]
            found.append(reach(points, float(bar)).tpf or 0.0)
        return np.array(found)

    def areas(self, y_max: float) -> np.ndarray:
        """AUP of each seed."""
        return np.array([aup(past_first(self.points_of(s)), y_max) for s in range(len(self.accuracy))])


def measure(answers: Answers, chosen: np.ndarray, draws: Draws) -> Measured:
    """A method's numbers on the chosen examples [rows of a run, boolean]."""
    n = int(chosen.sum())

    def stack(name: str) -> np.ndarray:  # [seeds, points, n]
        return np.stack([[getattr(run, name)[chosen] for run in runs] for runs in answers.runs])

    correct, tokens, forwards = stack("correct"), stack("tokens"), stack("forwards")
    # Tokens per forward of several seeds: the mean of the seeds' ratios, as for accuracy.
    drawn = [(t @ draws.times) / (f @ draws.times) for t, f in zip(tokens, forwards, strict=True)]
    return Measured(
        n,
        100 * correct.mean(-1),
        tokens.sum(-1) / forwards.sum(-1),
        100 * (correct.mean(0) @ draws.times) / n,
        np.mean(drawn, axis=0),
    )


def check_same(methods: Sequence[Answers]) -> None:
    """Refuse to pair runs that did not ask the same questions."""
    first = methods[0].runs[0][0]
    for method in methods:
        for run in (run for runs in method.runs for run in runs):
            if not np.array_equal(run.question, first.question):
                raise TadError(
                    f"method '{method.name}' was asked other questions than '{methods[0].name}'; they cannot be compared"
                )


def spread(values: np.ndarray) -> float | None:
    """Standard deviation over seeds; None for one."""
    return float(values.std(ddof=1)) if len(values) > 1 else None


def span(values: np.ndarray) -> Interval:
    return interval(values)
