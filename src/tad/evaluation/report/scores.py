"""What evaluation runs show beside each other: a board per base and set of examples, with its methods, curves and areas.

A method is a model (the base, or a student of it) and a decoder. Curves of sweep directories come from `curves.tabulate`, so
that the report has the numbers of `tad points`; runs that are in no sweep are points without an area. Runs on other examples,
such as the validation problems that something was tuned on, never share a board.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tad.decoding import DECODERS
from tad.errors import TadError
from tad.evaluation.aup import reach
from tad.evaluation.curves import BELOW, Curve, Measured, Question, tabulate
from tad.evaluation.report.board import POOLED, Board, Line, Method
from tad.evaluation.report.data import Gathered, Run
from tad.evaluation.report.names import BASE, Who, name_bases, name_runs
from tad.evaluation.report.pairs import make_pairs
from tad.evaluation.report.palette import FIRST_LOOK, STUDENT_FIRST_LOOK, Look, look
from tad.evaluation.row import Row
from tad.evaluation.summary import measure
from tad.evaluation.sweep import FIRST

RESAMPLES = 1000
Say = Callable[[str], None]
Members = list[tuple[Run, Who]]


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
    boards = _sort_by_examples(list(zip(found.runs, whos, strict=True)), bases)
    for board in boards:
        say(f"{board.name}: curves of {len(board.runs)} runs")
        _fill(board, mixed, y_max, resamples, found.notes)
        say(f"{board.name}: paired differences")
        board.pairs = make_pairs(board, resamples, found.notes)
    return boards


def _sort_by_examples(runs: Members, bases: Mapping[str, str]) -> list[Board]:
    """Runs of one base that asked the same examples wherever they asked the same task; test problems come first."""
    boards: list[tuple[Board, dict[str, str]]] = []  # with the digest of every task
    for run, who in runs:
        asked = {entry["name"]: str(entry["digest"]) for entry in run.meta.tasks}
        splits = tuple(dict.fromkeys(str(entry["split"]) for entry in run.meta.tasks))
        for board, digests in boards:
            shared = [task for task in asked if task in digests]
            alike = all(asked[task] == digests[task] for task in shared)
            if board.fingerprint == who.base and alike and (shared or board.splits == splits):
                board.runs.append((run, who))
                digests |= asked
                break
        else:
            board = Board(bases[who.base], who.base, run.meta.family, splits, [(run, who)])
            boards.append((board, asked))
    found = sorted((board for board, _ in boards), key=lambda board: board.splits != ("test",))
    for board in found:
        twins = [other for other in found if other.fingerprint == board.fingerprint]
        if len(twins) > 1:
            rows = max(run.meta.planned for run, _ in board.runs)
            same = sum(other.splits == board.splits for other in twins) > 1
            board.name += f", {'/'.join(board.splits)}" + (f", {rows} examples" if same else "")
    return found


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
