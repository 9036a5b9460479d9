"""The tables of the page. Cells are text, with a swatch, a note or a drawn interval beside it; the template makes the HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tad.evaluation.curves import BELOW, Question
from tad.evaluation.report.board import Board, Line, Method, Pair, deviation
from tad.evaluation.report.data import Gathered, Origin, Store, Training
from tad.evaluation.report.palette import Look
from tad.evaluation.report.plots import question_title
from tad.evaluation.report.studies import StudyPart
from tad.evaluation.tables import with_error

SMOKE = 200  # examples; below this a number is marked


@dataclass(frozen=True)
class Cell:
    """`span`: low, value and high of an interval, as x in a drawing 120 wide with zero in its middle."""

    text: str
    look: Look | None = None
    note: str = ""
    smoke: bool = False
    span: tuple[float, float, float] | None = None


@dataclass
class Group:
    title: str
    rows: list[list[Cell]]
    smoke: bool = False


@dataclass
class Table:
    label: str
    head: list[str]
    groups: list[Group] = field(default_factory=list)
    stacked: bool = False  # notes below their numbers, not beside them


def _cells(*texts: str) -> list[Cell]:
    return [Cell("–" if text == "-" else text) for text in texts]


def _group_title(board: Board, question: Question) -> str:
    n = ", ".join(f"{count:,}" for count in board.examples(question))
    y_max = board.y_max.get("/".join(question))
    top = f", y_max = {y_max:.1f} %" if y_max is not None else ""
    return f"{question_title(question)}, n = {n}{top}"


def is_small(board: Board, question: Question) -> bool:
    return min(board.examples(question)) < SMOKE


# Methods


def main_table(board: Board, looks: Mapping[Method, Look], smoke: bool) -> Table:
    """A row per method and question, at the method's chosen point."""
    table = Table(
        f"Methods on {board.name}",
        [
            "method",
            "setting",
            "accuracy, %",
            "TPF",
            "AUP (95 % interval)",
            *(f"TPF at base − {below:g}" for below in BELOW),
            "training seeds",
        ],
    )
    for question in board.questions:
        group = Group(_group_title(board, question), [], smoke or is_small(board, question))
        for method in board.methods:
            lines = board.of(question, method)
            if lines:
                group.rows.append(_method_row(board, method, lines, looks[method]))
        table.groups.append(group)
    return table


def _method_row(board: Board, method: Method, lines: Sequence[Line], look: Look) -> list[Cell]:
    at = [line.curve.points[line.chosen(board.family)] for line in lines]
    if len(lines) > 1:
        accuracy = _mean_and_deviation([point.accuracy for point in at], 1)
        tpf = _mean_and_deviation([point.tpf for point in at], 2)
    else:
        accuracy, tpf = with_error(at[0].accuracy, at[0].se, 1), with_error(at[0].tpf, at[0].tpf_se, 2)
    return [
        Cell(method.label, look),
        *_cells(_setting(at[0].setting), accuracy, tpf),
        _area(lines),
        *_cells(*(_reached(lines, i) for i in range(len(BELOW))), _seeds([line.seed for line in lines])),
    ]


def _area(lines: Sequence[Line]) -> Cell:
    areas = [line.curve.aup for line in lines if line.curve.aup is not None]
    span = lines[0].curve.aup_interval
    if not areas:
        return Cell("–")
    if len(lines) > 1 or span is None:
        return Cell(_mean_and_deviation(areas, 1))
    return Cell(f"{areas[0]:.1f}", note=f"{span[0]:.1f} to {span[1]:.1f}")


def _reached(lines: Sequence[Line], which: int) -> str:
    """The speed below the base; over seeds their mean, if every seed got there."""
    found = [line.curve.reaches[which] for line in lines if line.curve.reaches]
    if lines[0].method.is_first or not found:
        return "–"
    speeds = [reach.tpf for reach in found if reach.tpf is not None]
    if len(found) == 1 or len(speeds) < len(found):
        return ", ".join(dict.fromkeys(str(reach).replace(">=", "≥") for reach in found))
    return ("≥ " if any(reach.open for reach in found) else "") + _mean_and_deviation(speeds, 2)


def _mean_and_deviation(values: Sequence[float], digits: int) -> str:
    return with_error(sum(values) / len(values), deviation(values), digits)


def _setting(setting: float | None) -> str:
    return "one token" if setting is None else f"{setting:g}"


def _seeds(seeds: Sequence[int | None]) -> str:
    known = [str(seed) for seed in seeds if seed is not None]
    return f"{', '.join(known)} (± s.d.)" if len(known) > 1 else known[0] if known else "–"


def points_table(board: Board, looks: Mapping[Method, Look], smoke: bool) -> Table:
    """Every point of every curve."""
    table = Table(
        f"All points on {board.name}",
        ["method", "setting", "n", "accuracy, %", "TPF", "TPF all", "training seed", "run"],
    )
    for question in board.questions:
        group = Group(_group_title(board, question), [], smoke or is_small(board, question))
        for line in board.of(question):
            for point, folder in zip(line.curve.points, line.runs, strict=True):
                if point.setting is None and not line.method.is_first:
                    continue  # listed once, as its own method
                group.rows.append(
                    [
                        Cell(line.method.label, looks[line.method]),
                        Cell(_setting(point.setting)),
                        Cell(f"{point.n:,}"),
                        Cell(
                            with_error(point.accuracy, point.se, 1),
                            note="not in the area" if point.dropped else "",
                        ),
                        Cell(with_error(point.tpf, point.tpf_se, 2)),
                        Cell(with_error(point.tpf_all, None, 2)),
                        Cell("–" if line.seed is None else str(line.seed)),
                        Cell(folder.name),
                    ]
                )
        table.groups.append(group)
    return table


def pair_tables(board: Board, looks: Mapping[Method, Look], smoke: bool) -> list[Table]:
    """One table per reference; its label is the reference's name."""
    found = []
    for reference in dict.fromkeys(pair.reference for pair in board.pairs):
        pairs = [pair for pair in board.pairs if pair.reference == reference]
        table = Table(
            reference,
            [
                "method",
                "accuracy, points",
                "95 % interval",
                "TPF",
                "95 % interval ",
                "gained / lost",
                "p",
                "80 % power at",
                "seeds",
            ],
        )
        reach = max(
            (abs(end) for pair in pairs for end in pair.difference.accuracy_interval if math.isfinite(end)),
            default=1.0,
        )
        for task in sorted(dict.fromkeys(pair.difference.task for pair in pairs), key=lambda t: t != "all"):
            own = [pair for pair in pairs if pair.difference.task == task]
            small = min(pair.difference.n for pair in own) < SMOKE
            name = "all tasks" if task == "all" else question_title((task, "tad"))
            counts = sorted({pair.difference.n for pair in own})
            title = f"{name}, n = {', '.join(f'{n:,}' for n in counts)}"
            rows = [_pair_row(pair, looks[pair.method], max(reach, 1e-9)) for pair in own]
            table.groups.append(Group(title, rows, smoke or small))
        found.append(table)
    return found


def _pair_row(pair: Pair, look: Look, reach: float) -> list[Cell]:
    one = pair.difference
    low, high = one.accuracy_interval

    def place(value: float) -> float:
        return round(60 + 54 * value / reach, 1)

    at = "" if pair.setting is None else f"at {pair.setting:g}"
    spread = f"s.d. {pair.spread[0]:.2f}" if pair.spread else ""
    spread_tpf = f"s.d. {pair.spread[1]:.2f}" if pair.spread else ""
    known = [str(seed) for seed in pair.seeds if seed is not None]
    return [
        Cell(pair.method.label, look, note=at),
        Cell(signed(one.accuracy), note=spread),
        Cell(f"{signed(low)} to {signed(high)}", span=(place(low), place(one.accuracy), place(high))),
        Cell(signed(one.tpf), note=spread_tpf),
        *_cells(
            f"{signed(one.tpf_interval[0])} to {signed(one.tpf_interval[1])}",
            f"{one.gained} / {one.lost}",
            "–" if math.isnan(one.p_value) else f"{one.p_value:.2g}",
            "–" if math.isnan(one.resolvable) else f"± {one.resolvable:.2f}",
            ", ".join(known) or "–",
        ),
    ]


def signed(value: float, digits: int = 2) -> str:
    """'+1.20', '−0.35', '0.00'."""
    text = f"{value:+.{digits}f}"
    return f"{0:.{digits}f}" if float(text) == 0 else text.replace("-", "−")


# Stores and training runs


def store_table(stores: Sequence[Store]) -> Table | None:
    if not stores:
        return None
    head = ["store", "order", "reference shown", "kept / rollouts", "correct, %", "mean steps", "mean confidence",
            "steps below 0.5", "quality window", "speed window", "seed"]  # fmt: skip
    table = Table("Trajectory stores", head, [Group("", [])])
    for store in stores:
        recipe, summary = store.meta.recipe, store.summary
        correct = 100 * summary.correct / summary.graded if summary.graded else math.nan
        table.groups[0].rows.append(
            _cells(
                store.name,
                str(recipe.get("order", "–")),
                {True: "yes", False: "no"}.get(recipe.get("privileged"), "–"),  # type: ignore[arg-type]
                f"{summary.kept:,} / {summary.attempted:,}",
                with_error(correct, None, 1),
                with_error(summary.mean_length, None, 1),
                with_error(summary.mean_confidence, None, 3),
                "–" if math.isnan(summary.unsure) else f"{100 * summary.unsure:.1f} %",
                _window(store, "quality"),
                _window(store, "speed"),
                str(recipe.get("seed", "–")),
            )
        )
    return table


def _window(store: Store, name: str) -> str:
    window = None if store.window is None else store.window.windows.get(name)
    if window is None:
        return "not measured"
    if math.isnan(window.crossing):
        return f"{window.window} (not reached)"
    return f"{window.window} ({window.low:.1f} to {window.high:.1f})"


def training_table(trainings: Sequence[Training]) -> Table | None:
    if not trainings:
        return None
    head = ["run", "objective", "steps", "batch", "rate", "parameters", "last loss", "held out: first, last",
            "minutes", "seed", "machine", "commit"]  # fmt: skip
    table = Table("Training runs", head, [Group("", [])])
    for run in trainings:
        recipe, facts = run.recipe, run.facts
        steps = [line["step"] for line in run.log if "step" in line]
        done = facts.get("steps") or (max(steps) if steps else 0)
        unfinished = facts.get("finished") is not True
        section = {key: value for key, value in (recipe.get("objective") or {}).items() if key != "name"}
        batch, learning = (
            recipe.get("batch") or {},
            recipe.get("learning") or recipe.get("optimization") or {},
        )
        table.groups[0].rows.append(
            [
                Cell(
                    run.name,
                    note=run.folder.name if run.title is None and run.folder.name != run.name else "",
                ),
                Cell(run.objective, note=", ".join(f"{key} {value}" for key, value in section.items())),
                Cell(f"{done:,}", note="not finished" if unfinished else ""),
                *_cells(
                    str(batch.get("size", "–")),
                    str(learning.get("lr", "–")),
                    _count(facts.get("trained_parameters")),
                    _last_loss(run),
                    _held_out(run),
                    str(facts.get("minutes", "–")),
                    "–" if run.seed is None else str(run.seed),
                    run.origin.device or "–",
                    _commit(run.origin),
                ),
            ]
        )
    return table


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _last_loss(run: Training) -> str:
    """The mean over the last twentieth of the run, as the thick line ends."""
    losses = [line["loss"] for line in run.log if line.get("loss") is not None]
    tail = losses[-max(1, len(losses) // 20) :]
    return f"{sum(tail) / len(tail):.4g}" if tail else "–"


def _held_out(run: Training) -> str:
    values = [line["held_out_loss"] for line in run.log if line.get("held_out_loss") is not None]
    return f"{values[0]:.4g}, {values[-1]:.4g}" if values else "–"


# Sources


def source_table(found: Gathered, studies: Sequence[StudyPart] = ()) -> Table:
    """Where every number is from; the runs of one directory, or of one study, that agree in all of this are one row."""
    head = ["directory", "holds", "n", "seed", "machine", "commit", "tad", "made"]
    table = Table("Sources", head, [Group("", [])])
    merged: dict[tuple[str, ...], list[str]] = {}
    placed = [(_shown(run.folder.parent), run) for run in found.runs]
    placed += [(Path(study.name, "answers"), run) for study in studies for run in study.runs]
    for folder_of, run in placed:
        *made, when = _made(run.origin)
        key = (str(folder_of), f"{run.meta.planned:,}", str(run.meta.seed), *made)
        merged.setdefault(key, []).append(when)
    rows = []
    for (folder, *rest), times in merged.items():
        holds = f"{len(times)} evaluation {'run' if len(times) == 1 else 'runs'}"
        rows.append(_cells(folder, holds, *rest, max(times)))
    for store in found.stores:
        rows.append(
            _cells(
                _place(store.folder, store.name, studies), "trajectories", f"{store.summary.kept:,}",
                str(store.meta.recipe.get("seed", "–")), "–", "–", store.meta.code or "–", "–",
            )
        )  # fmt: skip
    for training in found.trainings:
        states = training.facts.get("trajectories")
        rows.append(
            _cells(
                _place(training.folder, training.name, studies), "training", "–" if states is None else f"{states:,}",
                "–" if training.seed is None else str(training.seed), *_made(training.origin),
            )
        )  # fmt: skip
    table.groups[0].rows = rows
    return table


def _place(folder: Path, name: str, studies: Sequence[StudyPart]) -> str:
    """Where a store or a training run is; what a study made goes by the name it has there."""
    owner = next((study for study in studies if study.folder in folder.parents), None)
    return str(_shown(folder)) if owner is None else f"{owner.name}: {name.removesuffix(f', {owner.name}')}"


def _shown(path: Path) -> Path:
    """The last three parts: enough to find it, and no one's home directory."""
    return Path(*path.parts[-3:])


def _made(origin: Origin) -> tuple[str, str, str, str]:
    when = (origin.time or "–").replace("T", " ").removesuffix("Z")
    return (origin.device or "–", _commit(origin), origin.version or "–", when)


def _commit(origin: Origin) -> str:
    """Ten digits, and the + of a changed tree."""
    return "–" if not origin.commit else origin.commit[:10] + ("+" if origin.commit.endswith("+") else "")
