"""Runs, curves and comparisons as text for a terminal. Decides nothing and computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tad.evaluation.compare import Comparison
from tad.evaluation.curves import BELOW, Curve, CurveTable
from tad.evaluation.throughput import Speed

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


def show_curves(table: CurveTable) -> str:
    """Per task: every method with its area, the speeds below the base, and the points they come from."""
    parts = []
    for question, y_max in table.y_max.items():
        curves = [curve for curve in table.curves if f"{curve.task}/{curve.template}" == question]
        bases = ", ".join(dict.fromkeys(curve.base for curve in curves))
        parts.append(
            f"{curves[0].task}, template {curves[0].template}, n = {curves[0].n}, y_max = {y_max:.2f} "
            f"({table.y_max_from[question]}), base: {bases}"
        )
        rows = [("method", "AUP", "95 % interval", *(f"TPF at base - {below:g}" for below in BELOW))]
        rows += [(_name(curve), *_area(curve), *(str(reach) for reach in curve.reaches)) for curve in curves]
        parts.append(align(rows))
        parts += ["", _points(curves)]
        parts.append("")
    means = [entry for entry in table.means() if entry["tasks"] > 1 and entry["aup"] is not None]
    if means:
        rows = [("mean over tasks", "tasks", "AUP")]
        rows += [(f"{m['decoder']} on {m['model']}", f"{m['tasks']}", f"{m['aup']:.1f}") for m in means]
        parts.append(align(rows))
    return "\n".join(parts).rstrip()


def _name(curve: Curve) -> str:
    return f"{curve.decoder} on {curve.model}"


def _area(curve: Curve) -> tuple[str, str]:
    if curve.aup is None:
        return "undefined", "no answer is right"
    if curve.aup_interval is None:
        return f"{curve.aup:.1f}", "-"
    low, high = curve.aup_interval
    return f"{curve.aup:.1f}", f"{low:.1f} to {high:.1f}"


def _points(curves: Sequence[Curve]) -> str:
    """Three lines a curve: settings, tokens per forward, accuracy."""
    width = max(len(curve.points) for curve in curves)
    rows: list[tuple[str, ...]] = [("points", *("" for _ in range(width)))]
    for curve in curves:
        empty = [""] * (width - len(curve.points))
        at = ("one token" if point.setting is None else f"{point.setting:g}" for point in curve.points)
        accuracy = (with_error(p.accuracy, p.se, 1) + (" x" if p.dropped else "") for p in curve.points)
        rows.append((_name(curve), *at, *empty))
        rows.append(("  TPF", *(f"{point.tpf:.2f}" for point in curve.points), *empty))
        rows.append(("  accuracy %", *accuracy, *empty))
    note = "x: more than 5 below the one-token run, or slower than it: not in the area"
    return align(rows) + (f"\n{note}" if any(p.dropped for curve in curves for p in curve.points) else "")


def show_comparison(found: Comparison) -> str:
    """The runs on what they share, then each against the first."""
    parts = [f"note: {note}" for note in found.notes]
    for task, by_run in found.groups.items():
        rows: list[tuple[str, ...]] = [("all tasks" if task == "all" else task, *_COLUMNS)]
        rows += [(name, *_cells(entry)) for name, entry in by_run.items()]
        parts += [align(rows), ""]
    parts.append(f"against {found.runs[0]}, paired on the same examples (95 % bootstrap; McNemar exact):")
    rows = [
        ("run", "task", "n", "accuracy", "interval", "gained/lost", "p", "80 % power at", "TPF", "interval")
    ]
    for one in found.differences:
        rows.append(
            (
                one.run,
                one.task,
                f"{one.n}",
                f"{one.accuracy:+.2f}",
                f"{one.accuracy_interval[0]:+.2f} to {one.accuracy_interval[1]:+.2f}",
                f"{one.gained}/{one.lost}",
                f"{one.p_value:.2g}",
                f"± {one.resolvable:.2f}",
                f"{one.tpf:+.2f}",
                f"{one.tpf_interval[0]:+.2f} to {one.tpf_interval[1]:+.2f}",
            )
        )
    return "\n".join([*parts, align(rows)])


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
