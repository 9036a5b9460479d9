"""A study as the template wants it: what matters first, the rest to be folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from tad.evaluation.report import study_rows as tables
from tad.evaluation.report.marks import css_name
from tad.evaluation.report.names import shorten
from tad.evaluation.report.panels import Panel, as_svg
from tad.evaluation.report.rows import SMOKE
from tad.evaluation.report.studies import StudyPart
from tad.evaluation.report.study_plots import Charts
from tad.evaluation.study.tables import Table


def figures(panels: Sequence[Panel], smoke: bool) -> list[dict[str, Any]]:
    """Charts, drawn."""
    return [
        {"title": panel.title, "svg": Markup(as_svg(panel)), "smoke": smoke or panel.n < SMOKE}
        for panel in panels
    ]


def study_view(part: StudyPart, charts: Sequence[Charts], number: int, smoke: bool) -> dict[str, Any]:
    views = [_table_view(part, table, drawn, smoke) for table, drawn in zip(part.tables, charts, strict=True)]
    return {
        "id": f"study-{number}",
        "name": part.name,
        "about": f"base {part.base}, family {part.family}, split {part.split}",
        "below": f"{part.main.below:g}",
        "main": views[0],
        "others": views[1:],
        "tuning": _tuning_view(part),
    }


def _table_view(part: StudyPart, table: Table, charts: Charts, smoke: bool) -> dict[str, Any]:
    done = [row for row in table.rows if row.numbers is not None]
    seeds = {row.title: tables.seeds_of(row) for row in done}
    return {
        "title": table.title,
        "done": len(done),
        "planned": len(table.rows),
        "rows": tables.main_rows(part, table, charts.looks, smoke),
        "missing": tables.missing_rows(table),
        "words": _words(part, table),
        "legend": [
            {"label": title, "look": look, "slot": css_name(title), "seeds": _seeds(seeds[title])}
            for title, look in charts.looks.items()
        ]
        if charts.first
        else [],
        "first": figures(charts.first, smoke),
        "tasks": figures(charts.tasks, smoke),
        # A table that only repeats methods of the main one has nothing more to unfold.
        "pairs": tables.pair_rows(part, table, charts.looks, smoke) if charts.first else None,
        "points": tables.point_rows(part, table, charts.looks, smoke) if charts.first else None,
    }


def _seeds(count: str) -> str:
    """Beside a name in the legend."""
    return "" if count in ("–", "1") else f"{count} seeds"


def _words(part: StudyPart, table: Table) -> list[str]:
    """What this table's numbers rest on, beyond what all tables have in common."""
    if table.bar is None:
        return ["No verdicts yet." if table.ungraded else "The base has not been run yet."]
    tops = ", ".join(f"{shorten(task)} {top:.1f}" for task, top in table.y_max.items())
    lines = [f"The accuracy at which speeds are compared is {table.bar:.1f} %. y_max of the areas: {tops}."]
    if table.ungraded:
        lines.append(
            f"Not graded yet for every method, and so not in these numbers: {', '.join(map(shorten, table.ungraded))}."
        )
    return [*lines, *([table.note] if table.note else [])]


def _tuning_view(part: StudyPart) -> dict[str, Any] | None:
    if part.tuning is None:
        return None
    return {
        "table": tables.trial_rows(part.tuning, part.name),
        "count": tables.count_trials(part.tuning.trials),
        "seed": part.tuning.seed,
        "tasks": part.tuning.tasks,
        "untried": tables.untried(part.tuning),
    }
