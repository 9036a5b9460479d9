"""The page: what was gathered, as one HTML file without anything outside it. Text is escaped by the template engine."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import tad
from tad.evaluation.report import rows as tables
from tad.evaluation.report import words
from tad.evaluation.report.board import Board, Method, as_record
from tad.evaluation.report.data import Gathered
from tad.evaluation.report.palette import DARK, LIGHT, Look, css_variables
from tad.evaluation.report.panels import Panel
from tad.evaluation.report.plots import css_class
from tad.evaluation.report.replay import Scene, Side
from tad.evaluation.report.rows import Table
from tad.evaluation.report.studies import StudyPart
from tad.evaluation.report.studies import as_record as study_record
from tad.evaluation.report.study_page import figures, study_view
from tad.evaluation.report.study_plots import Charts
from tad.files import finite
from tad.training.record import find_commit

_PARTS = Path(__file__).parent / "parts"

# The markers of `palette`, centred in a swatch of 26 x 12.
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
class Panels:
    """The charts of the page, by section; those of boards in the boards' order."""

    curves: list[list[Panel]]
    areas: list[list[Panel]]
    decays: list[Panel]
    teachers: list[Panel]
    losses: list[Panel]
    studies: list[list[Charts]] = field(default_factory=list)  # by table


def render(
    found: Gathered,
    boards: Sequence[Board],
    studies: Sequence[StudyPart],
    looks: Mapping[Method, Look],
    panels: Panels,
    scenes: Sequence[Scene],
    title: str,
    smoke: bool,
    resamples: int,
) -> str:
    """The HTML text."""
    script = (_PARTS / "script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_PARTS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("template.html").render(
        title=title,
        lede=words.lede(found, boards, studies),
        facts=words.facts(found, boards, studies),
        smoke=words.smoke(boards, studies, smoke),
        notes=list(dict.fromkeys(found.notes)),
        boards=[
            {
                "name": board.name,
                "about": words.about(board),
                "legend": [
                    {"label": method.label, "look": looks[method], "slot": css_class(method), "seeds": ""}
                    for method in board.methods
                ],
                "curves": figures(panels.curves[number], smoke),
                "areas": figures(panels.areas[number], smoke),
                "main": tables.main_table(board, looks, smoke),
                "points": tables.points_table(board, looks, smoke),
                "pairs": tables.pair_tables(board, looks, smoke),
            }
            for number, board in enumerate(boards)
        ],
        studies=[
            study_view(study, charts, number, smoke)
            for number, (study, charts) in enumerate(zip(studies, panels.studies, strict=True))
        ],
        plain=bool(boards) or not studies,
        folded=bool(studies),
        has_areas=any(panels.areas),
        has_pairs=any(board.pairs for board in boards),
        y_max_note=words.y_max_note(boards),
        resamples=f"{resamples:,}",
        scenes=[_scene(scene) for scene in scenes],
        no_replay=words.no_replay(found.notes),
        decays=figures(panels.decays, smoke),
        teachers=figures(panels.teachers, smoke),
        losses=figures(panels.losses, smoke),
        stores=tables.store_table(found.stores),
        trainings=tables.training_table(found.trainings),
        sources=tables.source_table(found, studies),
        version=tad.__version__,
        commit=(find_commit() or "")[:12],
        made=time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()),
        markers=_MARKERS,
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        style=Markup((_PARTS / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        data=_embedded(found, boards, studies),
    )


def _embedded(found: Gathered, boards: Sequence[Board], studies: Sequence[StudyPart]) -> Markup:
    """The numbers as JSON that cannot end its script element."""
    values = {
        "boards": [as_record(board) for board in boards],
        "studies": [study_record(study) for study in studies],
        "stores": [
            {
                "folder": store.folder,
                "summary": asdict(store.summary),
                "teacher_confidence": asdict(store.confidence),
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


# The replay


def _scene(scene: Scene) -> dict[str, Any]:
    return {
        "title": scene.title,
        "prompt": scene.prompt,
        "why": scene.why,
        "last": max(side.forwards for side in scene.sides),
        "sides": [_side(side) for side in scene.sides],
    }


def _side(side: Side) -> dict[str, Any]:
    verdicts = {True: "right", False: "wrong", None: ""}
    return {
        "label": side.label,
        "setting": side.setting,
        "forwards": side.forwards,
        "tokens": side.tokens,
        "tpf": f"{side.tokens / max(1, side.forwards):.2f}",
        "verdict": verdicts[side.correct],
        "cells": [_cell(side, place) for place in range(len(side.pieces))],
    }


def _cell(side: Side, place: int) -> dict[str, Any]:
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
        "t": f"{0.0 if math.isnan(t) else t:.3f}",
        "title": f"position {place + 1}, {when}",
        "breaks": breaks,
    }


__all__ = ["Panels", "Table", "render"]
