"""What evaluation runs show beside each other: one board per base, with its methods, curves, areas and paired differences.

A method is a model (the base, or a student of it) and a decoder. Curves of sweep directories come from `curves.tabulate`, so
that the report has the numbers of `tad points`; runs that are in no sweep are points without an area.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tad.decoding import DECODERS, get_decoder
from tad.decoding.decoders import parameters
from tad.errors import TadError
from tad.evaluation.aup import reach
from tad.evaluation.bootstrap import Resampled, interval
from tad.evaluation.compare import Difference, compare_runs
from tad.evaluation.curves import BELOW, Curve, Measured, Question, tabulate
from tad.evaluation.report.data import Gathered, Run
from tad.evaluation.report.names import BASE, Who, name_bases, name_runs
from tad.evaluation.report.palette import FIRST_LOOK, STUDENT_FIRST_LOOK, Look, look
from tad.evaluation.row import Row
from tad.evaluation.summary import measure
from tad.evaluation.sweep import FIRST

POOLED = "all tasks"
RIVAL = "fast-dllm"
RESAMPLES = 1000
Say = Callable[[str], None]


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
    """Everything measured on one base."""

    name: str
    fingerprint: str
    family: str
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


def make_boards(
    found: Gathered,
    y_max: float | Mapping[str, float] | None = None,
    resamples: int = RESAMPLES,
    say: Say = lambda _: None,
) -> list[Board]:
    """A board per base, in the order of the runs."""
    bases = name_bases(found.runs, found.trainings)
    whos = name_runs(found.runs, found.trainings, bases)
    identities: dict[Path, set[str]] = {}
    for run in found.runs:
        identities.setdefault(run.folder.parent.resolve(), set()).add(run.identity)
    mixed = {folder for folder, several in identities.items() if len(several) > 1}
    boards: dict[str, Board] = {}
    for run, who in zip(found.runs, whos, strict=True):
        board = boards.setdefault(who.base, Board(bases[who.base], who.base, run.meta.family, []))
        board.runs.append((run, who))
    for board in boards.values():
        say(f"{board.name}: curves of {len(board.runs)} runs")
        _fill(board, mixed, y_max, resamples, found.notes)
        say(f"{board.name}: paired differences")
        board.pairs = _pairs(board, resamples, found.notes)
    return list(boards.values())


def give_looks(boards: Sequence[Board]) -> dict[Method, Look]:
    """The same look for the same method on every board."""
    looks: dict[Method, Look] = {}
    for board in boards:
        for method in board.methods:
            if method not in looks:
                taken = sum(not other.is_first for other in looks)
                first = FIRST_LOOK if method.model == BASE else STUDENT_FIRST_LOOK
                looks[method] = first if method.is_first else look(taken)
    return looks


# Curves


def _fill(
    board: Board,
    mixed: set[Path],
    y_max: float | Mapping[str, float] | None,
    resamples: int,
    notes: list[str],
) -> None:
    sweeps, lone = _sort_runs(board, mixed)
    tops = _tops(sweeps, y_max)
    for members in sweeps.values():
        board.lines += _swept(board, members, sweeps, tops, resamples, notes)
    board.y_max = tops
    board.y_max_from = {
        key: "given" if _given(key, y_max) is not None else "highest in this table" for key in tops
    }
    for members in lone.values():
        board.lines += _unswept(board, members)
    for members in (*sweeps.values(), *lone.values()):
        board.lines += _first_alone(members)
    known = list(DECODERS)
    rank = {name: number for number, name in enumerate(known)}
    models = list(dict.fromkeys([BASE, *(line.method.model for line in board.lines)]))
    board.lines.sort(
        key=lambda line: (
            models.index(line.method.model),
            rank.get(line.method.decoder, len(known)),
            line.seed or 0,
        )
    )
    board.lines += _pooled(board)


Members = list[tuple[Run, Who]]


def _sort_runs(board: Board, mixed: set[Path]) -> tuple[dict[Path, Members], dict[str, Members]]:
    """Sweep directories, in which all runs differ in their decoder alone and one is one by one; and the other runs."""
    folders: dict[Path, Members] = {}
    for run, who in board.runs:
        folders.setdefault(run.folder.parent.resolve(), []).append((run, who))
    sweeps: dict[Path, Members] = {}
    lone: dict[str, Members] = {}
    for folder, members in folders.items():
        names = [run.meta.decoder["name"] for run, _ in members]
        if folder not in mixed and names.count(FIRST) == 1 and len(names) > 1:
            sweeps[folder] = members
        else:
            for run, who in members:
                lone.setdefault(run.identity, []).append((run, who))
    return sweeps, lone


def _tops(sweeps: Mapping[Path, Members], y_max: float | Mapping[str, float] | None) -> dict[str, float]:
    """One y_max per question for all sweeps of the board."""
    tops: dict[str, float] = {}
    for members in sweeps.values():
        for run, _ in members:
            for question, rows in _by_question(run.rows).items():
                key = "/".join(question)
                tops[key] = max(tops.get(key, 0.0), measure(rows)["accuracy"])
    return {key: top if (given := _given(key, y_max)) is None else given for key, top in tops.items()}


def _given(key: str, y_max: float | Mapping[str, float] | None) -> float | None:
    if y_max is None or isinstance(y_max, int | float):
        return y_max
    return y_max.get(key, y_max.get(key.rpartition("/")[0]))


def _swept(
    board: Board,
    members: Members,
    sweeps: Mapping[Path, Members],
    tops: dict[str, float],
    resamples: int,
    notes: list[str],
) -> list[Line]:
    """The curves of one sweep directory, as `tad points` has them."""
    folder = members[0][0].folder.parent
    who = members[0][1]
    own = {"/".join(question) for run, _ in members for question in _by_question(run.rows)}
    base = _base_run(members[0][0], sweeps)
    try:
        table = tabulate(
            [folder], {key: tops[key] for key in own}, None if base is None else base.folder, resamples
        )
    except TadError as error:
        notes.append(str(error))
        return []
    paths = {run.folder.name: run.folder for run, _ in members}
    named = "its own first point" if base is None else f"{board.name}, {FIRST}"
    return [
        Line(
            Method(who.model, curve.decoder),
            who.seed,
            replace(curve, base=named),
            tuple(paths[point.run] for point in curve.points),
        )
        for curve in table.curves
    ]


def _base_run(run: Run, sweeps: Mapping[Path, Members]) -> Run | None:
    """The base's own one-token run on the same examples."""
    asked = [(entry["name"], entry["digest"]) for entry in run.meta.tasks]
    for members in sweeps.values():
        for other, who in members:
            same = [(entry["name"], entry["digest"]) for entry in other.meta.tasks] == asked
            if same and not who.is_student and other.meta.decoder["name"] == FIRST:
                return other
    return None


def _by_question(rows: Sequence[Row]) -> dict[Question, list[Row]]:
    found: dict[Question, list[Row]] = {}
    for row in rows:
        found.setdefault((row.task, row.template), []).append(row)
    return found


def _unswept(board: Board, members: Members) -> list[Line]:
    """Points of runs that are in no sweep; the one-token run opens them where it is there."""
    first = [entry for entry in members if entry[0].meta.decoder["name"] == FIRST][:1]
    decoders: dict[str, Members] = {}
    for run, who in members:
        if run.meta.decoder["name"] != FIRST:
            decoders.setdefault(run.meta.decoder["name"], []).append((run, who))
    return [
        _line(question, decoder, [*first, *entries])
        for decoder, entries in decoders.items()
        for question in _by_question(entries[0][0].rows)
    ]


def _line(question: Question, decoder: str, members: Members) -> Line:
    """Points without an area."""
    points = [(_point(run, _by_question(run.rows)[question]), run.folder) for run, _ in members]
    points.sort(key=lambda entry: (entry[0].setting is not None, entry[0].tpf))
    who = members[-1][1]
    own = [point for point, _ in points]
    curve = Curve(who.model, decoder, *question, own, own[0].n, None, None, [], "")
    return Line(Method(who.model, decoder), who.seed, curve, tuple(path for _, path in points))


def _point(run: Run, rows: Sequence[Row]) -> Measured:
    found, decoder = measure(rows), run.meta.decoder
    setting = None if decoder["name"] == FIRST else decoder.get("threshold", decoder.get("steps"))
    names = ("tpf", "tpf_se", "tpf_all", "accuracy", "se", "n")
    return Measured(run.folder.name, setting, *(found[name] for name in names))


def _first_alone(members: Members) -> list[Line]:
    """The one-token run as a method of its own."""
    return [
        _line(question, FIRST, [(run, who)])
        for run, who in members
        if run.meta.decoder["name"] == FIRST
        for question in _by_question(run.rows)
    ]


def _pooled(board: Board) -> list[Line]:
    """All examples of all tasks alike, for methods that have several tasks."""
    groups: dict[tuple[Method, int | None, tuple[Path, ...], str], list[Line]] = {}
    runs = {run.folder: run for run, _ in board.runs}
    whos = {run.folder: who for run, who in board.runs}
    for line in board.lines:
        key = (line.method, line.seed, tuple(sorted(line.runs)), line.curve.template)
        groups.setdefault(key, []).append(line)
    found = []
    for (method, seed, folders, template), lines in groups.items():
        if len(lines) < 2:
            continue
        points = []
        for folder in folders:
            rows = [row for row in runs[folder].rows if row.template == template]
            points.append((_point(runs[folder], rows), folder))
        points.sort(key=lambda entry: (entry[0].setting is not None, entry[0].tpf))
        own = [point for point, _ in points]
        bar = _first_accuracy(board, whos[folders[0]], template, own[0].n)
        reaches = [reach([p.point for p in own], bar - below) for below in BELOW] if bar is not None else []
        curve = Curve(method.model, method.decoder, POOLED, template, own, own[0].n, None, None, reaches, "")
        found.append(Line(method, seed, curve, tuple(path for _, path in points)))
    return found


def _first_accuracy(board: Board, who: Who, template: str, examples: int) -> float | None:
    """The base's accuracy one token at a time over all tasks, where it answered as many examples."""
    for run, other in board.runs:
        if not other.is_student and run.meta.decoder["name"] == FIRST:
            rows = [row for row in run.rows if row.template == template]
            if len(rows) == examples:
                return float(measure(rows)["accuracy"])
    return None


# Paired differences


def _pairs(board: Board, resamples: int, notes: list[str]) -> list[Pair]:
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


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; nan of one value."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def as_record(board: Board) -> dict[str, Any]:
    """The board's numbers for machines."""
    from dataclasses import asdict

    return {
        "base": board.name,
        "fingerprint": board.fingerprint,
        "family": board.family,
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
