"""Results as text: for a terminal, as Markdown and as CSV. Decides nothing and computes nothing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tad.evaluation.analysis import MEAN, POOLED, CurvePoint, ResultRow, ResultTable, ScopeResult
from tad.evaluation.sweep import FIRST
from tad.evaluation.throughput import Speed
from tad.files import create_folder, write_json, write_whole

_COLUMNS = ("n", "accuracy %", "TPF", "TPF all", "forwards", "tokens/s")


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns of a table whose first row is the header; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def with_error(value: float | None, error: float | None, digits: int) -> str:
    """'71.2 ± 1.3'; a dash for what was not measured."""
    if value is None or math.isnan(value):
        return "-"
    if error is None or math.isnan(error):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def show_summary(summary: dict[str, Any], levels: bool = False) -> str:
    """A run: a line per task and template, per level if asked, and over all tasks."""
    rows: list[tuple[str, ...]] = [("task", *_COLUMNS)]
    for task, by_template in summary["tasks"].items():
        for template, found in by_template.items():
            rows.append((task if template == "tad" else f"{task} ({template})", *_cells(found)))
            if levels:
                rows += [(f"  level {level}", *_cells(entry)) for level, entry in found["levels"].items()]
    if len(summary["tasks"]) > 1:
        for template, found in summary["overall"].items():
            named = "" if template == "tad" else f" ({template})"
            mean = found["mean_of_tasks"]
            if mean["tasks"] < len(summary["tasks"]):  # a template that some tasks do not have
                continue
            rows.append((f"all examples{named}", *_cells(found)))
            error = with_error(mean["accuracy"], mean["se"], 1)
            rows.append(
                (
                    f"mean of {mean['tasks']} tasks{named}",
                    "",
                    error,
                    with_error(mean["tpf"], None, 2),
                    "",
                    "",
                    "",
                )
            )
    lines = [align(rows)]
    for task, spread in summary.get("spread", {}).items():
        accuracy, tpf = with_error(spread["accuracy"], None, 1), with_error(spread["tpf"], None, 2)
        lines.append(
            f"{task}: over {spread['templates']} templates accuracy moves by {accuracy} points and TPF by {tpf}; "
            f"best with '{spread['best']}'"
        )
    unfit = sum(found["unfit"] for entry in summary["tasks"].values() for found in entry.values())
    if unfit:
        lines.append(f"{unfit} prompts did not fit the model's context and count as wrong")
    if not summary["complete"]:
        lines.append("not complete: run the same command again to continue")
    return "\n".join(lines)


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    accuracy = with_error(found["accuracy"], found["se"], 1) if found["graded"] else "not graded"
    if 0 < found["graded"] < found["n"]:
        accuracy += f" ({found['graded']} graded)"
    rate = found["tokens_per_second"]
    return (
        f"{found['n']}",
        accuracy,
        with_error(found["tpf"], found["tpf_se"], 2),
        with_error(found["tpf_all"], None, 2),
        f"{found['forwards']}",
        "-" if rate is None or math.isnan(rate) else f"{rate:.0f}",
    )


# Tables of methods


def columns(table: ResultTable) -> list[str]:
    baseline = [f"x {title_of(table, table.baseline)}"] if table.baseline else []
    at = f"TPF at {'base' if table.base else 'own'} - {table.tolerance:g}"
    return ["method", "seeds", "one token %", "setting", "accuracy %", "to base", "TPF", at, *baseline, "AUP"]


def cells(table: ResultTable, row: ResultRow, scope: str) -> list[str]:
    """One line of a table, as text."""
    seeds = describe_seeds(row)
    if scope not in row.scopes:
        return [row.title, seeds, row.state, *[""] * (len(columns(table)) - 3)]
    found = row.scopes[scope]
    baseline = (
        [found.times_baseline.with_interval(2) if found.times_baseline else "-"] if table.baseline else []
    )
    return [
        row.title,
        seeds,
        found.first.text(1) if found.first else "-",
        describe_setting(found.setting),
        found.accuracy.text(1),
        found.to_base.accuracy.with_interval(1, "+") if found.to_base else "-",
        found.tpf.text(2),
        at_target(found),
        *baseline,
        found.aup.text(1) if found.aup else "-",
    ]


def title_of(table: ResultTable, method: str | None) -> str:
    """What a method is called in a table."""
    return next((row.title for row in table.rows if row.method == method), method or "")


def describe_seeds(row: ResultRow) -> str:
    """How many training seeds there are, of those planned; a dash where nothing is trained."""
    if not row.scopes and not row.seeds:
        return "0" if row.planned_seeds else "-"
    known = sum(seed is not None for seed in row.seeds)
    if not known:
        return "-"
    return f"{known}" if known >= row.planned_seeds else f"{known} of {row.planned_seeds}"


def describe_setting(name: str) -> str:
    """What a run's name says of its decoder: 'tad,threshold=0.5' as 'threshold 0.5'."""
    _, _, rest = name.partition(",")
    if name.startswith(FIRST):
        return "one token"
    return rest.replace("=", " ").replace(",", ", ") or "as published"


def at_target(found: ScopeResult) -> str:
    if found.tpf_at_target is None:
        return "-"
    low, high = found.tpf_at_target_interval
    return f"{found.tpf_at_target}" + ("" if found.tpf_at_target.tpf is None else f" [{low:.2f}, {high:.2f}]")


def show_table(table: ResultTable) -> str:
    """For a terminal: the verdicts, the methods, and what the numbers are."""
    rows = [columns(table), *(cells(table, row, table.scope) for row in table.rows)]
    return "\n".join([*list_verdicts(table), align(rows), "", *explain(table)])


def as_markdown(table: ResultTable) -> str:
    """The table with a heading and the words needed to read it."""
    head = columns(table)
    lines = [f"### {table.title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(cells(table, row, table.scope))} |" for row in table.rows]
    return "\n".join([*lines, "", *explain(table)]) + "\n"


def rank_rows(table: ResultTable) -> list[ResultRow]:
    """The students, the fastest at the target accuracy first; without students, the base's decoders."""
    rows = [row for row in table.rows if table.scope in row.scopes and row.method != table.base]
    rows = [row for row in rows if row.trained] or rows

    def speed(row: ResultRow) -> tuple[float, float]:
        found = row.scopes[table.scope]
        return (found.tpf_at_target.tpf or 0.0) if found.tpf_at_target else 0.0, found.accuracy.value

    return sorted(rows, key=speed, reverse=True)


def list_verdicts(table: ResultTable, most: int = 3) -> list[str]:
    """What came out, in a sentence for each student: how many fewer forwards, and at what cost."""
    found = [(row.title, row.scopes[table.scope]) for row in rank_rows(table)]
    shown = [(title, one) for title, one in found if one.to_base and not one.setting.startswith(FIRST)]
    return [f"{title}: {verdict(one)}" for title, one in shown[:most]]


def verdict(found: ScopeResult) -> str:
    """'9.2x fewer forwards at -2.1 [-14.6, +12.5] points, n = 48'."""
    assert found.to_base is not None
    times = found.to_base.speedup.value
    word = "fewer" if times >= 1 else "as many"
    return f"{times:.1f}x {word} forwards at {found.to_base.accuracy.with_interval(1, '+')} points, n = {found.n}"


def explain(table: ResultTable) -> list[str]:
    """What the numbers are."""
    if not table.tasks:
        return ["No numbers: no verdicts yet." if table.ungraded else "No numbers: nothing has been run yet."]
    tasks = ", ".join(f"{task} {n}" for task, n in table.tasks.items())
    several = len(table.tasks) > 1
    lines = [
        f"n = {sum(table.tasks.values())} problems ({tasks}){', the mean over tasks' if several else ''}. ±: standard error "
        "over problems, or Wilson's 95 % interval where nearly all or nearly none are right; sd: over training seeds. Other "
        "brackets: 95 % bootstrap intervals over problems, seeds averaged, paired."
    ]
    if table.base is not None:
        lines.append(
            f"*to base*: accuracy less that of {title_of(table, table.base)} (one token per forward). *TPF at base - "
            f"{table.tolerance:g}*: the highest tokens per forward at which the curve over thresholds is at "
            f"{table.targets[table.scope]:.1f} %; >=: the fastest setting still is."
        )
    else:
        lines.append(
            "There is no run of the base one token at a time: each method is held to its own such run."
        )
    tops = ", ".join(f"{task} {top:.1f}" for task, top in table.y_max.items())
    source = "given" if table.y_max_given else "the highest accuracy of all methods"
    lines.append(f"AUP: {'mean over tasks, ' if several else ''}y_max {tops} ({source}).")
    if table.ungraded:
        lines.append(f"Not graded yet, and not in the numbers: {', '.join(table.ungraded)}.")
    return lines + ([table.note] if table.note else [])


def show_points(table: ResultTable) -> str:
    """Every scope: the methods with AUP and the speed at the target accuracy, and all their points."""
    parts = [f"{table.title}: target accuracy is {_target(table)}"]
    for scope in table.scopes:
        rows = [row for row in table.rows if scope in row.scopes]
        n = sum(table.tasks.values()) if scope in (MEAN, POOLED) else table.tasks[scope]
        top = f", y_max = {table.y_max[scope]:.2f}" if scope in table.y_max else ""
        parts += ["", f"{scope}, n = {n}{top}"]
        lines = [("method", "AUP", "95 % interval", columns(table)[7])]
        for row in rows:
            found = row.scopes[scope]
            lines.append((row.title, *_area(found, scope), at_target(found)))
        parts += [align(lines), "", _points(rows, scope)]
    if table.y_max_given:
        parts.append("y_max as given")
    return "\n".join(parts).rstrip()


def _target(table: ResultTable) -> str:
    if table.base is None:
        return f"each method's own, one token at a time, less {table.tolerance:g} points"
    return f"that of {title_of(table, table.base)} less {table.tolerance:g} points"


def _area(found: ScopeResult, scope: str) -> tuple[str, str]:
    if found.aup is None:
        return ("-", "") if scope == POOLED or found.first is None else ("undefined", "no answer is right")
    low, high = found.aup.interval or (math.nan, math.nan)
    return f"{found.aup.value:.1f}", f"{low:.1f} to {high:.1f}"


def _points(rows: Sequence[ResultRow], scope: str) -> str:
    """Three lines a method: settings, tokens per forward, accuracy."""
    width = max(len(row.scopes[scope].points) for row in rows)
    lines: list[tuple[str, ...]] = [("points", *("" for _ in range(width)))]
    for row in rows:
        points = row.scopes[scope].points
        empty = [""] * (width - len(points))
        lines.append((row.title, *(_at(point) for point in points), *empty))
        lines.append(("  TPF", *(f"{point.tpf.value:.2f}" for point in points), *empty))
        lines.append(
            (
                "  accuracy %",
                *(point.accuracy.text(1) + (" x" if point.dropped else "") for point in points),
                *empty,
            )
        )
    note = "x: more than 5 below the one-token run, or slower than it: not in the area"
    dropped = any(point.dropped for row in rows for point in row.scopes[scope].points)
    return align(lines) + (f"\n{note}" if dropped else "")


def _at(point: CurvePoint) -> str:
    return "one token" if point.value is None else f"{point.value:g}"


def show_comparison(table: ResultTable, notes: Sequence[str] = ()) -> str:
    """Runs on the problems they share, then each against the first."""
    parts = [f"note: {note}" for note in notes]
    for scope in table.scopes:
        rows: list[tuple[str, ...]] = [(scope, "n", "accuracy %", "TPF", "TPF all", "forwards", "tokens/s")]
        for row in table.rows:
            found = row.scopes[scope]
            point = found.points[0]
            rate = point.tokens_per_second
            rows.append(
                (
                    row.title,
                    f"{found.n}",
                    point.accuracy.text(1),
                    point.tpf.text(2),
                    f"{point.tpf_all:.2f}",
                    f"{point.forwards:.1f}",
                    f"{rate:.0f}" if math.isfinite(rate) else "-",
                )
            )
        parts += [align(rows), ""]
    parts.append(
        f"against {table.rows[0].title}, paired on the same problems (95 % bootstrap; McNemar exact):"
    )
    lines = [("run", "scope", "n", "accuracy", "gained/lost", "p", "80 % power at", "TPF", "fewer forwards")]
    for scope in table.scopes:
        for row in table.rows[1:]:
            one = row.scopes[scope].to_base
            assert one is not None
            p = "-" if one.p_value is None else f"{one.p_value:.2g}"
            effect = one.minimum_detectable_effect
            lines.append(
                (
                    row.title,
                    scope,
                    f"{one.n}",
                    one.accuracy.with_interval(2, "+"),
                    f"{one.gained}/{one.lost}",
                    p,
                    "-" if effect is None else f"± {effect:.2f}",
                    one.tpf.with_interval(2, "+"),
                    one.speedup.with_interval(2),
                )
            )
    return "\n".join([*parts, align(lines)])


def as_csv(table: ResultTable) -> str:
    """A line per method, scope and setting."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = [f"{name}{part}" for name in ("accuracy", "tpf") for part in ("", "_se", "_sd")]
    writer.writerow(["table", "method", "state", "seeds", "scope", "setting", "default", *names])
    for row in table.rows:
        if not row.scopes:
            writer.writerow([table.name, row.method, row.state, len(row.seeds)] + [""] * 9)
        for scope, found in row.scopes.items():
            for point in found.points:
                values = [
                    value for one in (point.accuracy, point.tpf) for value in (one.value, one.se, one.sd)
                ]
                default = int(point.setting == found.setting)
                writer.writerow(
                    [
                        table.name,
                        row.method,
                        row.state,
                        len(row.seeds),
                        scope,
                        point.setting,
                        default,
                        *values,
                    ]
                )
    return file.getvalue()


def write_table(table: ResultTable, folder: Path) -> None:
    """NAME.md, NAME.csv and NAME.json."""
    create_folder(folder)
    write_whole(folder / f"{table.name}.md", as_markdown(table))
    write_whole(folder / f"{table.name}.csv", as_csv(table))
    write_json(folder / f"{table.name}.json", asdict(table))


# Speeds


def show_speeds(speeds: Sequence[Speed]) -> str:
    """A line per batch size."""
    rows = [
        ("batch", "rows", "tokens/s", "middle half of batches", "tokens/s all", "TPF", "TPF all", "ms per call", "peak GiB")
    ]  # fmt: skip
    for speed in speeds:
        rows.append(
            (
                f"{speed.batch}",
                f"{speed.rows}",
                f"{speed.tokens_per_second:.1f}",
                f"{speed.spread[0]:.1f} to {speed.spread[1]:.1f}",
                f"{speed.tokens_all_per_second:.1f}",
                f"{speed.tpf:.2f}",
                f"{speed.tpf_all:.2f}",
                f"{speed.milliseconds_per_call:.2f}",
                "-" if speed.memory is None else f"{speed.memory / 2**30:.2f}",
            )
        )
    return align(rows)
