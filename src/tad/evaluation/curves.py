"""Curves of accuracy over tokens per forward, from the runs of sweeps, and the table they stand in.

An area under a curve is never without its points here, nor without the number of examples: a table carries them, for each
task its y_max, and beside each area the speeds at 1 and at 3 points below the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tad.decoding import DECODERS
from tad.errors import TadError
from tad.evaluation.aup import ALPHA, DROP, Point, Reach, aup, keep, past_first, reach
from tad.evaluation.bootstrap import Resampled, interval
from tad.evaluation.results import META, Results
from tad.evaluation.row import Row
from tad.evaluation.summary import measure
from tad.evaluation.sweep import FIRST

BELOW = (1.0, 3.0)  # points under the base's accuracy
POINTS = "points.json"
Question = tuple[str, str]  # task, template


@dataclass(frozen=True)
class Measured:
    """One point of a curve, with what it rests on."""

    run: str
    setting: float | None  # threshold or steps; None: one token at a time
    tpf: float
    tpf_se: float
    tpf_all: float
    accuracy: float
    se: float
    n: int
    dropped: bool = False  # more than 5 below the first: not in the area

    @property
    def point(self) -> Point:
        return Point(self.tpf, self.accuracy)


@dataclass(frozen=True)
class Curve:
    """One method of one model on one task under one template."""

    model: str  # base, and adapter if there is one
    decoder: str
    task: str
    template: str
    points: list[Measured]
    n: int
    aup: float | None
    aup_interval: tuple[float, float] | None
    reaches: list[Reach]
    base: str  # whose accuracy the reaches are measured from


@dataclass(frozen=True)
class CurveTable:
    """Curves with the one y_max per task that makes their areas comparable."""

    curves: list[Curve]
    y_max: dict[str, float]  # "task/template" -> percent
    y_max_from: dict[str, str]

    def as_record(self) -> dict[str, Any]:
        return {"alpha": ALPHA, "drop": DROP, **asdict(self), "mean_aup": self.means()}

    def means(self) -> list[dict[str, Any]]:
        """Each method's mean over the tasks it has all of, as the published tables average."""
        groups: dict[tuple[str, str, str], list[Curve]] = {}
        for curve in self.curves:
            groups.setdefault((curve.model, curve.decoder, curve.template), []).append(curve)
        return [
            {
                "model": model,
                "decoder": decoder,
                "template": template,
                "tasks": len(found),
                "aup": _mean(found),
            }
            for (model, decoder, template), found in groups.items()
        ]


def _mean(curves: Sequence[Curve]) -> float | None:
    areas = [curve.aup for curve in curves]
    return sum(area for area in areas if area is not None) / len(areas) if None not in areas else None


@dataclass
class _Sweep:
    """The runs under one directory, read."""

    folder: Path
    runs: dict[str, tuple[Results, dict[Question, list[Row]]]]

    @property
    def label(self) -> str:
        return next(iter(self.runs.values()))[0].meta.label

    @property
    def adapter(self) -> str | None:
        return next(iter(self.runs.values()))[0].meta.adapter


def find_runs(folder: str | Path) -> list[Path]:
    """The directories of runs: the folder itself, or those in it."""
    folder = Path(folder)
    if (folder / META).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{META}"))
    if not found:
        raise TadError(f"{folder}: no runs here; make some with 'tad eval'")
    return found


def tabulate(
    folders: Sequence[str | Path],
    y_max: float | Mapping[str, float] | None = None,
    base: str | Path | None = None,
    resamples: int = 1000,
) -> CurveTable:
    """The curves of one or more sweep directories in one table.

    `y_max` is a percentage for all tasks or one for each; without it, the highest accuracy of any point in this table on
    that task. `base` is the run whose accuracy the speeds below it are measured from; without it, the one-token run of the same
    base without adapter where a sweep here has it, else each curve's own first point.
    """
    sweeps = [_read(Path(folder)) for folder in folders]
    bases = _bases(sweeps, base)
    drafts = [draft for sweep in sweeps for draft in _drafts(sweep)]
    if not drafts:
        raise TadError(
            f"{folders[0]}: no curve yet: a sweep needs a finished, graded '{FIRST}' run and another one"
        )
    tops, source = _tops(drafts, y_max)
    curves = []
    for sweep, decoder, question, points, rows in drafts:
        own = [entry.point for entry in points]
        own_bar = (points[0].accuracy, "its own first point")
        bar, name = _bar(sweep, question, bases, base is not None) or own_bar
        kept = keep(past_first(own))
        area, spread = _area(own, rows, tops["/".join(question)], resamples)
        curves.append(
            Curve(
                model=sweep.label,
                decoder=decoder,
                task=question[0],
                template=question[1],
                points=[
                    Measured(**{**asdict(entry), "dropped": entry.point not in kept}) for entry in points
                ],
                n=points[0].n,
                aup=area,
                aup_interval=spread,
                reaches=[reach(own, bar - below) for below in BELOW],
                base=name,
            )
        )
    return CurveTable(curves, tops, source)


Draft = tuple[_Sweep, str, Question, list[Measured], list[list[Row]]]


def _read(folder: Path) -> _Sweep:
    """Complete, graded runs only: half a run is not a point."""
    runs = {}
    for path in find_runs(folder):
        results = Results.open(path)
        rows = results.rows()
        if len(rows) < results.meta.planned or any(row.correct is None for row in rows):
            continue
        questions: dict[Question, list[Row]] = {}
        for row in rows:
            questions.setdefault((row.task, row.template), []).append(row)
        runs[path.name] = (results, questions)
    if not runs:
        raise TadError(
            f"{folder}: no finished, graded run; run the same command again, or 'tad regrade {folder}'"
        )
    return _Sweep(folder, runs)


def _drafts(sweep: _Sweep) -> list[Draft]:
    """Points and rows of each method and question, slowest first; the one-token run opens every curve."""
    first = next((name for name, (run, _) in sweep.runs.items() if run.meta.decoder["name"] == FIRST), None)
    if first is None:
        return []
    start, start_rows = sweep.runs[first]
    _check_settings(sweep)
    methods: dict[str, list[str]] = {}
    for name, (run, _) in sweep.runs.items():
        different = None if name == first else _difference(start, run)
        if different:
            raise TadError(f"{sweep.folder / name}: is not of the same sweep: {different}")
        if name != first:
            methods.setdefault(run.meta.decoder["name"], []).append(name)
    drafts: list[Draft] = []
    known = list(DECODERS)
    ordered = sorted(
        methods.items(), key=lambda entry: known.index(entry[0]) if entry[0] in known else len(known)
    )
    for decoder, names in ordered or [(FIRST, list[str]())]:
        for question in start_rows:
            chosen = [first, *names]
            rows = [sweep.runs[name][1][question] for name in chosen]
            points = [
                _measured(name, sweep.runs[name][0], found) for name, found in zip(chosen, rows, strict=True)
            ]
            order = [0, *sorted(range(1, len(points)), key=lambda i: points[i].point)]
            drafts.append((sweep, decoder, question, [points[i] for i in order], [rows[i] for i in order]))
    return drafts


def _check_settings(sweep: _Sweep) -> None:
    """Runs of one decoder may differ in what a sweep varies alone: a curve through anything else is of two methods."""
    seen: dict[str, tuple[str, dict[str, object]]] = {}
    for name, (run, _) in sweep.runs.items():
        own = {key: value for key, value in run.meta.decoder.items() if key not in ("threshold", "steps")}
        other, before = seen.setdefault(run.meta.decoder["name"], (name, own))
        for key in own | before:
            if own.get(key) != before.get(key):
                raise TadError(
                    f"{sweep.folder}: '{other}' and '{name}' are of two sweeps: {key} is {before.get(key)!r} and "
                    f"{own.get(key)!r}; give each sweep a directory of its own (--out)"
                )


def _difference(start: Results, other: Results) -> str | None:
    """What runs of one sweep may not differ in: anything but the decoder."""
    return start.meta.difference(replace(other.meta, decoder=start.meta.decoder))


def _measured(name: str, run: Results, rows: Sequence[Row]) -> Measured:
    found = measure(rows)
    decoder = run.meta.decoder
    setting = None if decoder["name"] == FIRST else decoder.get("threshold", decoder.get("steps"))
    return Measured(
        name,
        setting,
        found["tpf"],
        found["tpf_se"],
        found["tpf_all"],
        found["accuracy"],
        found["se"],
        found["n"],
    )


def _bases(
    sweeps: Sequence[_Sweep], base: str | Path | None
) -> list[tuple[Results, dict[Question, list[Row]], str]]:
    """Runs that curves may be measured against, with how to call them."""
    if base is not None:
        found = _read(Path(base))
        name = next((key for key, (run, _) in found.runs.items() if run.meta.decoder["name"] == FIRST), None)
        if name is None:
            raise TadError(f"{base}: the base should be a run of '{FIRST}', or a sweep that has one")
        return [(*found.runs[name], str(found.folder))]
    plain = [
        (sweep, run, rows) for sweep in sweeps if sweep.adapter is None for run, rows in sweep.runs.values()
    ]
    return [(run, rows, sweep.label) for sweep, run, rows in plain if run.meta.decoder["name"] == FIRST]


def _bar(
    sweep: _Sweep,
    question: Question,
    bases: Sequence[tuple[Results, dict[Question, list[Row]], str]],
    given: bool,
) -> tuple[float, str] | None:
    """The base's accuracy on a question and its name; None where no base answered the same examples."""
    own = next(iter(sweep.runs.values()))
    asked = [(row.id, row.question) for row in own[1][question]]
    for run, rows, name in bases:
        if not given and run.meta.model != own[0].meta.model:
            continue
        if [(row.id, row.question) for row in rows.get(question, [])] == asked:
            return float(measure(rows[question])["accuracy"]), f"{name}, {FIRST}"
        if given:
            raise TadError(
                f"{name}: the base's examples of '{question[0]}' (template '{question[1]}') are not the sweep's"
            )
    return None


def _tops(
    drafts: Sequence[Draft], y_max: float | Mapping[str, float] | None
) -> tuple[dict[str, float], dict[str, str]]:
    """y_max of every question, and where it is from."""
    highest: dict[str, float] = {}
    for draft in drafts:
        name = "/".join(draft[2])
        highest[name] = max(highest.get(name, 0.0), *(point.accuracy for point in draft[3]))
    if isinstance(y_max, int | float):
        return dict.fromkeys(highest, float(y_max)), dict.fromkeys(highest, "given")
    given = dict(y_max or {})
    tops, sources = {}, {}
    for name, top in highest.items():
        key = name if name in given else name.rpartition("/")[0]
        tops[name], sources[name] = given.get(key, top), "given" if key in given else "highest in this table"
    known = {*highest, *(name.rpartition("/")[0] for name in highest)}
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise TadError(f"y_max of '{unknown}', which is not in the table: {', '.join(highest)}")
    return tops, sources


def _area(
    points: Sequence[Point], rows: Sequence[Sequence[Row]], y_max: float, resamples: int
) -> tuple[float | None, tuple[float, float] | None]:
    """The area and its 95 % interval over examples; neither where no answer of the table is right."""
    if y_max <= 0:
        return None, None
    area = aup(past_first(points), y_max)
    if resamples < 1:
        return area, None
    drawn = Resampled(rows, resamples)
    answered = np.isfinite(drawn.tpf).all(0)  # a draw of nothing but prompts that do not fit has no speed
    areas = [
        aup(past_first([Point(tpf, accuracy) for tpf, accuracy in zip(*pair, strict=True)]), y_max)
        for pair in zip(drawn.tpf.T[answered].tolist(), drawn.accuracy.T[answered].tolist(), strict=True)
    ]
    return area, interval(np.array(areas))
