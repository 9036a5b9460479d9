"""The page: what was gathered, as one HTML file without anything outside it, and PNGs of its charts. Text is escaped by the
template engine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import tad
from tad.errors import TadError
from tad.evaluation.analysis import RESAMPLES, TOLERANCE, ResultTable
from tad.evaluation.labels import tell_apart
from tad.evaluation.report import grids
from tad.evaluation.report.charts import (
    DARK,
    LIGHT,
    Chart,
    Style,
    as_png,
    as_svg,
    assign_styles,
    chart_areas,
    chart_curves,
    chart_decay,
    chart_loss,
    chart_speeds,
    chart_teacher,
    css_name,
    css_variables,
)
from tad.evaluation.report.gather import Gathered, Part, TrainingData, gather
from tad.evaluation.report.replay import Scene, Side, decode_scenes, replay_rows
from tad.evaluation.tables import (
    SMALL,
    describe_seeds,
    explain,
    grid_pairs,
    grid_points,
    grid_results,
    is_small,
    list_verdicts,
)
from tad.files import create_folder, finite, write_whole
from tad.models import LM
from tad.training.record import find_commit

_PARTS = Path(__file__).parent / "parts"

# The markers of the charts, centred in a swatch of 26 x 12.
_MARKERS = {
    "o": "M9.4 6a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "s": "M9.8 2.8h6.4v6.4h-6.4z",
    "^": "M13 2l4 7.4h-8z",
    "v": "M13 10l4 -7.4h-8z",
    "D": "M13 1.8l4.2 4.2l-4.2 4.2l-4.2 -4.2z",
    "P": "M11.6 2h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
    "X": "M10.9 2.2L13 4.3L15.1 2.2L16.8 3.9L14.7 6L16.8 8.1L15.1 9.8L13 7.7L10.9 9.8L9.2 8.1L11.3 6L9.2 3.9z",
}


@dataclass(frozen=True)
class Live:
    """Models to decode a replay with, instead of taking it from rows."""

    base: LM
    student: LM | None = None
    decoder: str = "tad"
    prompt: str | None = None
    gen_length: int | None = None


@dataclass(frozen=True)
class Report:
    """What was written. `notes` say what is missing or was left out."""

    page: Path
    pictures: list[Path]
    notes: list[str]


@dataclass(frozen=True)
class TableCharts:
    """Of one table: its first scope, speeds and areas; and the other scopes."""

    first: list[Chart]
    scopes: list[Chart]


def write_report(
    folders: Sequence[str | Path],
    out: str | Path = "report.html",
    title: str = "tad report",
    smoke: bool = False,
    y_max: float | Mapping[str, float] | None = None,
    live: Live | None = None,
    example: str | None = None,
    resamples: int = RESAMPLES,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report of whatever stands in or under `folders`.

    `smoke` marks every number as smoke size; without it those on few examples are. `y_max` and `tolerance` are as for
    `tad points`; studies have their own. The replay comes from the rows of runs, or from decoding now with `live`;
    `example` picks its example by id.
    """
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise TadError(f"{out}: the report is a web page; give --out a name that ends in .html")
    say("reading")
    found = gather(folders, tolerance, y_max, resamples, say)
    styles = assign_styles([table for part in found.parts for table in part.tables])
    scenes = _make_scenes(found, live, example)
    say("drawing")
    results = [_chart_part(part, styles, f"part-{number}") for number, part in enumerate(found.parts)]
    history = _chart_history(found)
    create_folder(out.parent)
    pictures = _draw(found, results, history, styles, out, smoke)
    page = _render(found, results, history, styles, scenes, title, smoke)
    write_whole(out, page)
    return Report(out, pictures, list(dict.fromkeys(found.notes)))


def _make_scenes(found: Gathered, live: Live | None, example: str | None) -> list[Scene]:
    if live is not None:
        runs = [run.folder for part in found.parts for run in part.runs]
        asked = (live.prompt, live.decoder, live.gen_length, example)
        return decode_scenes(live.base, live.student, runs, *asked)
    scenes = [
        scene
        for part in found.parts
        if part.group is not None
        for scene in replay_rows(part.group, part.main, example, found.notes)
    ]
    if example is not None and not scenes:
        raise TadError(f"--example {example}: not among the examples that both sides of a replay answered")
    return scenes


# Charts


def _chart_part(part: Part, styles: Mapping[str, Style], name: str) -> list[TableCharts]:
    """Of every table; those that only repeat methods of the main table have no charts of their own."""
    known = {row.title for row in part.main.rows if row.scopes}
    found = []
    for number, table in enumerate(part.tables):
        rows = {row.title for row in table.rows if row.scopes and row.method != table.base}
        shown = bool(rows) and (table is part.main or bool(rows - known))
        found.append(_chart_table(table, styles, f"{name}-{number}") if shown else TableCharts([], []))
    return found


def _chart_table(table: ResultTable, styles: Mapping[str, Style], name: str) -> TableCharts:
    curves = [chart_curves(table, scope, styles, f"{name}-{i}") for i, scope in enumerate(table.scopes)]
    bars = [chart_speeds(table, styles, f"{name}-speeds"), chart_areas(table, styles, f"{name}-areas")]
    return TableCharts([curves[0], *_present(bars)], curves[1:])


def _chart_history(found: Gathered) -> dict[str, list[Chart]]:
    series: dict[str, list[TrainingData]] = {}
    for training in (run for run in found.trainings if not run.trial):
        series.setdefault(training.series, []).append(training)
    names = [runs[0].name for runs in series.values()]
    folders = tell_apart([runs[0].folder for runs in series.values()])
    titles = [
        name if names.count(name) == 1 else f"{name}, {folder}"
        for name, folder in zip(names, folders, strict=True)
    ]
    losses = (
        chart_loss(runs, name, f"loss-{i}")
        for i, (runs, name) in enumerate(zip(series.values(), titles, strict=True))
    )
    return {
        "decays": _present(chart_decay(store, f"decay-{i}") for i, store in enumerate(found.stores)),
        "teachers": _present(chart_teacher(store, f"teacher-{i}") for i, store in enumerate(found.stores)),
        "losses": _present(losses),
    }


def _present(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _draw(
    found: Gathered,
    results: Sequence[Sequence[TableCharts]],
    history: Mapping[str, list[Chart]],
    styles: Mapping[str, Style],
    out: Path,
    smoke: bool,
) -> list[Path]:
    """PNGs named after the page."""
    written = []

    def draw(
        name: str, charts: Sequence[Chart], foot: str, legend: Mapping[str, Style] | None = None
    ) -> None:
        if charts:
            path = out.with_name(f"{out.stem}-{name}.png")
            label = "smoke size; " if smoke or min(chart.n for chart in charts) < SMALL else ""
            written.append(as_png(charts, path, label + foot, legend))

    for part, drawn in zip(found.parts, results, strict=True):
        machines = ", ".join(dict.fromkeys(run.origin.device for run in part.runs if run.origin.device))
        for table, charts in zip(part.tables, drawn, strict=True):
            suffix = f"-{_slug(part.name)}" if len(found.parts) > 1 else ""
            suffix += "" if table is part.main else f"-{_slug(table.name)}"
            foot = f"{part.name}{f'; {machines}' if machines else ''}"
            legend = {row.title: styles[row.title] for row in table.rows if row.scopes}
            bars = (
                "bars: sd over training seeds where there are several, else one standard error over problems"
            )
            draw(f"accuracy{suffix}", charts.first[:1] + charts.scopes, f"{foot}; {bars}", legend)
            draw(f"speed{suffix}", charts.first[1:], f"{foot}; whiskers: 95 % over problems")
    draw("decay", history["decays"], "bands: 95 % over trajectories")
    draw("teacher", history["teachers"], "band: one standard error")
    draw("loss", history["losses"], "thick lines: running mean over a twentieth of the run")
    return written


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") or "base"


# HTML


def _render(
    found: Gathered,
    results: Sequence[Sequence[TableCharts]],
    history: Mapping[str, list[Chart]],
    styles: Mapping[str, Style],
    scenes: Sequence[Scene],
    title: str,
    smoke: bool,
) -> str:
    script = (_PARTS / "script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["typeset"] = _typeset
    no_replay = next((note for note in found.notes if note.startswith("replay")), "")
    return environment.get_template("template.html").render(
        title=title,
        verdicts=list_verdicts(found.parts[0].main) if found.parts else [],
        lede=_describe(found),
        facts=_list_facts(found),
        smoke=_warn(found, smoke),
        notes=list(dict.fromkeys(found.notes)),
        parts=[
            _view_part(part, charts, styles, number, smoke)
            for number, (part, charts) in enumerate(zip(found.parts, results, strict=True))
        ],
        scenes=[_view_scene(scene) for scene in scenes],
        no_replay=no_replay
        or "A replay needs evaluation runs of a base and a student that keep token ids, or --model to decode an example now.",
        history={name: _figures(charts, smoke) for name, charts in history.items()},
        stores=grids.grid_stores(found.stores),
        trainings=grids.grid_trainings(found.trainings),
        sources=grids.grid_sources(found),
        version=tad.__version__,
        commit=(find_commit() or "")[:12],
        made=time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()),
        markers=_MARKERS,
        styles=styles,
        smoke_all=smoke,
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        style=Markup((_PARTS / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        data=_embed(found),
    )


def _typeset(text: str) -> str:
    """Minus and comparison signs as a book has them."""
    return re.sub(r"(?<![\w-])-(?=[\d ])", "−", text).replace(">=", "≥")


def _view_part(
    part: Part, charts: Sequence[TableCharts], styles: Mapping[str, Style], number: int, smoke: bool
) -> dict[str, Any]:
    views = [
        _view_table(table, drawn, styles, smoke) for table, drawn in zip(part.tables, charts, strict=True)
    ]
    tuning = None
    if part.tuning is not None:
        trials = part.tuning.trials
        tuning = {
            "table": grids.grid_trials(part.tuning, part.name),
            "count": max((trial.number + 1 for _, trial in trials), default=0),
            "seed": part.tuning.seed,
            "tasks": part.tuning.tasks,
            "untried": list(dict.fromkeys(title for title, trial in trials if trial.score is None)),
        }
    return {
        "id": f"part-{number}",
        "name": part.name,
        "about": part.about,
        "main": views[0],
        "others": views[1:],
        "tuning": tuning,
    }


def _view_table(
    table: ResultTable, charts: TableCharts, styles: Mapping[str, Style], smoke: bool
) -> dict[str, Any]:
    rows = [row for row in table.rows if row.scopes]
    others = table.scopes[1:] if len(table.tasks) > 1 else []
    pairs = (grid_pairs(table, baseline) for baseline in (False, True))
    return {
        "title": table.title,
        "tolerance": f"{table.tolerance:g}",
        "verdicts": list_verdicts(table),
        "done": len(rows),
        "planned": len(table.rows),
        "rows": grid_results(table, [table.scope]) if rows else None,
        "scopes": grid_results(table, others) if rows and others else None,
        "missing": [(row.title, row.state) for row in table.rows if not row.scopes],
        "words": [
            Markup(re.sub(r"\*(.+?)\*", r"<i>\1</i>", str(Markup.escape(_typeset(line)))))
            for line in explain(table)
        ],
        "legend": [
            {
                "label": row.title,
                "style": styles[row.title],
                "slot": css_name(row.title),
                "seeds": _count(describe_seeds(row)),
            }
            for row in rows
        ],
        "first": _figures(charts.first, smoke),
        "tasks": _figures(charts.scopes, smoke),
        "pairs": [grid for grid in pairs if grid is not None] if rows else [],
        "points": grid_points(table, table.scopes) if rows else None,
    }


def _count(seeds: str) -> str:
    """Beside a name in the legend."""
    return "" if seeds in ("-", "1", "0") else f"{seeds} seeds"


def _figures(charts: Sequence[Chart], smoke: bool) -> list[dict[str, Any]]:
    return [
        {"title": chart.title, "svg": Markup(as_svg(chart)), "smoke": smoke or chart.n < SMALL}
        for chart in charts
    ]


def _describe(found: Gathered) -> str:
    """What the page is of, in a sentence."""

    def count(number: int, one: str) -> str:
        return f"{number:,} {one if number == 1 else f'{one[:-1]}ies' if one.endswith('y') else f'{one}s'}"

    parts = []
    if found.parts:
        methods = {
            row.title for part in found.parts for table in part.tables for row in table.rows if row.scopes
        }
        runs = sum(len(part.runs) for part in found.parts)
        names = ", ".join(dict.fromkeys(part.name for part in found.parts))
        parts.append(f"{count(len(methods), 'method')} in {names}, from {count(runs, 'evaluation run')}")
    if found.trainings:
        parts.append(count(len(found.trainings), "training run"))
    if found.stores:
        kept = sum(store.summary.kept for store in found.stores)
        parts.append(f"{count(len(found.stores), 'trajectory store')} with {count(kept, 'trajectory')}")
    return "; ".join(parts) + "." if parts else "Nothing was found."


def _list_facts(found: Gathered) -> list[tuple[str, str]]:
    """What the numbers rest on: a few values of each."""
    runs = [run for part in found.parts for run in part.runs]
    origins = [run.origin for run in runs] + [run.origin for run in found.trainings]
    seeds = sorted({run.seed for run in found.trainings if run.seed is not None})
    every: dict[str, list[str | None]] = {
        "problems per task": [f"{n:,}" for part in found.parts for n in part.main.tasks.values()],
        "machines": [origin.device for origin in origins],
        "commits": [origin.commit and origin.commit[:10] + origin.commit[40:] for origin in origins],
        "training seeds": [f"{len(seeds)} ({', '.join(map(str, seeds))})"] if len(seeds) > 1 else [],
        "precision": [run.meta.dtype for run in runs],
        "positions generated": [str(run.meta.gen_length) for run in runs],
    }
    shown = []
    for name, values in every.items():
        known = list(dict.fromkeys(value for value in values if value))
        if known:
            more = f" and {len(known) - 4} more" if len(known) > 4 else ""
            shown.append((name, ", ".join(known[:4]) + more))
    return shown


def _warn(found: Gathered, everything: bool) -> str:
    """Why numbers here are not to be relied on; empty where they may be."""
    tables = [part.main for part in found.parts if part.main.tasks]
    small = [min(table.tasks.values()) for table in tables if is_small(table, table.scope)]
    least = f" Tasks have as few as {min(small)} problems." if small else ""
    if everything:
        return f"This run shows that everything works, not how well.{least} Errors are wide; do not quote these numbers."
    if small:
        return f"Some numbers rest on fewer than {SMALL} problems and are marked.{least} Their errors are wide; do not quote them."
    return ""


def _embed(found: Gathered) -> Markup:
    """The numbers as JSON that cannot end its script element."""
    values = {
        "parts": [
            {
                "name": part.name,
                "tables": [asdict(table) for table in part.tables],
                "tuning": [asdict(trial) for _, trial in part.tuning.trials] if part.tuning else [],
            }
            for part in found.parts
        ],
        "stores": [
            {
                "folder": store.folder,
                "summary": asdict(store.summary),
                "window": None if store.window is None else asdict(store.window),
            }
            for store in found.stores
        ],
        "trainings": [
            {"folder": run.folder, "recipe": run.recipe, "origin": asdict(run.origin)}
            for run in found.trainings
        ],
        "notes": found.notes,
    }
    text = json.dumps(finite(values), ensure_ascii=True, default=str, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _view_scene(scene: Scene) -> dict[str, Any]:
    return {
        "title": scene.title,
        "prompt": scene.prompt,
        "why": scene.why,
        "last": max(side.forwards for side in scene.sides),
        "sides": [_view_side(side) for side in scene.sides],
    }


def _view_side(side: Side) -> dict[str, Any]:
    return {
        "label": side.label,
        "setting": side.setting,
        "forwards": side.forwards,
        "tokens": side.tokens,
        "tpf": f"{side.tokens / max(1, side.forwards):.2f}",
        "verdict": {True: "right", False: "wrong", None: ""}[side.correct],
        "cells": [_view_position(side, place) for place in range(len(side.pieces))],
    }


def _view_position(side: Side, place: int) -> dict[str, Any]:
    """A position: an end token is a square, filler and ends behind the first one are dots."""
    step, text = side.steps[place], side.pieces[place]
    kind = "text"
    if step == 0 or place >= side.tokens:
        kind, text = "filler", "·"
    elif side.ends[place]:
        kind, text = "end", "■"
    breaks = kind == "text" and "\n" in text
    shown = "".join(c if c.isprintable() or c == " " else "↵" if c == "\n" else "▯" for c in text)
    when = f"revealed by forward {step}" if step else "filled after the end"
    t = 0.0 if step <= 1 else (step - 1) / max(1, side.forwards - 1)
    return {
        "kind": kind,
        "text": shown,
        "step": step,
        "t": f"{t:.3f}",
        "title": f"position {place + 1}, {when}",
        "breaks": breaks,
    }
