"""The words of the scores: methods, their lines of points, paired differences, and the board they stand on. Computes little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tad.decoding import DECODERS, get_decoder
from tad.decoding.decoders import parameters
from tad.evaluation.compare import Difference
from tad.evaluation.curves import Curve, Question
from tad.evaluation.report.data import Run
from tad.evaluation.report.names import Who
from tad.evaluation.sweep import FIRST

POOLED = "all tasks"


@dataclass(frozen=True)
class Method:
    """A model and a decoder; the same look in every chart."""

    model: str
    decoder: str

    @property
    def label(self) -> str:
        return f"{self.model} · {self.decoder}"

    @property
    def is_first(self) -> bool:
        return self.decoder == FIRST


@dataclass(frozen=True)
class Line:
    """A method's points on one question, by one training seed."""

    method: Method
    seed: int | None
    curve: Curve
    runs: tuple[Path, ...]  # of the points, in their order

    @property
    def question(self) -> Question:
        return (self.curve.task, self.curve.template)

    def chosen(self, family: str) -> int:
        """The point to put in a table: at the decoder's default setting, else the most careful one that was run."""
        if self.method.is_first or len(self.curve.points) == 1:
            return 0
        default = default_setting(self.method.decoder, family)
        own = [i for i, point in enumerate(self.curve.points) if point.setting is not None] or [0]
        return next((i for i in own if self.curve.points[i].setting == default), own[0])


def default_setting(decoder: str, family: str) -> float | None:
    """The threshold a decoder has if nobody sets one."""
    if decoder not in DECODERS:
        return None
    value = parameters(get_decoder(decoder, family)).get("threshold")
    return None if value is None else float(value)


@dataclass(frozen=True)
class Pair:
    """A method against a reference on the same examples. With several training seeds, `difference` is of their mean."""

    reference: str
    method: Method
    setting: float | None
    seeds: tuple[int | None, ...]
    difference: Difference
    spread: tuple[float, float] | None  # standard deviation over seeds: accuracy, tokens per forward


@dataclass
class Board:
    """Everything measured on one base with one set of examples."""

    name: str
    fingerprint: str
    family: str
    splits: tuple[str, ...]
    runs: list[tuple[Run, Who]]
    lines: list[Line] = field(default_factory=list)
    y_max: dict[str, float] = field(default_factory=dict)
    y_max_from: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def questions(self) -> list[Question]:
        """In order; the pooled one first where there are several tasks."""
        found = list(dict.fromkeys(line.question for line in self.lines))
        return sorted(found, key=lambda question: question[0] != POOLED)

    @property
    def methods(self) -> list[Method]:
        return list(dict.fromkeys(line.method for line in self.lines))

    def of(self, question: Question, method: Method | None = None) -> list[Line]:
        return [
            line
            for line in self.lines
            if line.question == question and (method is None or line.method == method)
        ]

    def examples(self, question: Question) -> list[int]:
        """How many examples the question's curves have, each number once."""
        return sorted({line.curve.n for line in self.of(question)})


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; nan of one value."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def as_record(board: Board) -> dict[str, Any]:
    """The board's numbers for machines."""
    return {
        "base": board.name,
        "fingerprint": board.fingerprint,
        "family": board.family,
        "splits": board.splits,
        "y_max": board.y_max,
        "curves": [
            {"method": line.method.label, "training_seed": line.seed, **asdict(line.curve)}
            for line in board.lines
        ],
        "pairs": [
            {**asdict(pair), "method": pair.method.label, "difference": asdict(pair.difference)}
            for pair in board.pairs
        ],
    }
