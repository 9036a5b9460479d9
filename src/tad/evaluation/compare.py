"""Runs beside each other, on the same examples: paired differences, how sure they are, and what could have been seen.

Two runs are comparable where they asked the same examples of the same split with the same template and grader. Where one
asked fewer of them, what both asked is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.evaluation.bootstrap import RESAMPLES, Resampled, interval
from tad.evaluation.results import Results
from tad.evaluation.row import Key, Row
from tad.evaluation.summary import measure

_Z_POWER = 1.959963984540054 + 0.8416212335729143  # two-sided 5 %, power 80 %


@dataclass(frozen=True)
class Difference:
    """A run against the first one on one task: percentage points and tokens per forward, with 95 % intervals."""

    task: str  # 'all' for every example alike
    run: str
    n: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    gained: int  # wrong in the first run, right in this one
    lost: int
    p_value: float  # McNemar's exact test
    resolvable: float  # the difference that this many examples would have shown with 80 % power
    tpf: float
    tpf_interval: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """`groups`: per task and run what it measured on the shared examples; `notes`: what was left out."""

    runs: list[str]
    groups: dict[str, dict[str, dict[str, Any]]]
    differences: list[Difference]
    notes: list[str]


def compare_runs(folders: Sequence[str | Path], resamples: int = RESAMPLES) -> Comparison:
    """All runs against the first."""
    if len(folders) < 2:
        raise TadError("a comparison needs at least two runs")
    runs = [Results.open(folder) for folder in folders]
    names = _names(runs)
    for other, name in zip(runs[1:], names[1:], strict=True):
        _check_tasks(runs[0], other, name)
    tables = [{row.key: row for row in run.rows()} for run in runs]
    keys, notes = _shared(tables, names)
    found = [[table[key] for key in keys] for table in tables]
    tasks = list(dict.fromkeys(key[0] for key in keys))
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    differences = []
    for task in [*tasks, *(["all"] if len(tasks) > 1 else [])]:
        chosen = [[row for row in rows if task in ("all", row.task)] for rows in found]
        groups[task] = {name: measure(rows) for name, rows in zip(names, chosen, strict=True)}
        for name, rows in zip(names[1:], chosen[1:], strict=True):
            differences.append(_difference(task, name, chosen[0], rows, resamples))
    return Comparison(names, groups, differences, notes)


def _names(runs: Sequence[Results]) -> list[str]:
    """Directory names, with as many parents as it takes to tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise TadError(
            f"{next(run.folder for run in runs if paths.count(run.folder.resolve()) > 1)}: is named twice"
        )
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _check_tasks(first: Results, other: Results, name: str) -> None:
    """Refuse runs that asked other things in other ways; how many examples they asked may differ."""
    mine, theirs = ({entry["name"]: entry for entry in run.meta.tasks} for run in (first, other))
    shared = [task for task in mine if task in theirs]
    if not shared:
        raise TadError(f"{name}: no task in common: {', '.join(mine)} there and {', '.join(theirs)} here")
    for task in shared:
        for field in ("split", "templates", "options"):
            if mine[task][field] != theirs[task][field]:
                raise TadError(
                    f"{name}: {field} of '{task}' is {mine[task][field]!r} in the first run and {theirs[task][field]!r}"
                    " here; compare runs on the same examples"
                )


def _shared(tables: Sequence[dict[Key, Row]], names: Sequence[str]) -> tuple[list[Key], list[str]]:
    """The examples every run has, in the first one's order, and a note for each run that has others."""
    for table, name in zip(tables, names, strict=True):
        if any(row.correct is None for row in table.values()):
            raise TadError(f"{name}: has rows without a verdict; run 'tad regrade' on it first")
        for key, row in table.items():
            if key in tables[0] and tables[0][key].question != row.question:
                raise TadError(
                    f"{name}: example '{key[2]}' is another question than in {names[0]}; the data differ"
                )
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    if not keys:
        raise TadError(f"{names[1]}: no example in common with {names[0]}")
    notes = [
        f"{name} has {len(table)} rows; the {len(keys)} that all runs share are compared"
        for table, name in zip(tables, names, strict=True)
        if len(table) != len(keys)
    ]
    return keys, notes


def _difference(task: str, name: str, first: list[Row], other: list[Row], resamples: int) -> Difference:
    gained = sum(bool(b.correct) and not a.correct for a, b in zip(first, other, strict=True))
    lost = sum(bool(a.correct) and not b.correct for a, b in zip(first, other, strict=True))
    drawn = Resampled([first, other], resamples)
    before, after = measure(first), measure(other)
    return Difference(
        task=task,
        run=name,
        n=len(first),
        accuracy=100 * (gained - lost) / len(first),
        accuracy_interval=interval(drawn.accuracy[1] - drawn.accuracy[0]),
        gained=gained,
        lost=lost,
        p_value=mcnemar(gained, lost),
        resolvable=resolvable(len(first), gained + lost),
        tpf=after["tpf"] - before["tpf"],
        tpf_interval=interval(drawn.tpf[1] - drawn.tpf[0]),
    )


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of `gained` against `lost` if both were equally likely."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def resolvable(examples: int, changed: int) -> float:
    """Percentage points that `examples` pairs would show as different (5 %, two-sided) with 80 % power.

    From the share of examples on which the runs disagree. Where they agree on all, that share is taken as 3 / n, which it
    exceeds with a probability of 5 % at most.
    """
    return 100 * _Z_POWER * math.sqrt(max(changed, 3) / examples / examples)
