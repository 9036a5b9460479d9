"""Paired differences: every method against the base one token at a time, and against the base with Fast-dLLM.

Of one run they are those of `compare.compare_runs`; of several training seeds, their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tad.errors import TadError
from tad.evaluation.bootstrap import Resampled, interval
from tad.evaluation.compare import Difference, compare_runs
from tad.evaluation.report.board import POOLED, Board, Method, Pair, deviation
from tad.evaluation.report.data import Run
from tad.evaluation.report.names import BASE
from tad.evaluation.sweep import FIRST

RIVAL = "fast-dllm"


def make_pairs(board: Board, resamples: int, notes: list[str]) -> list[Pair]:
    """Every method at its chosen point against the base one token at a time, and against the base with Fast-dLLM."""
    picked = _picked(board)
    found = []
    for reference in (Method(BASE, FIRST), Method(BASE, RIVAL)):
        first = picked.get(reference, {}).get(None)
        if first is None:
            continue
        for method, by_seed in picked.items():
            if method == reference or (reference.decoder == RIVAL and method.is_first):
                continue
            try:
                found += _against(reference, first, method, by_seed, resamples)
            except TadError as error:
                notes.append(f"{method.label} against {reference.label}: {error}")
    return found


def _picked(board: Board) -> dict[Method, dict[int | None, tuple[Run, float | None]]]:
    """Method -> training seed -> the run of its chosen point."""
    runs = {run.folder: run for run, _ in board.runs}
    picked: dict[Method, dict[int | None, tuple[Run, float | None]]] = {}
    for line in board.lines:
        if line.curve.task == POOLED:
            continue
        at = line.chosen(board.family)
        entry = (runs[line.runs[at]], line.curve.points[at].setting)
        picked.setdefault(line.method, {}).setdefault(line.seed, entry)
    return picked


def _against(
    reference: Method,
    first: tuple[Run, float | None],
    method: Method,
    by_seed: Mapping[int | None, tuple[Run, float | None]],
    resamples: int,
) -> list[Pair]:
    label = reference.label if first[1] is None else f"{reference.label} at {first[1]:g}"
    setting = next(iter(by_seed.values()))[1]
    seeds = tuple(by_seed)
    each = [compare_runs([first[0].folder, run.folder], resamples).differences for run, _ in by_seed.values()]
    if len(each) == 1:
        return [Pair(label, method, setting, seeds, one, None) for one in each[0]]
    tasks = [one.task for one in each[0] if all(one.task in {other.task for other in ones} for ones in each)]
    return [
        Pair(
            label,
            method,
            setting,
            seeds,
            *_mean([one for ones in each for one in ones if one.task == task], first[0], by_seed, resamples),
        )
        for task in tasks
    ]


def _mean(
    ones: list[Difference],
    first: Run,
    by_seed: Mapping[int | None, tuple[Run, float | None]],
    resamples: int,
) -> tuple[Difference, tuple[float, float]]:
    """The seeds' mean with an interval over examples, which all seeds share, and the spread over seeds beside it."""
    task = ones[0].task
    lists = [first.rows, *(run.rows for run, _ in by_seed.values())]
    tables = [{row.key: row for row in rows if task in ("all", row.task)} for rows in lists]
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    drawn = Resampled([[table[key] for key in shared] for table in tables], resamples)
    mean = Difference(
        task=task,
        run=ones[0].run,
        n=len(shared),
        accuracy=sum(one.accuracy for one in ones) / len(ones),
        accuracy_interval=interval(drawn.accuracy[1:].mean(0) - drawn.accuracy[0]),
        gained=sum(one.gained for one in ones),
        lost=sum(one.lost for one in ones),
        p_value=math.nan,  # McNemar's test is for one run
        resolvable=math.nan,
        tpf=sum(one.tpf for one in ones) / len(ones),
        tpf_interval=interval(drawn.tpf[1:].mean(0) - drawn.tpf[0]),
    )
    return mean, (deviation([one.accuracy for one in ones]), deviation([one.tpf for one in ones]))
