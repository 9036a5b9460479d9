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

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import tad
from tad.errors import TadError
from tad.evaluation import tables
from tad.evaluation.analysis import TOLERANCE, ResultTable
from tad.evaluation.labels import distinguish, tell_apart
from tad.evaluation.measurement import RESAMPLES
from tad.evaluation.methods import count_unjudged
from tad.evaluation.report import charts, grids
from tad.evaluation.report.charts import Chart
from tad.evaluation.report.gather import Gathered, Part, TrainingData, gather
from tad.evaluation.report.replay import Live, Scene, decode_scenes, replay_rows
from tad.evaluation.report.styles import DARK, LIGHT, Style, assign_styles, css_name, css_variables
from tad.evaluation.tables import SMALL, is_small
from tad.evaluation.verdict import list_verdicts
from tad.files import create_folder, finite, write_whole
from tad.runs.record import find_commit

_PARTS = Path(__file__).parent / "parts"
_MADE = ("device", "commit", "time")  # of a record's call


@dataclass(frozen=True)
class Report:
    """What was written. `notes` say what is missing or was left out."""

    page: Path
    pictures: list[Path]
    notes: list[str]


@dataclass(frozen=True)
class TableCharts:
    """Of one table: the curves of its first scope, its bars; and the other scopes."""

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
    drawn = [_chart_part(part, styles, f"part-{number}") for number, part in enumerate(found.parts)]
    history = _chart_history(found)
    create_folder(out.parent)
    pictures = _draw(found, drawn, history, styles, out, smoke)
    write_whole(out, _render(found, drawn, history, styles, scenes, title, smoke))
    return Report(out, pictures, list(dict.fromkeys(found.notes)))


def _make_scenes(found: Gathered, live: Live | None, example: str | None) -> list[Scene]:
    if live is not None:
        return decode_scenes(live, [run.folder for part in found.parts for run in part.runs], example)
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
    curves = [
        charts.chart_curves(table, scope, styles, f"{name}-{i}") for i, scope in enumerate(table.scopes)
    ]
    speeds = charts.chart_speeds(table, styles, f"{name}-speeds")
    areas = charts.chart_areas(table, styles, f"{name}-areas")
    accuracies = charts.chart_accuracies(table, styles, f"{name}-accuracies")
    return TableCharts([curves[0], *_present([accuracies, speeds, areas])], curves[1:])


def _chart_history(found: Gathered) -> dict[str, list[Chart]]:
    series: dict[str, list[TrainingData]] = {}
    for training in (run for run in found.trainings if not run.trial):
        series.setdefault(training.series, []).append(training)
    firsts = [runs[0] for runs in series.values()]
    folders = tell_apart([run.folder for run in firsts])
    placed = [f"{run.name}, {folder}" for run, folder in zip(firsts, folders, strict=True)]
    titles = distinguish([run.name for run in firsts], placed)
    losses = [
        charts.chart_loss(runs, title, f"loss-{i}")
        for i, (runs, title) in enumerate(zip(series.values(), titles, strict=True))
    ]
    stores = list(enumerate(found.stores))
    return {
        "decay": _present(charts.chart_decay(store, f"decay-{i}") for i, store in stores),
        "teacher": _present(charts.chart_teacher(store, f"teacher-{i}") for i, store in stores),
        "loss": _present(losses),
    }


def _present(charts: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _draw(
    found: Gathered,
    drawn: Sequence[Sequence[TableCharts]],
    history: Mapping[str, list[Chart]],
    styles: Mapping[str, Style],
    out: Path,
    smoke: bool,
) -> list[Path]:
    """PNGs named after the page."""
    written = []

    def draw(name: str, shown: Sequence[Chart], foot: str, legend: Mapping[str, Style] | None = None) -> None:
        if shown:
            path = out.with_name(f"{out.stem}-{name}.png")
            label = "smoke size; " if smoke or min(chart.n for chart in shown) < SMALL else ""
            written.append(charts.as_png(shown, path, label + foot, legend))

    for part, of_part in zip(found.parts, drawn, strict=True):
        foot = "; ".join(
            [part.name, *dict.fromkeys(filter(None, (run.call.get("device") for run in part.runs)))]
        )
        for table, shown in zip(part.tables, of_part, strict=True):
            suffix = f"-{_slug(part.name)}" if len(found.parts) > 1 else ""
            suffix += "" if table is part.main else f"-{_slug(table.name)}"
            legend = {row.title: styles[row.title] for row in table.rows if row.scopes}
            bars = (
                "bars: sd over training seeds where there are several, else one standard error over problems"
            )
            draw(f"accuracy{suffix}", shown.first[:1] + shown.scopes, f"{foot}; {bars}", legend)
            draw(f"speed{suffix}", shown.first[1:], f"{foot}; whiskers: 95 % over problems")
    draw("decay", history["decay"], "bands: 95 % over trajectories")
    draw("teacher", history["teacher"], "band: one standard error")
    draw("loss", history["loss"], "thick lines: running mean over a twentieth of the run")
    return written


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") or "base"


# HTML: what is shown is decided here, how in the templates


def _render(
    found: Gathered,
    drawn: Sequence[Sequence[TableCharts]],
    history: Mapping[str, list[Chart]],
    styles: Mapping[str, Style],
    scenes: Sequence[Scene],
    title: str,
    smoke: bool,
) -> str:
    script = (_PARTS / "script.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "typeset": _typeset,
        "emphasise": _emphasise,
        "svg": charts.as_svg,
        "printable": _printable,
        "slot": css_name,
    }
    environment.globals |= {"tables": tables, "grids": grids, "small": SMALL}
    return environment.get_template("template.html").render(
        title=title,
        found=found,
        parts=list(zip(found.parts, drawn, strict=True)),
        history=history,
        styles=styles,
        scenes=scenes,
        no_replay=next((note for note in found.notes if note.startswith("replay")), None),
        verdicts=list_verdicts(found.parts[0].main) if found.parts else [],
        lede=_describe(found),
        facts=_list_facts(found),
        smoke=smoke,
        warning=_warn(found, smoke),
        notes=list(dict.fromkeys(found.notes)),
        version=tad.__version__,
        commit=(find_commit() or "")[:12],
        made=time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()),
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        style=Markup((_PARTS / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_embed(found),
    )


def _typeset(text: str) -> str:
    """Minus and comparison signs as a book has them."""
    return re.sub(r"(?<![\w-])-(?=[\d ])", "−", text).replace(">=", "≥")


def _emphasise(text: str) -> Markup:
    """*words* in italics."""
    return Markup(re.sub(r"\*(.+?)\*", r"<i>\1</i>", str(Markup.escape(text))))


def _printable(text: str) -> str:
    """A token's text in a cell: line ends and control characters as signs."""
    return "".join(c if c.isprintable() or c == " " else "↵" if c == "\n" else "▯" for c in text)


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
    calls = [run.call for run in runs] + [run.call for run in found.trainings]
    seeds = sorted({run.seed for run in found.trainings if run.seed is not None})
    unjudged = sum(count_unjudged(run.folder) for run in runs)
    every: dict[str, list[str | None]] = {
        "problems per task": [f"{n:,}" for part in found.parts for n in part.main.tasks.values()],
        "machines": [call.get("device") for call in calls],
        "commits": [grids.show_commit(call).strip("-") for call in calls],
        "training seeds": [f"{len(seeds)} ({', '.join(map(str, seeds))})"] if len(seeds) > 1 else [],
        "precision": [run.meta.dtype for run in runs],
        "positions generated": [str(run.meta.gen_length) for run in runs],
        "cannot be judged": [f"{unjudged:,} answers of all runs"] if unjudged else [],
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
                "tuning": part.tuning.records if part.tuning else [],
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
            {"folder": run.folder, "recipe": run.recipe, **{key: run.call.get(key) for key in _MADE}}
            for run in found.trainings
        ],
        "notes": found.notes,
    }
    text = json.dumps(finite(values), ensure_ascii=True, default=str, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
