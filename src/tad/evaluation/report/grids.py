"""The tables of the page. Cells are text, with a swatch, a note or a drawn interval beside it; the template makes the HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tad.evaluation.analysis import MEAN, POOLED, Estimate, PairedDifference, ResultRow, ResultTable
from tad.evaluation.report.charts import Style
from tad.evaluation.report.gather import Gathered, Origin, StoreData, TrainingData, Tuning, shorten
from tad.evaluation.tables import describe_seeds, describe_setting, title_of, with_error

SMOKE = 200  # problems of a task; below this a number is marked


@dataclass(frozen=True)
class GridCell:
    """`span`: low, value and high of an interval, as x in a drawing 120 wide with zero in its middle."""

    text: str
    style: Style | None = None
    note: str = ""
    span: tuple[float, ...] | None = None


@dataclass
class GridGroup:
    title: str
    rows: list[list[GridCell]]
    smoke: bool = False


@dataclass
class Grid:
    label: str
    head: list[str]
    groups: list[GridGroup] = field(default_factory=list)
    stacked: bool = False  # notes below their numbers, not beside them


def _cells(*texts: str) -> list[GridCell]:
    return [GridCell("–" if text == "-" else text) for text in texts]


def is_small(table: ResultTable, scope: str) -> bool:
    """Whether a scope rests on fewer problems than numbers should."""
    counts = table.tasks.values() if scope in (MEAN, POOLED) else [table.tasks[scope]]
    return min(counts, default=0) < SMOKE


# Results


def grid_results(table: ResultTable, scopes: Sequence[str], styles: Mapping[str, Style], smoke: bool) -> Grid:
    """Every method that has numbers at its default setting, in each of the scopes."""
    baseline = [f"× {title_of(table, table.baseline)}"] if table.baseline else []
    at = f"TPF at {'base' if table.base else 'own'} − {table.tolerance:g}"
    head = ["method", "TPF", "accuracy, %", "to base", at, *baseline, "AUP", "one token, %", "seeds"]
    grid = Grid(f"Methods of {table.title}", head, stacked=True)
    for scope in scopes:
        rows = [_result_row(table, row, scope, styles) for row in table.rows if scope in row.scopes]
        grid.groups.append(_group(table, scope, rows, smoke))
    return grid


def _group(table: ResultTable, scope: str, rows: list[list[GridCell]], smoke: bool) -> GridGroup:
    every = ", ".join(f"{shorten(task)} {n:,}" for task, n in table.tasks.items())
    n = sum(table.tasks.values()) if scope in (MEAN, POOLED) else table.tasks[scope]
    what = f": {every}" if scope in (MEAN, POOLED) else ""
    return GridGroup(f"{shorten(scope)}, n = {n:,}{what}", rows, smoke or is_small(table, scope))


def _result_row(
    table: ResultTable, row: ResultRow, scope: str, styles: Mapping[str, Style]
) -> list[GridCell]:
    found = row.scopes[scope]
    low, high = found.tpf_at_target_interval
    reached = found.tpf_at_target
    return [
        GridCell(row.title, styles[row.title], note=describe_setting(found.setting)),
        _estimate(found.tpf, 2),
        _estimate(found.accuracy, 1),
        _interval(found.to_base.accuracy if found.to_base else None, 1, signed),
        GridCell(
            "–" if reached is None else str(reached).replace(">=", "≥"),
            note="" if reached is None or reached.tpf is None else f"{low:.2f} to {high:.2f}",
        ),
        *([_interval(found.times_baseline, 2)] if table.baseline else []),
        _area(found.aup),
        _estimate(found.first, 1),
        *_cells(describe_seeds(row)),
    ]


def _estimate(one: Estimate | None, digits: int) -> GridCell:
    """The spread over training seeds, else the standard error over problems; the interval where that misleads."""
    if one is None or math.isnan(one.value):
        return GridCell("–")
    value = f"{one.value:.{digits}f}"
    if one.sd is not None:
        return GridCell(value, note=f"sd {one.sd:.{digits}f}")
    if one.few and one.interval is not None:
        return _interval(one, digits)
    return GridCell(value, note="" if one.se is None or math.isnan(one.se) else f"± {one.se:.{digits}f}")


def _interval(one: Estimate | None, digits: int, show: Any = None) -> GridCell:
    if one is None:
        return GridCell("–")
    show = show or (lambda value, digits: f"{value:.{digits}f}")
    low, high = one.interval or (math.nan, math.nan)
    return GridCell(
        show(one.value, digits),
        note="" if math.isnan(low) else f"{show(low, digits)} to {show(high, digits)}",
    )


def _area(one: Estimate | None) -> GridCell:
    if one is None:
        return GridCell("–")
    low, high = one.interval or (math.nan, math.nan)
    spread = "" if one.sd is None else f"; sd {one.sd:.1f}"
    return GridCell(f"{one.value:.1f}", note=f"{low:.0f} to {high:.0f}{spread}")


def grid_points(table: ResultTable, styles: Mapping[str, Style], smoke: bool) -> Grid:
    """Every point of every method, in every scope."""
    head = ["method", "setting", "TPF", "accuracy, %", "TPF all", "forwards per problem", "tokens/s", "seeds"]
    grid = Grid(f"All points of {table.title}", head)
    for scope in table.scopes:
        rows = []
        for row in (row for row in table.rows if scope in row.scopes):
            for point in row.scopes[scope].points:
                accuracy = _estimate(point.accuracy, 1)
                rate = point.tokens_per_second
                note = f"{accuracy.note}, not in the area" if point.dropped else accuracy.note
                rows.append(
                    [
                        GridCell(row.title, styles[row.title]),
                        GridCell(describe_setting(point.setting)),
                        _estimate(point.tpf, 2),
                        GridCell(accuracy.text, note=note),
                        *_cells(
                            with_error(point.tpf_all, None, 2),
                            f"{point.forwards:.1f}",
                            f"{rate:,.0f}" if math.isfinite(rate) else "-",
                            describe_seeds(row),
                        ),
                    ]
                )
        grid.groups.append(_group(table, scope, rows, smoke))
    return grid


def grid_pairs(
    table: ResultTable, styles: Mapping[str, Style], smoke: bool, baseline: bool = False
) -> Grid | None:
    """Every method against the base one token at a time, or against the baseline at its default setting."""
    reference = table.baseline if baseline else table.base
    head = [
        "method", "accuracy, points", "95 % interval", "TPF", "95 % interval ", "fewer forwards", "gained / lost", "p",
        "80 % power at", "seeds",
    ]  # fmt: skip
    grid = Grid(
        f"against {title_of(table, reference) if reference else 'their own run one token at a time'}", head
    )
    for scope in table.scopes:
        pairs = [
            (row, row.scopes[scope].setting, pair)
            for row in table.rows
            if scope in row.scopes and row.method != reference
            if (pair := row.scopes[scope].to_baseline if baseline else row.scopes[scope].to_base) is not None
        ]
        ends = [
            abs(end) for _, _, pair in pairs for end in pair.accuracy.interval or () if math.isfinite(end)
        ]
        rows = [_pair_row(*entry, styles, max([*ends, 1e-9])) for entry in pairs]
        if rows:
            grid.groups.append(_group(table, scope, rows, smoke))
    return grid if grid.groups else None


def _pair_row(
    row: ResultRow, setting: str, pair: PairedDifference, styles: Mapping[str, Style], longest: float
) -> list[GridCell]:
    low, high = pair.accuracy.interval or (math.nan, math.nan)
    span = tuple(round(60 + 54 * value / longest, 1) for value in (low, pair.accuracy.value, high))

    def spread(one: Estimate) -> str:
        return "" if one.sd is None else f"sd {one.sd:.2f}"

    return [
        GridCell(row.title, styles[row.title], note=describe_setting(setting)),
        GridCell(signed(pair.accuracy.value), note=spread(pair.accuracy)),
        GridCell(f"{signed(low)} to {signed(high)}", span=span),
        GridCell(signed(pair.tpf.value), note=spread(pair.tpf)),
        GridCell(" to ".join(signed(end) for end in pair.tpf.interval or ())),
        _interval(pair.speedup, 2, lambda value, digits: f"{value:.{digits}f}×"),
        *_cells(
            f"{pair.gained} / {pair.lost}",
            "-" if pair.p_value is None else f"{pair.p_value:.2g}",
            "-" if pair.minimum_detectable_effect is None else f"± {pair.minimum_detectable_effect:.2f}",
            describe_seeds(row),
        ),
    ]


def signed(value: float, digits: int = 2) -> str:
    """'+1.20', '−0.35', '0.00'."""
    text = f"{value:+.{digits}f}"
    return f"{0:.{digits}f}" if float(text) == 0 else text.replace("-", "−")


def grid_trials(tuning: Tuning, name: str) -> Grid | None:
    """Every trial that has been run."""
    head = ["method", "trial", "changes", "best accuracy, %", f"TPF at base − {tuning.tolerance:g}", "chosen"]
    rows = []
    for title, trial in tuning.trials:
        if trial.accuracy is not None:
            speed = "not reached" if trial.tpf is None else f"{trial.tpf:.2f}"
            chosen = "yes" if trial.chosen else ""
            changes = ", ".join(f"{key} {value}" for key, value in _flat(trial.changes, "")) or "none"
            rows.append(_cells(title, str(trial.number), changes, f"{trial.accuracy:.1f}", speed, chosen))
    return Grid(f"Trials of {name}", head, [GridGroup("", rows)]) if rows else None


def _flat(values: Mapping[str, Any], above: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{above}{key}.")
        else:
            found.append((f"{above}{key}", value if isinstance(value, str) else json.dumps(value)))
    return found


# Stores and training runs


def grid_stores(stores: Sequence[StoreData]) -> Grid | None:
    if not stores:
        return None
    head = ["store", "order", "reference shown", "kept / rollouts", "correct, %", "mean steps", "mean confidence",
            "steps below 0.5", "quality window", "speed window", "seed"]  # fmt: skip
    rows = []
    for store in stores:
        recipe, summary = store.meta.recipe, store.summary
        correct = 100 * summary.correct / summary.graded if summary.graded else math.nan
        rows.append(
            _cells(
                store.name,
                str(recipe.get("order", "-")),
                {True: "yes", False: "no"}.get(recipe.get("privileged"), "-"),  # type: ignore[arg-type]
                f"{summary.kept:,} / {summary.attempted:,}",
                with_error(correct, None, 1),
                with_error(summary.mean_length, None, 1),
                with_error(summary.mean_confidence, None, 3),
                "-" if math.isnan(summary.unsure) else f"{100 * summary.unsure:.1f} %",
                _window(store, "quality"),
                _window(store, "speed"),
                str(recipe.get("seed", "-")),
            )
        )
    return Grid("Trajectory stores", head, [GridGroup("", rows)])


def _window(store: StoreData, name: str) -> str:
    window = None if store.window is None else store.window.windows.get(name)
    if window is None:
        return "not measured"
    if math.isnan(window.crossing):
        return f"{window.window} (not reached)"
    return f"{window.window} ({window.low:.1f} to {window.high:.1f})"


def grid_trainings(trainings: Sequence[TrainingData]) -> Grid | None:
    if not trainings:
        return None
    head = ["run", "objective", "steps", "batch", "rate", "parameters", "last loss", "held out: first, last",
            "minutes", "seed", "machine", "commit"]  # fmt: skip
    rows = []
    for run in trainings:
        recipe, facts = run.recipe, run.facts
        steps = [line["step"] for line in run.log if "step" in line]
        done = facts.get("steps") or (max(steps) if steps else 0)
        section = {key: value for key, value in (recipe.get("objective") or {}).items() if key != "name"}
        learning = recipe.get("learning") or recipe.get("optimization") or {}
        losses, held_out = (
            [line[key] for line in run.log if line.get(key) is not None] for key in ("loss", "held_out_loss")
        )
        tail = losses[-max(1, len(losses) // 20) :]  # as the thick line ends
        trained = facts.get("trained_parameters")
        rows.append(
            [
                GridCell(run.name),
                GridCell(run.objective, note=", ".join(f"{key} {value}" for key, value in section.items())),
                GridCell(f"{done:,}", note="" if facts.get("finished") is True else "not finished"),
                *_cells(
                    str((recipe.get("batch") or {}).get("size", "-")),
                    str(learning.get("lr", "-")),
                    f"{trained:,}" if isinstance(trained, int) else "-",
                    f"{sum(tail) / len(tail):.4g}" if tail else "-",
                    f"{held_out[0]:.4g}, {held_out[-1]:.4g}" if held_out else "-",
                    str(facts.get("minutes", "-")),
                    "-" if run.seed is None else str(run.seed),
                    run.origin.device or "-",
                    _commit(run.origin),
                ),
            ]
        )
    return Grid("Training runs", head, [GridGroup("", rows)])


def grid_sources(found: Gathered) -> Grid:
    """Where every number is from; the runs of one directory that agree in all of this are one row."""
    head = ["directory", "holds", "n", "seed", "machine", "commit", "tad", "made"]
    merged: dict[tuple[str, ...], list[str]] = {}
    for part in found.parts:
        for run in part.runs:
            folder = _shown(run.folder.parent) if part.group is not None else str(Path(part.name, "answers"))
            *made, when = _made(run.origin)
            key = (folder, f"{run.meta.planned:,}", str(run.meta.seed), *made)
            merged.setdefault(key, []).append(when)
    rows = []
    for (folder, *rest), times in merged.items():
        holds = f"{len(times)} evaluation {'run' if len(times) == 1 else 'runs'}"
        rows.append(_cells(folder, holds, *rest, max(times)))
    for store in found.stores:
        seed, code = str(store.meta.recipe.get("seed", "-")), store.meta.code or "-"
        kept = f"{store.summary.kept:,}"
        rows.append(
            _cells(store.place or _shown(store.folder), "trajectories", kept, seed, "-", "-", code, "-")
        )
    for training in found.trainings:
        count = training.facts.get("trajectories")
        trained = "-" if count is None else f"{count:,}"
        seed = "-" if training.seed is None else str(training.seed)
        rows.append(
            _cells(
                training.place or _shown(training.folder), "training", trained, seed, *_made(training.origin)
            )
        )
    return Grid("Sources", head, [GridGroup("", rows)])


def _shown(path: Path) -> str:
    """The last three parts: enough to find it, and no one's home directory."""
    return str(Path(*path.parts[-3:]))


def _made(origin: Origin) -> tuple[str, str, str, str]:
    when = (origin.time or "-").replace("T", " ").removesuffix("Z")
    return (origin.device or "-", _commit(origin), origin.version or "-", when)


def _commit(origin: Origin) -> str:
    """Ten digits, and the + of a changed tree."""
    return "-" if not origin.commit else origin.commit[:10] + ("+" if origin.commit.endswith("+") else "")
