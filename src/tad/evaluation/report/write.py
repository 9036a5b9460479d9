"""From directories to files: gather, score, draw, write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tad.errors import TadError
from tad.evaluation.report.board import Board, Method
from tad.evaluation.report.data import Gathered, Training, gather, tell_apart
from tad.evaluation.report.history import decay_panel, loss_panel, teacher_panel
from tad.evaluation.report.page import Panels, render
from tad.evaluation.report.palette import Look
from tad.evaluation.report.panels import Panel, as_png
from tad.evaluation.report.plots import area_panel, curve_panel
from tad.evaluation.report.replay import Scene, decode_scenes, replay_rows
from tad.evaluation.report.rows import SMOKE
from tad.evaluation.report.scores import RESAMPLES, give_looks, make_boards
from tad.evaluation.report.studies import StudyPart, read_studies
from tad.evaluation.report.study_plots import BARS, Charts, give_table_looks, is_news, make_charts, no_charts
from tad.files import create_folder, write_whole
from tad.models import LM


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


def write_report(
    folders: Sequence[str | Path],
    out: str | Path = "report.html",
    title: str = "tad report",
    smoke: bool = False,
    y_max: float | Mapping[str, float] | None = None,
    live: Live | None = None,
    example: str | None = None,
    resamples: int = RESAMPLES,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """The report of whatever stands in or under `folders`.

    `smoke` marks every number as smoke size; without it those on few examples are. `y_max` is AUP's, as for `tad points`.
    The replay comes from the rows of runs, or from decoding now with `live`; `example` picks its example by id.
    """
    out = Path(out)
    if out.is_dir():
        out = out / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise TadError(f"{out}: the report is a web page; give --out a name that ends in .html")
    say("reading")
    found = gather(folders)
    studies = read_studies(found, say)
    boards = make_boards(found, y_max, resamples, say)
    looks = give_looks(boards)
    panels = make_panels(found, boards, looks, studies)
    scenes = _scenes(found, boards, studies, live, example)
    say("drawing")
    create_folder(out.parent)
    pictures = _draw(panels, boards, studies, looks, out, smoke)
    write_whole(out, render(found, boards, studies, looks, panels, scenes, title, smoke, resamples))
    return Report(out, pictures, list(dict.fromkeys(found.notes)))


def make_panels(
    found: Gathered,
    boards: Sequence[Board],
    looks: Mapping[Method, Look],
    studies: Sequence[StudyPart] = (),
) -> Panels:
    """Every chart, not yet drawn."""
    curves, areas = [], []
    for b, board in enumerate(boards):
        numbered = list(enumerate(board.questions))
        curves.append([curve_panel(board, question, looks, f"curve-{b}-{q}") for q, question in numbered])
        drawn = [area_panel(board, question, looks, f"area-{b}-{q}") for q, question in numbered]
        areas.append([panel for panel in drawn if panel is not None])
    series: dict[str, list[Training]] = {}
    for training in (run for run in found.trainings if not run.trial):
        series.setdefault(training.series, []).append(training)
    return Panels(
        curves,
        areas,
        _present(decay_panel(store, f"decay-{i}") for i, store in enumerate(found.stores)),
        _present(teacher_panel(store, f"teacher-{i}") for i, store in enumerate(found.stores)),
        _present(
            loss_panel(runs, name, f"loss-{i}")
            for i, (runs, name) in enumerate(zip(series.values(), _titles(series.values()), strict=True))
        ),
        _study_charts(studies),
    )


def _study_charts(studies: Sequence[StudyPart]) -> list[list[Charts]]:
    """Of every table; those that repeat methods of the main table have no charts of their own."""
    looks = give_table_looks(studies)
    found = []
    for s, study in enumerate(studies):
        charts = []
        for i, table in enumerate(study.tables):
            own = looks[study.name, table.name]
            news = is_news(table, study.main)
            charts.append(make_charts(study, table, own, f"study-{s}-{i}") if news else no_charts(own))
        found.append(charts)
    return found


def _titles(series: Iterable[Sequence[Training]]) -> list[str]:
    """The names of training runs, with their directories where two series share a name."""
    firsts = [runs[0] for runs in series]
    folders = tell_apart([run.folder for run in firsts])
    shared = [run.name for run in firsts]
    return [
        run.name if shared.count(run.name) == 1 else f"{run.name}, {folder}"
        for run, folder in zip(firsts, folders, strict=True)
    ]


def _present(panels: Iterable[Panel | None]) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _scenes(
    found: Gathered,
    boards: Sequence[Board],
    studies: Sequence[StudyPart],
    live: Live | None,
    example: str | None,
) -> list[Scene]:
    if live is not None:
        runs = [run.folder for run in (*found.runs, *(run for study in studies for run in study.runs))]
        return decode_scenes(
            live.base, live.student, runs, live.prompt, live.decoder, live.gen_length, example
        )
    if example is not None and len(boards) > 1:
        boards = [board for board in boards if any(_has(board, example))]
    return [scene for board in boards for scene in replay_rows(board, example, found.notes)]


def _has(board: Board, example: str) -> list[bool]:
    return [row.id == example for run, _ in board.runs for row in run.rows]


def _draw(
    panels: Panels,
    boards: Sequence[Board],
    studies: Sequence[StudyPart],
    looks: Mapping[Method, Look],
    out: Path,
    smoke: bool,
) -> list[Path]:
    """PNGs named after the page."""
    written = []

    def draw(
        name: str, chosen: Sequence[Panel], words: str, legend: Mapping[str, Look] | None = None
    ) -> None:
        if chosen:
            path = out.with_name(f"{out.stem}-{name}.png")
            label = "smoke size; " if smoke or min(panel.n for panel in chosen) < SMOKE else ""
            written.append(as_png(chosen, path, label + words, legend))

    several = len(boards) + len(studies) > 1
    for study, every in zip(studies, panels.studies, strict=True):
        for table, charts in zip(study.tables, every, strict=True):
            suffix = f"-{_slug(study.name)}" if several else ""
            suffix += "" if table is study.main else f"-{_slug(table.name)}"
            draw(f"accuracy{suffix}", charts.curves, f"{study.name}; {BARS}", charts.looks)
            whiskers = "whiskers: of speeds 95 % over problems, of areas s.d. over seeds"
            draw(f"speed{suffix}", charts.first[1:], f"{study.name}; {whiskers}")
    for number, board in enumerate(boards):
        suffix = f"-{_slug(board.name)}" if several else ""
        legend = {method.label: looks[method] for method in board.methods}
        machine = ", ".join(dict.fromkeys(run.origin.device for run, _ in board.runs if run.origin.device))
        where = f"{board.name}; {machine}" if machine else board.name
        draw(
            f"accuracy{suffix}",
            panels.curves[number],
            f"{where}; bars: one standard error over examples",
            legend,
        )
        draw(
            f"aup{suffix}", panels.areas[number], f"{where}; whiskers: 95 % over examples, or s.d. over seeds"
        )
    draw("decay", panels.decays, "bands: 95 % over trajectories")
    draw("teacher", panels.teachers, "band: one standard error")
    draw("loss", panels.losses, "thick lines: running mean over a twentieth of the run")
    return written


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") or "base"
