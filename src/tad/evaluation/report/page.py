"""The page: what was gathered, as one HTML file without anything outside it. Text is escaped by the template engine."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import tad
from tad.evaluation.files import finite
from tad.evaluation.report import rows as tables
from tad.evaluation.report.board import POOLED, Board, Method, as_record
from tad.evaluation.report.data import Gathered
from tad.evaluation.report.palette import DARK, LIGHT, Look, css_variables
from tad.evaluation.report.plots import Panel, as_svg, css_class
from tad.evaluation.report.replay import Scene, Side
from tad.evaluation.report.rows import SMOKE, Table
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


def render(
    found: Gathered,
    boards: Sequence[Board],
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
        lede=_lede(found, boards),
        facts=_facts(found, boards),
        smoke=_smoke(found, boards, smoke),
        notes=list(dict.fromkeys(found.notes)),
        boards=[
            {
                "name": board.name,
                "about": _about(board),
                "legend": [
                    {"label": method.label, "look": looks[method], "slot": css_class(method)}
                    for method in board.methods
                ],
                "curves": _figures(panels.curves[number], smoke),
                "areas": _figures(panels.areas[number], smoke),
                "main": tables.main_table(board, looks, smoke),
                "points": tables.points_table(board, looks, smoke),
                "pairs": tables.pair_tables(board, looks, smoke),
            }
            for number, board in enumerate(boards)
        ],
        has_areas=any(panels.areas),
        has_pairs=any(board.pairs for board in boards),
        y_max_note=_y_max_note(boards),
        resamples=f"{resamples:,}",
        scenes=[_scene(scene) for scene in scenes],
        no_replay=_no_replay(found.notes),
        decays=_figures(panels.decays, smoke),
        teachers=_figures(panels.teachers, smoke),
        losses=_figures(panels.losses, smoke),
        stores=tables.store_table(found.stores),
        trainings=tables.training_table(found.trainings),
        sources=tables.source_table(found),
        version=tad.__version__,
        commit=(find_commit() or "")[:12],
        made=time.strftime("%d %B %Y, %H:%M UTC", time.gmtime()),
        markers=_MARKERS,
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        style=Markup((_PARTS / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        data=_embedded(found, boards),
    )


def _figures(panels: Sequence[Panel], smoke: bool) -> list[dict[str, Any]]:
    return [
        {"title": panel.title, "svg": Markup(as_svg(panel)), "smoke": smoke or panel.n < SMOKE}
        for panel in panels
    ]


def _embedded(found: Gathered, boards: Sequence[Board]) -> Markup:
    """The numbers as JSON that cannot end its script element."""
    values = {
        "boards": [as_record(board) for board in boards],
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


# Words at the top


def _lede(found: Gathered, boards: Sequence[Board]) -> str:
    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    parts = []
    if boards:
        runs = sum(len(board.runs) for board in boards)
        methods = len({method for board in boards for method in board.methods})
        parts.append(
            f"{count(methods, 'method', 'methods')} on {_listed([board.name for board in boards])}, "
            f"from {count(runs, 'evaluation run', 'evaluation runs')}"
        )
    if found.trainings:
        parts.append(count(len(found.trainings), "training run", "training runs"))
    if found.stores:
        kept = sum(store.summary.kept for store in found.stores)
        parts.append(
            f"{count(len(found.stores), 'trajectory store', 'trajectory stores')} with {kept:,} trajectories"
        )
    return f"{_listed(parts)}." if parts else "Nothing was found in the directories given."


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _facts(found: Gathered, boards: Sequence[Board]) -> list[tuple[str, str]]:
    origins = [run.origin for run in found.runs] + [run.origin for run in found.trainings]
    examples = sorted(
        {
            line.curve.n
            for board in boards
            for line in board.lines
            if line.curve.task != POOLED or len(board.questions) == 1
        }
    )
    facts: dict[str, list[str | None]] = {
        "examples per task": [f"{n:,}" for n in examples],
        "machines": [origin.device for origin in origins],
        "commits": [origin.commit and origin.commit[:10] + origin.commit[40:] for origin in origins],
        "sampling seeds": [str(run.meta.seed) for run in found.runs],
        "training seeds": [str(run.seed) for run in found.trainings if run.seed is not None],
        "precision": [run.meta.dtype for run in found.runs],
        "positions generated": [str(run.meta.gen_length) for run in found.runs],
    }
    shown = []
    for name, values in facts.items():
        known = list(dict.fromkeys(value for value in values if value))
        if known:
            more = f" and {len(known) - 4} more" if len(known) > 4 else ""
            shown.append((name, ", ".join(known[:4]) + more))
    return shown


def _smoke(found: Gathered, boards: Sequence[Board], smoke: bool) -> str:
    """Why numbers here are not to be relied on; empty where they may be."""
    small = sorted(
        {
            line.curve.n
            for board in boards
            for line in board.lines
            if line.curve.n < SMOKE and line.curve.task != POOLED
        }
    )
    least = f" Tasks have as few as {small[0]} examples." if small else ""
    if smoke:
        return f"This run shows that everything works, not how well.{least} Errors are wide; do not quote these numbers."
    if small:
        return f"Some numbers rest on fewer than {SMOKE} examples and are marked.{least} Their errors are wide; do not quote them."
    return ""


def _about(board: Board) -> str:
    metas = [run.meta for run, _ in board.runs]
    parts = [
        f"family {board.family}",
        f"split {'/'.join(board.splits)}",
        "/".join(dict.fromkeys(meta.dtype for meta in metas)),
        f"gen_length {'/'.join(dict.fromkeys(str(meta.gen_length) for meta in metas))}",
    ]
    return ", ".join(parts)


def _y_max_note(boards: Sequence[Board]) -> str:
    sources = {source for board in boards for source in board.y_max_from.values()}
    if sources == {"given"}:
        return "as given"
    where = "the highest accuracy of any point on that task and base"
    return f"as given for some tasks, else {where}" if "given" in sources else where


def _no_replay(notes: Sequence[str]) -> str:
    """The reason, from the notes, or what a replay needs."""
    found = next((note for note in notes if note.startswith("replay")), None)
    return (
        found
        or "A replay needs evaluation runs of a base and a student, or --model to decode an example now."
    )


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
