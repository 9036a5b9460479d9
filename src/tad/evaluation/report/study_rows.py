"""The tables of a study on the page: a row per method that has numbers, and what is not there in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tad.evaluation.report.names import shorten
from tad.evaluation.report.palette import Look
from tad.evaluation.report.rows import SMOKE, Cell, Group, Table, signed
from tad.evaluation.report.studies import StudyPart, Tried, Tuning
from tad.evaluation.report.study_plots import error_of, rows_with_numbers
from tad.evaluation.study.tables import Difference, Entry, Estimate, Facts, Shown
from tad.evaluation.study.tables import Table as StudyTable
from tad.evaluation.sweep import FIRST


def main_rows(part: StudyPart, table: StudyTable, looks: Mapping[str, Look], smoke: bool) -> Table | None:
    """A study's table: every method that has numbers."""
    rows = rows_with_numbers(table)
    if not rows:
        return None
    rival = [f"× {_title_of(part, table.rival)}"] if table.rival else []
    head = ["method", f"TPF at base − {table.below:g}", *rival, "accuracy, %", "to base", "TPF",
            "accuracy one token, %", "AUP", "seeds"]  # fmt: skip
    group = Group("", [_row(table, row, facts, looks[row.title]) for row, facts in rows])
    group.smoke = smoke or rows[0][1].n < SMOKE
    group.title = f"n = {rows[0][1].n:,} problems: {', '.join(map(shorten, table.tasks))}"
    return Table(f"{table.title} of {part.name}", head, [group], stacked=True)


def _title_of(part: StudyPart, method: str) -> str:
    rows = (row for table in part.tables for row in table.rows if row.method == method)
    return next((row.title for row in rows), method)


def _row(table: StudyTable, row: Entry, facts: Facts, look: Look) -> list[Cell]:
    ratio = [_with_interval(facts.times_rival)] if table.rival else []
    low, high = facts.reach_interval
    reached = "" if facts.reach.tpf is None else f"{low:.2f} to {high:.2f}"
    return [
        Cell(row.title, look, note=setting_of(facts.setting)),
        Cell(str(facts.reach).replace(">=", "≥"), note=reached),
        *ratio,
        _estimate(facts.accuracy, 1),
        _with_interval(facts.to_base, sign=True, digits=1),
        _estimate(facts.tpf, 2),
        _estimate(facts.first, 1),
        _estimate(facts.aup, 1),
        Cell(seeds_of(row)),
    ]


def seeds_of(row: Entry) -> str:
    """How many of those planned; nothing where nothing is trained."""
    if not any(seed is not None for seed in row.seeds):
        return "–"
    done = len(row.seeds)
    return f"{done}" if done >= row.planned_seeds else f"{done} of {row.planned_seeds}"


def setting_of(name: str) -> str:
    """What a run's name says of its decoder: 'tad,threshold=0.5' as 'threshold 0.5'."""
    decoder, _, rest = name.partition(",")
    return "one token" if decoder == FIRST else rest.replace("=", " ").replace(",", ", ")


def _estimate(value: Estimate | None, digits: int) -> Cell:
    if value is None:
        return Cell("–")
    error, name = error_of(value), "±" if value.sd is None else "sd"
    return Cell(f"{value.mean:.{digits}f}", note="" if math.isnan(error) else f"{name} {error:.{digits}f}")


def _with_interval(value: Difference | None, sign: bool = False, digits: int = 2) -> Cell:
    if value is None:
        return Cell("–")

    def shown(number: float) -> str:
        return signed(number, digits) if sign else f"{number:.{digits}f}"

    low, high = value.interval
    return Cell(shown(value.value), note=f"{shown(low)} to {shown(high)}")


def missing_rows(table: StudyTable) -> list[tuple[str, str]]:
    """(title, why) of the rows without numbers."""
    return [(row.title, row.state) for row in table.rows if row.numbers is None]


def pair_rows(part: StudyPart, table: StudyTable, looks: Mapping[str, Look], smoke: bool) -> Table | None:
    """Every method at its own setting against the base one token at a time, on the same problems."""
    rows = [entry for entry in rows_with_numbers(table) if entry[0].method != table.base]
    if not rows:
        return None
    head = ["method", "accuracy, points", "95 % interval", "TPF", "95 % interval ", "seeds"]
    ends = [abs(end) for _, facts in rows for end in facts.to_base.interval if math.isfinite(end)]
    reach = max([*ends, 1e-9])
    group = Group(f"all tasks, n = {rows[0][1].n:,}", [], smoke or rows[0][1].n < SMOKE)
    for row, facts in rows:
        low, high = facts.to_base.interval
        span = tuple(round(60 + 54 * value / reach, 1) for value in (low, facts.to_base.value, high))
        fast = facts.tpf_to_base
        group.rows.append(
            [
                Cell(row.title, looks[row.title], note=setting_of(facts.setting)),
                Cell(signed(facts.to_base.value)),
                Cell(f"{signed(low)} to {signed(high)}", span=span),  # type: ignore[arg-type]
                Cell(signed(fast.value)),
                Cell(f"{signed(fast.interval[0])} to {signed(fast.interval[1])}"),
                Cell(seeds_of(row)),
            ]
        )
    return Table(f"Differences to {_title_of(part, table.base)} in {part.name}", head, [group])


def point_rows(part: StudyPart, table: StudyTable, looks: Mapping[str, Look], smoke: bool) -> Table | None:
    """Every point of every method, by task."""
    rows = rows_with_numbers(table)
    if not rows:
        return None
    found = Table(
        f"Points of {table.title}, {part.name}", ["method", "setting", "accuracy, %", "TPF", "seeds"]
    )
    several = len(table.tasks) > 1
    for task in ([None] if several else []) + list(table.tasks):
        n = rows[0][1].n if task is None else part.examples(task)
        group = Group(f"{'all tasks' if task is None else shorten(task)}, n = {n:,}", [], smoke or n < SMOKE)
        for row, facts in rows:
            for point in facts.points if task is None else facts.tasks[task]:
                group.rows.append(_point(row, point, looks[row.title]))
        found.groups.append(group)
    return found


def _point(row: Entry, point: Shown, look: Look) -> list[Cell]:
    return [
        Cell(row.title, look),
        Cell(setting_of(point.setting)),
        _estimate(point.accuracy, 1),
        _estimate(point.tpf, 2),
        Cell(seeds_of(row)),
    ]


# Tuning


def trial_rows(tuning: Tuning, name: str) -> Table | None:
    """Every trial that has been run."""
    done = [tried for tried in tuning.trials if tried.trial.score is not None]
    if not done:
        return None
    head = ["method", "trial", "changes", "best accuracy, %", f"TPF at base − {tuning.below:g}", "chosen"]
    table = Table(f"Trials of {name}", head, [Group("", [])])
    for tried in done:
        trial = tried.trial
        speed = "not reached" if trial.tpf is None else f"{trial.tpf:.2f}"
        texts = [str(trial.number), changes_of(trial.changes), f"{trial.accuracy:.1f}", speed]
        table.groups[0].rows.append(
            [Cell(tried.title), *map(Cell, texts), Cell("yes" if trial.chosen else "")]
        )
    return table


def untried(tuning: Tuning) -> list[str]:
    """Titles of the methods whose trials have not all been run."""
    left = [tried.title for tried in tuning.trials if tried.trial.score is None]
    return list(dict.fromkeys(left))


def count_trials(trials: Iterable[Tried]) -> int:
    """For each method; all have as many."""
    return max((tried.trial.number + 1 for tried in trials), default=0)


def changes_of(values: Mapping[str, Any]) -> str:
    """Nested changes of a recipe as 'learning.lr 0.001'."""
    return ", ".join(f"{key} {value}" for key, value in _flat(values, "")) or "none"


def _flat(values: Mapping[str, Any], above: str) -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            found += _flat(value, f"{name}.")
        else:
            found.append((name, value if isinstance(value, str) else json.dumps(value)))
    return found
