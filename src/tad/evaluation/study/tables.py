"""Tables of methods, as Markdown, CSV and JSON: every number with its n, its spread over seeds and its interval.

A method that has not been run is a row that says so; nothing is ever filled in from elsewhere.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tad.evaluation.aup import Reach
from tad.evaluation.study.numbers import (
    Answers,
    Draws,
    Interval,
    Measured,
    check_same,
    measure,
    span,
    spread,
)
from tad.evaluation.tables import align
from tad.files import create_folder, write_json, write_whole


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `sd` is over seeds where there are several, `se` over examples."""

    mean: float
    se: float
    sd: float | None = None

    def text(self, digits: int) -> str:
        beside = f" (sd {self.sd:.{digits}f})" if self.sd is not None else f" ± {self.se:.{digits}f}"
        return f"{self.mean:.{digits}f}{beside}"


@dataclass(frozen=True)
class Difference:
    """Paired, with its 95 % interval over examples."""

    value: float
    interval: Interval

    def text(self, digits: int, sign: str = "+") -> str:
        low, high = self.interval
        return f"{self.value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


@dataclass(frozen=True)
class Shown:
    """A point of a method's curve."""

    setting: str
    accuracy: Estimate
    tpf: Estimate


@dataclass(frozen=True)
class Entry:
    """A row. `numbers` is None where there are none, and `state` says why."""

    method: str
    title: str
    state: str
    seeds: list[int | None] = field(default_factory=list)
    planned_seeds: int = 0
    numbers: Facts | None = None


@dataclass(frozen=True)
class Facts:
    """What a row shows, over all its tasks together; `tasks` has the same points by task."""

    n: int
    setting: str
    first: Estimate | None  # accuracy one token at a time
    accuracy: Estimate  # at its own setting
    tpf: Estimate
    to_base: Difference  # accuracy, to the base one token at a time
    tpf_to_base: Difference
    reach: Reach
    reach_interval: Interval
    times_rival: Difference | None  # the ratio of the two reaches
    aup: Estimate | None
    points: list[Shown]
    tasks: dict[str, list[Shown]]


@dataclass(frozen=True)
class Table:
    """A group of rows, with what they have in common."""

    name: str
    title: str
    rows: list[Entry]
    tasks: list[str]
    ungraded: list[str]
    below: float
    bar: float | None  # the accuracy that speeds are compared at
    base: str
    rival: str | None
    y_max: dict[str, float]
    note: str | None = None


@dataclass(frozen=True)
class Wanted:
    """A row to make: the method's answers as far as they are there."""

    method: str
    title: str
    answers: Answers | None
    planned_seeds: int
    state: str = ""


def make_table(
    name: str,
    title: str,
    wanted: Sequence[Wanted],
    base: Answers | None,
    rival: Answers | None,
    family: str,
    below: float,
    everyone: Sequence[Answers] = (),
    note: str | None = None,
) -> Table:
    """`everyone`: all methods of the study, which share one y_max per task."""
    present = [one.answers for one in wanted if one.answers is not None]
    if base is None or not present:
        rows = [_empty(one) for one in wanted]
        return Table(name, title, rows, [], [], below, None, "", None, {}, note)
    check_same([base, *present, *([rival] if rival else [])])
    everyone = list({id(one): one for one in (*everyone, *present, base)}.values())
    asked = list(dict.fromkeys(base.runs[0][0].task.tolist()))
    tasks = [task for task in asked if all(task in one.graded for one in (base, *present))]
    tops = _tops(everyone, tasks)
    maker = _Maker(base, rival, tasks, family, below, tops)
    rows = [_empty(one) if one.answers is None else maker.entry(one, one.answers) for one in wanted]
    ungraded = [task for task in asked if task not in tasks]
    bar = maker.bar if tasks else None
    rival_name = rival.name if rival else None
    return Table(name, title, rows, tasks, ungraded, below, bar, base.name, rival_name, tops, note)


def _empty(one: Wanted) -> Entry:
    return Entry(one.method, one.title, one.state or "not run yet", [], one.planned_seeds)


class _Maker:
    """Rows of one table, all on the same resampled examples."""

    def __init__(
        self,
        base: Answers,
        rival: Answers | None,
        tasks: list[str],
        family: str,
        below: float,
        tops: Mapping[str, float],
    ) -> None:
        first = base.runs[0][0]
        self.tasks, self.family, self.tops = tasks, family, tops
        self.chosen = np.isin(first.task, tasks)
        self.by_task = {task: first.task == task for task in tasks}
        self.draws = Draws(max(1, int(self.chosen.sum())))
        self.task_draws = {task: Draws(int(mask.sum())) for task, mask in self.by_task.items()}
        if not tasks:
            return
        self.base = measure(base, self.chosen, self.draws)
        self.bar = float(self.base.accuracy[:, 0].mean()) - below
        self.bars = self.base.drawn_accuracy[0] - below
        # A rival with ungraded tasks of its own cannot be measured on the table's.
        able = rival is not None and set(tasks) <= rival.graded
        self.rival = measure(rival, self.chosen, self.draws) if able and rival else None
        self.rival_reach = self.rival.drawn_reach(self.bars) if self.rival else None

    def entry(self, one: Wanted, answers: Answers) -> Entry:
        state = one.state or ("" if len(answers.seeds) >= one.planned_seeds else "some seeds are not run yet")
        if not self.tasks:
            return Entry(one.method, one.title, "not graded yet", answers.seeds, one.planned_seeds)
        return Entry(one.method, one.title, state, answers.seeds, one.planned_seeds, self._facts(answers))

    def _facts(self, answers: Answers) -> Facts:
        found = measure(answers, self.chosen, self.draws)
        own = answers.own(self.family)
        drawn_reach = found.drawn_reach(self.bars)
        by_task = {task: measure(answers, mask, self.task_draws[task]) for task, mask in self.by_task.items()}
        return Facts(
            n=found.n,
            setting=answers.settings[own].name,
            first=_accuracy(found, 0) if answers.has_first else None,
            accuracy=_accuracy(found, own),
            tpf=_speed(found, own),
            to_base=_paired(found, self.base, "accuracy", own),
            tpf_to_base=_paired(found, self.base, "tpf", own),
            reach=found.reach(self.bar),
            reach_interval=span(drawn_reach),
            times_rival=self._ratio(found, drawn_reach),
            aup=self._area(by_task) if answers.has_first else None,
            points=_points(answers, found),
            tasks={task: _points(answers, one) for task, one in by_task.items()},
        )

    def _ratio(self, found: Measured, drawn: np.ndarray) -> Difference | None:
        if self.rival is None or self.rival_reach is None:
            return None
        mine, theirs = found.reach(self.bar).tpf, self.rival.reach(self.bar).tpf
        if mine is None or theirs is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(self.rival_reach > 0, drawn / self.rival_reach, np.nan)
        return Difference(mine / theirs, span(ratios))

    def _area(self, by_task: Mapping[str, Measured]) -> Estimate | None:
        """The mean over tasks of each seed's area. Its `se` is not estimated here."""
        if any(self.tops[task] <= 0 for task in by_task):
            return None
        areas = np.mean([one.areas(self.tops[task]) for task, one in by_task.items()], axis=0)
        return Estimate(float(areas.mean()), float("nan"), spread(areas))


def _accuracy(found: Measured, point: int) -> Estimate:
    values = found.accuracy[:, point]
    return Estimate(float(values.mean()), float(found.drawn_accuracy[point].std()), spread(values))


def _speed(found: Measured, point: int) -> Estimate:
    values = found.tpf[:, point]
    return Estimate(float(values.mean()), float(found.drawn_tpf[point].std()), spread(values))


def _paired(found: Measured, base: Measured, what: str, point: int) -> Difference:
    mine, theirs = getattr(found, what)[:, point].mean(), getattr(base, what)[:, 0].mean()
    drawn = getattr(found, f"drawn_{what}")[point] - getattr(base, f"drawn_{what}")[0]
    return Difference(float(mine - theirs), span(drawn))


def _points(answers: Answers, found: Measured) -> list[Shown]:
    return [
        Shown(setting.name, _accuracy(found, i), _speed(found, i))
        for i, setting in enumerate(answers.settings)
    ]


def _tops(everyone: Sequence[Answers], tasks: Sequence[str]) -> dict[str, float]:
    """The highest accuracy of any method at any setting, seeds averaged."""
    tops = dict.fromkeys(tasks, 0.0)
    for answers in everyone:
        for task in tasks:
            if task not in answers.graded:
                continue
            chosen = answers.runs[0][0].task == task
            scores = np.mean([[run.correct[chosen].mean() for run in runs] for runs in answers.runs], axis=0)
            tops[task] = max(tops[task], 100 * float(scores.max()))
    return tops


# Text


def columns(table: Table) -> list[str]:
    rival = [f"x {table.rival}"] if table.rival else []
    return [
        "method",
        "seeds",
        "accuracy, one token",
        "setting",
        "accuracy",
        "to base",
        "TPF",
        f"TPF at base - {table.below:g}",
        *rival,
        "AUP",
    ]


def cells(table: Table, row: Entry) -> list[str]:
    """One line of a table, as text."""
    facts = row.numbers
    if facts is None:
        return [row.title, "0" if row.planned_seeds else "", row.state, *[""] * (len(columns(table)) - 3)]
    seeds = (
        f"{len(row.seeds)}"
        if len(row.seeds) >= row.planned_seeds
        else f"{len(row.seeds)} of {row.planned_seeds}"
    )
    low, high = facts.reach_interval
    reached = f"{facts.reach}" if facts.reach.tpf is None else f"{facts.reach} [{low:.2f}, {high:.2f}]"
    ratio = [facts.times_rival.text(2, "") if facts.times_rival else "-"] if table.rival else []
    area = "-" if facts.aup is None else f"{facts.aup.mean:.1f}"
    if facts.aup is not None and facts.aup.sd is not None:
        area += f" (sd {facts.aup.sd:.1f})"
    return [
        row.title,
        seeds,
        facts.first.text(1) if facts.first else "-",
        facts.setting,
        facts.accuracy.text(1),
        facts.to_base.text(1),
        facts.tpf.text(2),
        reached,
        *ratio,
        area,
    ]


def as_text(table: Table) -> str:
    """For a terminal."""
    rows = [columns(table), *(cells(table, row) for row in table.rows)]
    return "\n".join([align(rows), "", *explain(table)])


def as_markdown(table: Table) -> str:
    """The table with a heading and the words needed to read it."""
    head = columns(table)
    lines = [f"### {table.title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(cells(table, row))} |" for row in table.rows]
    return "\n".join([*lines, "", *explain(table)]) + "\n"


def explain(table: Table) -> list[str]:
    """What the numbers are."""
    if table.bar is None:
        left = "no verdicts yet" if table.ungraded else "the base has not been run yet"
        return [f"No numbers: {left}."]
    n = next((row.numbers.n for row in table.rows if row.numbers), 0)
    lines = [
        f"n = {n} problems ({', '.join(table.tasks)}). Accuracies in percent; sd: over training seeds; ±: standard error over "
        "problems, where there is one seed. Brackets: 95 % intervals over problems, seeds averaged, paired with the base.",
        f"*to base*: against {table.base} one token at a time. *TPF at base - {table.below:g}*: the highest tokens per forward at which "
        f"the curve over thresholds is at {table.bar:.1f} %; >=: the fastest setting still is. AUP: mean over tasks, y_max "
        + ", ".join(f"{task} {top:.1f}" for task, top in table.y_max.items())
        + " (the highest accuracy of all methods).",
    ]
    if table.ungraded:
        lines.append(f"Not graded yet, and not in the numbers: {', '.join(table.ungraded)}.")
    return lines + ([table.note] if table.note else [])


def as_csv(table: Table) -> str:
    """A line per method, task ('all' for all together) and setting."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["table", "method", "state", "seeds", "task", "setting", "own", "accuracy", "accuracy_se", "accuracy_sd",
         "tpf", "tpf_se", "tpf_sd"]
    )  # fmt: skip
    for row in table.rows:
        facts = row.numbers
        if facts is None:
            writer.writerow([table.name, row.method, row.state, len(row.seeds)] + [""] * 9)
            continue
        for task, points in {"all": facts.points, **facts.tasks}.items():
            for point in points:
                values = [
                    value
                    for one in (point.accuracy, point.tpf)
                    for value in (one.mean, one.se, "" if one.sd is None else one.sd)
                ]
                own = int(point.setting == facts.setting)
                writer.writerow(
                    [table.name, row.method, row.state, len(row.seeds), task, point.setting, own, *values]
                )
    return file.getvalue()


def write_table(table: Table, folder: Path) -> None:
    """NAME.md, NAME.csv and NAME.json."""
    create_folder(folder)
    write_whole(folder / f"{table.name}.md", as_markdown(table))
    write_whole(folder / f"{table.name}.csv", as_csv(table))
    write_json(folder / f"{table.name}.json", as_record(table))


def as_record(table: Table) -> dict[str, Any]:
    return asdict(table)
