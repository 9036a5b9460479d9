"""Results as text: for a terminal, as Markdown and as CSV. Decides nothing and computes nothing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tad.evaluation.analysis import MEAN, POOLED, SPEEDS, Estimate, ResultRow, ResultTable
from tad.evaluation.measurement import FEW
from tad.evaluation.sweep import FIRST
from tad.evaluation.verdict import list_verdicts
from tad.files import create_folder, write_json, write_whole

SMALL = 200  # problems of a task; a number on fewer is marked on the page
_COLUMNS = ("n", "accuracy %", "TPF", "with the filler", "forwards", "tokens/s")


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
    for task, by_template in summary["tasks"].items():
        for template, found in by_template.items():
            if (drafts := found.get("drafts")) is not None:
                kept = with_error(drafts["kept_per_cycle"], drafts["kept_per_cycle_se"], 2)
                curve = " ".join(f"{100 * share:.0f}" for share in drafts["acceptance"])
                named = task if template == "tad" else f"{task} ({template})"
                lines.append(
                    f"{named}: {kept} tokens kept per cycle; kept up to each position of a draft, in %: {curve}"
                )
    unjudged = sum(
        found.get("cannot_judge", 0) for entry in summary["tasks"].values() for found in entry.values()
    )
    if unjudged:
        lines.append(f"{unjudged} answers cannot be judged by their tests and count as wrong")
    unfit = sum(found["unfit"] for entry in summary["tasks"].values() for found in entry.values())
    if unfit:
        lines.append(f"{unfit} prompts did not fit the model's context and count as wrong")
    if not summary["complete"]:
        lines.append("not complete: run the same command again to continue")
    return "\n".join(lines)


def _accuracy(found: dict[str, Any]) -> str:
    """With its standard error, or with Wilson's interval where nearly all or nearly none are right."""
    if not found["graded"]:
        return "not graded"
    if min(found["correct"], found["graded"] - found["correct"]) >= FEW:
        return with_error(found["accuracy"], found["se"], 1)
    low, high = found["interval"]
    return f"{found['accuracy']:.1f} [{low:.1f}, {high:.1f}]"


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    accuracy = _accuracy(found)
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


# Tables of methods: one model of a table, shown as text, as Markdown, and by the report as HTML


@dataclass(frozen=True)
class GridCell:
    """`note` stands beside the text, or below it. `method`: whose row it begins."""

    text: str
    note: str = ""
    method: str | None = None

    def __str__(self) -> str:
        if not self.note:
            return self.text
        return f"{self.text} ({self.note})" if self.method else f"{self.text} {self.note}"


@dataclass
class GridGroup:
    title: str
    rows: list[list[GridCell]]
    small: bool = False  # rests on fewer problems than numbers should


@dataclass
class Grid:
    label: str
    head: list[str]
    groups: list[GridGroup] = field(default_factory=list)

    def show(self) -> str:
        """For a terminal."""
        parts = []
        for group in self.groups:
            lines = [self.head, *([str(cell) for cell in row] for row in group.rows)]
            parts += [*([group.title] if group.title else []), align(lines), ""]
        return "\n".join(parts).rstrip()

    def markdown(self) -> str:
        rows = [[str(cell) for cell in row] for group in self.groups for row in group.rows]
        lines = [self.head, ["---"] * len(self.head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(*texts: str) -> list[GridCell]:
    return [GridCell(text) for text in texts]


def is_small(table: ResultTable, scope: str) -> bool:
    counts = table.tasks.values() if scope in (MEAN, POOLED) else [table.tasks[scope]]
    return min(counts, default=0) < SMALL


def _group(table: ResultTable, scope: str, rows: list[list[GridCell]]) -> GridGroup:
    every = ", ".join(f"{shorten(task)} {n:,}" for task, n in table.tasks.items())
    n = sum(table.tasks.values()) if scope in (MEAN, POOLED) else table.tasks[scope]
    what = f": {every}" if scope in (MEAN, POOLED) else ""
    return GridGroup(f"{shorten(scope)}, n = {n:,}{what}", rows, is_small(table, scope))


def grid_results(table: ResultTable, scopes: Sequence[str], missing: bool = False) -> Grid:
    """Every method at its default setting, in each of the scopes; with `missing`, those without numbers too."""
    baseline = [f"x {title_of(table, table.baseline)}"] if table.baseline else []
    at = f"TPF at {'base' if table.base else 'own'} - {table.tolerance:g}"
    head = ["method", "TPF", "accuracy %", "to base", at, *baseline, "AUP", "one token %", "seeds"]
    grid = Grid(f"Methods of {table.title}", head)
    for scope in scopes if table.tasks else [""]:
        rows = []
        for row in table.rows:
            if scope in row.scopes:
                rows.append(_result_row(table, row, scope))
            elif missing:
                blank = [""] * (len(head) - 3)
                rows.append(
                    [GridCell(row.title, method=row.title), *cells(row.state, *blank, describe_seeds(row))]
                )
        grid.groups.append(_group(table, scope, rows) if scope else GridGroup("", rows))
    return grid


def _result_row(table: ResultTable, row: ResultRow, scope: str) -> list[GridCell]:
    found = row.scopes[scope]
    at, (low, high) = found.tpf_at_target, found.tpf_at_target_interval
    return [
        GridCell(row.title, describe_setting(found.setting), row.title),
        _cell(found.tpf, 2),
        _cell(found.accuracy, 1),
        _cell(found.to_base.accuracy if found.to_base else None, 1, "+", interval=True),
        GridCell("-")
        if at is None
        else GridCell(str(at), "" if at.tpf is None else f"[{low:.2f}, {high:.2f}]"),
        *([_cell(found.times_baseline, 2, interval=True)] if table.baseline else []),
        _cell(found.aup, 1, interval=True),
        _cell(found.first, 1),
        *cells(describe_seeds(row)),
    ]


def _cell(one: Estimate | None, digits: int, sign: str = "", interval: bool = False) -> GridCell:
    """The spread over training seeds, else the standard error over problems; the interval where that is asked for, or where
    the standard error misleads."""
    if one is None or math.isnan(one.value):
        return GridCell("-")
    value = f"{one.value:{sign}.{digits}f}"
    if one.sd is not None and not interval:
        return GridCell(value, f"sd {one.sd:.{digits}f}")
    if interval or one.few:
        return GridCell(value, one.interval_text(digits, sign))
    return GridCell(value, "" if one.se is None or math.isnan(one.se) else f"± {one.se:.{digits}f}")


def grid_speeds(table: ResultTable, scopes: Sequence[str]) -> Grid | None:
    """The accuracy of every method at fixed tokens per forward; None where none is as fast as the slowest of them."""
    head = ["method", *(f"accuracy % at TPF {speed:g}" for speed in SPEEDS), "seeds"]
    grid = Grid(f"Accuracy at fixed speed, {table.title}", head)
    for scope in scopes:
        rows = []
        for row in (row for row in table.rows if scope in row.scopes):
            found = row.scopes[scope].accuracy_at
            if found:
                values = [_cell(found.get(speed), 1, interval=True) for speed in SPEEDS]
                rows.append([GridCell(row.title, method=row.title), *values, *cells(describe_seeds(row))])
        if rows:
            grid.groups.append(_group(table, scope, rows))
    return grid if grid.groups else None


def grid_points(table: ResultTable, scopes: Sequence[str]) -> Grid:
    """Every point of every method."""
    head = [
        "method",
        "setting",
        "TPF",
        "accuracy %",
        "TPF with the filler",
        "forwards per problem",
        "tokens/s",
        "seeds",
    ]
    grid = Grid(f"All points of {table.title}", head)
    for scope in scopes:
        rows = []
        for row in (row for row in table.rows if scope in row.scopes):
            for point in row.scopes[scope].points:
                accuracy, rate = _cell(point.accuracy, 1), point.tokens_per_second
                note = f"{accuracy.note}, not in the area" if point.dropped else accuracy.note
                rows.append(
                    [
                        GridCell(row.title, method=row.title),
                        GridCell(describe_setting(point.setting)),
                        _cell(point.tpf, 2),
                        GridCell(accuracy.text, note),
                        *cells(
                            with_error(point.tpf_all, None, 2),
                            f"{point.forwards:.1f}",
                            f"{rate:,.0f}" if math.isfinite(rate) else "-",
                            describe_seeds(row),
                        ),
                    ]
                )
        grid.groups.append(_group(table, scope, rows))
    return grid


def grid_pairs(table: ResultTable, baseline: bool = False) -> Grid | None:
    """Every method against the base one token at a time, or against the baseline at its default setting."""
    reference = table.baseline if baseline else table.base
    head = [
        "method",
        "accuracy, points",
        "TPF",
        "fewer forwards",
        "gained / lost",
        "p",
        "80 % power at",
        "seeds",
    ]
    title = title_of(table, reference) if reference else "their own run one token at a time"
    grid = Grid(f"against {title}", head)
    for scope in table.scopes:
        rows = []
        for row in (row for row in table.rows if scope in row.scopes and row.method != reference):
            found = row.scopes[scope]
            pair = found.to_baseline if baseline else found.to_base
            if pair is None:
                continue
            effect = pair.minimum_detectable_effect
            rows.append(
                [
                    GridCell(row.title, describe_setting(found.setting), row.title),
                    _cell(pair.accuracy, 2, "+", interval=True),
                    _cell(pair.tpf, 2, "+", interval=True),
                    _cell(pair.speedup, 2, interval=True),
                    *cells(
                        f"{pair.gained} / {pair.lost}",
                        "-" if pair.p_value is None else f"{pair.p_value:.2g}",
                        "-" if effect is None else f"± {effect:.2f}",
                        describe_seeds(row),
                    ),
                ]
            )
        if rows:
            grid.groups.append(_group(table, scope, rows))
    return grid if grid.groups else None


def title_of(table: ResultTable, method: str | None) -> str:
    """What a method is called in a table."""
    return next((row.title for row in table.rows if row.method == method), method or "")


def shorten(task: str) -> str:
    """A task's name; of a file of one's own, the file's."""
    return Path(task.partition(":")[2]).name if task.startswith("jsonl:") else task


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


def show_table(table: ResultTable) -> str:
    """For a terminal: the verdicts, the methods, and what the numbers are."""
    text = grid_results(table, [table.scope], missing=True).show()
    return "\n".join([*list_verdicts(table), text, "", *explain(table)])


def as_markdown(table: ResultTable) -> str:
    """The table with a heading and the words needed to read it."""
    text = grid_results(table, [table.scope], missing=True).markdown()
    speeds = grid_speeds(table, [table.scope]) if table.tasks else None
    more = [] if speeds is None else [speeds.markdown(), ""]
    return "\n".join([f"### {table.title}", "", text, "", *more, *explain(table)]) + "\n"


def show_points(table: ResultTable) -> str:
    """Every scope: the methods with AUP and the speed at the target accuracy, then all points."""
    grids = (
        grid_results(table, table.scopes),
        grid_speeds(table, table.scopes),
        grid_points(table, table.scopes),
    )
    parts = [table.title, *list_verdicts(table), "", *(f"{grid.show()}\n" for grid in grids if grid)]
    return "\n".join([*parts, *explain(table)])


def show_comparison(table: ResultTable, notes: Sequence[str] = ()) -> str:
    """Runs on the problems they share, then each against the first."""
    pairs = grid_pairs(table)
    assert pairs is not None
    parts = [*(f"note: {note}" for note in notes), grid_points(table, table.scopes).show(), ""]
    parts.append(
        f"{pairs.label}, paired on the same problems (brackets: 95 % bootstrap; p: McNemar's exact test)"
    )
    return "\n".join([*parts, pairs.show()])


def explain(table: ResultTable) -> list[str]:
    """What the numbers are."""
    if not table.tasks:
        return ["No numbers: no verdicts yet." if table.ungraded else "No numbers: nothing has been run yet."]
    tasks = ", ".join(f"{shorten(task)} {n}" for task, n in table.tasks.items())
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
    tops = ", ".join(f"{shorten(task)} {top:.1f}" for task, top in table.y_max.items())
    source = "given" if table.y_max_given else "the highest accuracy of all methods"
    lines.append(f"AUP: {'mean over tasks, ' if several else ''}y_max {tops} ({source}).")
    if table.ungraded:
        lines.append(f"Not graded yet, and not in the numbers: {', '.join(map(shorten, table.ungraded))}.")
    return lines + ([table.note] if table.note else [])


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
