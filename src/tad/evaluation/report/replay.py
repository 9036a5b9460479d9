"""Replays: one example decoded by the base and by a student, as token cells that know at which forward they were revealed.

They come from the rows of runs, which keep token ids and reveal steps, or from decoding the example now (`decode_scenes`).
Which example is shown is decided by rule: of those that both sides answer right, the one with the median gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tad.canvas.text import spell_pieces
from tad.decoding import Decoded, decode, get_decoder
from tad.errors import TadError
from tad.evaluation.analysis import ResultTable
from tad.evaluation.labels import BASE, path_name
from tad.evaluation.methods import RunGroup
from tad.evaluation.questions import Item
from tad.evaluation.results import Results, RunMeta
from tad.evaluation.row import Key, Row
from tad.evaluation.run import questions_of
from tad.evaluation.sweep import FIRST
from tad.evaluation.tables import describe_setting
from tad.evaluation.verdict import rank_rows
from tad.models import LM, load
from tad.models.source import bundled_models
from tad.runs.fingerprint import fingerprint_tokenizer, row_seed
from tad.trajectories.privileged import plain_ids

_SCENES = 4  # one per task, at most


@dataclass(frozen=True)
class CanvasCell:
    """A position of the canvas."""

    text: str
    step: int  # the forward that revealed it; 0: filler after the end
    kind: str  # "text", "end" of the answer, or "filler" behind it


@dataclass(frozen=True)
class Side:
    """One decode of the example."""

    label: str
    setting: str
    cells: list[CanvasCell]
    forwards: int
    tokens: int  # content, the first end token included
    correct: bool | None


@dataclass(frozen=True)
class Scene:
    """One example, decoded by two."""

    title: str
    prompt: str
    why: str  # this example
    sides: tuple[Side, Side]

    @property
    def last(self) -> int:
        """The forward after which both are done."""
        return max(side.forwards for side in self.sides)


# From rows


def replay_rows(group: RunGroup, table: ResultTable, example: str | None, notes: list[str]) -> list[Scene]:
    """A scene per task, from the rows of the base one token at a time and of the method that the verdict is about."""
    chosen = [row.method for row in rank_rows(table) if not row.scopes[table.scope].setting.startswith(FIRST)]
    if f"{BASE}, {FIRST}" not in group.folders or not chosen:
        notes.append(
            f"replay of {group.base}: needs a run of the base with '{FIRST}' and another run beside it"
        )
        return []
    methods = [method for method in group.methods if method.name in (f"{BASE}, {FIRST}", chosen[0])]
    places = [method.default_point for method in methods]
    runs = [Results.open(group.folders[one.name][0][at]) for one, at in zip(methods, places, strict=True)]
    answers = [{row.key: row for row in run.rows() if row.ids and row.steps} for run in runs]
    shared = [key for key in answers[0] if key in answers[1] and key[0] in group.tasks]
    if not shared:
        notes.append(
            f"replay of {group.base}: the rows are without token ids; give --model (and --adapter) to decode an example now"
        )
        return []
    speller = find_speller(runs[0].meta)
    if speller is None:
        notes.append(
            f"replay of {group.base}: its tokenizer is not at {runs[0].meta.source['model']}, so token ids are shown; give --model"
        )
    scenes = []
    for key, why in _choose(shared, answers, example):
        sides = []
        for method, at, rows in zip(methods, places, answers, strict=True):
            row, setting = rows[key], describe_setting(method.settings[at].name)
            cells = lay_out(speller, row.ids, row.steps, row.tokens)
            sides.append(Side(method.name, setting, cells, row.forwards, row.tokens, row.correct))
        prompt = _readable(speller, answers[0][key].prompt)
        scenes.append(Scene(_title(key), prompt, why, (sides[0], sides[1])))
    return scenes


def _choose(
    shared: Sequence[Key], tables: Sequence[dict[Key, Row]], example: str | None
) -> list[tuple[Key, str]]:
    """Per task the example with the median gain among those both have right; or the one asked for."""
    if example is not None:
        return [(key, "chosen by hand") for key in shared if key[2] == example]
    chosen = []
    for task in dict.fromkeys(key[0] for key in shared):
        mine = [key for key in shared if key[0] == task]
        right = [key for key in mine if all(table[key].correct for table in tables)]
        pool = right or mine
        gains = sorted(
            (tables[0][key].forwards / max(1, tables[1][key].forwards), key[2], key) for key in pool
        )
        among = "that both answer right" if right else "(none is right on both sides)"
        why = f"the median gain in forwards of {len(pool)} examples {among}"
        chosen.append((gains[(len(gains) - 1) // 2][2], why))
    return chosen[:_SCENES]


def _title(key: Key) -> str:
    task, template, name = key
    shown = name if name.startswith(task) else f"{task}, {name}"
    return shown if template == "tad" else f"{shown} ({template})"


def find_speller(meta: RunMeta) -> LM | None:
    """The run's tokenizer, as a model without weights; None where it is not on this machine."""
    source = str(meta.source["model"])
    if not Path(source).expanduser().is_dir() and source not in bundled_models():
        return None
    try:
        speller = load(source, weights=False)
    except TadError:
        return None
    return speller if fingerprint_tokenizer(speller) == meta.tokenizer else None


def lay_out(speller: LM | None, ids: Sequence[int], steps: Sequence[int], tokens: int) -> list[CanvasCell]:
    """The canvas of an answer whose first `tokens` positions are content."""
    content = ids[:tokens]
    if speller is None:
        cells = [
            CanvasCell(f"{token} ", step, "text") for token, step in zip(content, steps[:tokens], strict=True)
        ]
    else:
        ends = speller.tokens.ends
        pieces = spell_pieces(content, lambda some: speller.decode(some, skip_special=False), ends)
        cells = [
            CanvasCell("■", step, "end") if token in ends else CanvasCell(text, step, "text")
            for token, text, step in zip(content, pieces, steps[:tokens], strict=True)
        ]
    return cells + [CanvasCell("·", step, "filler") for step in steps[tokens:]]


def _readable(speller: LM | None, prompt: str) -> str:
    """A prompt without the chat's special tokens."""
    if speller is not None and speller.tokenizer is not None:
        prompt = prompt.removesuffix(speller.family.assistant_header)
        for token in sorted(speller.tokenizer.all_special_tokens, key=len, reverse=True):
            prompt = prompt.replace(token, "")
    return prompt.strip()


# From a decode now


@dataclass(frozen=True)
class Live:
    """Models to decode a replay with, instead of taking it from rows: the base one token at a time, and the student, or the
    base without one, with `decoder`."""

    base: LM
    student: LM | None = None
    decoder: str = "tad"
    prompt: str | None = None
    gen_length: int | None = None


def decode_scenes(live: Live, runs: Sequence[Path], example: str | None = None) -> list[Scene]:
    """Decode now: the prompt, or the first example of each task of the first run, or the one of that id."""
    if live.prompt is not None:
        ids, length = live.base.encode(live.prompt), live.gen_length or 128
        sides = _decode_sides(live, ids, length, None)
        return [Scene("a prompt of your own", live.prompt, "given on the command line", sides)]
    if not runs:
        raise TadError("a replay needs a question: give --prompt, or a directory with evaluation runs")
    results = Results.open(runs[0])
    items = questions_of(results).items
    if example is not None:
        chosen, why = [item for item in items if item.example.id == example], "chosen by hand"
        if not chosen:
            raise TadError(f"--example {example}: not an example of {runs[0]}")
    else:
        chosen = list({item.label: item for item in reversed(items)}.values())[::-1][:_SCENES]
        why = "the first of the task; decoded for this report"
    scenes = []
    for item in chosen:
        ids = plain_ids(live.base, item.task, item.example, item.template)
        sides = _decode_sides(live, ids, live.gen_length or results.meta.gen_length, item)
        scenes.append(Scene(_title(item.key), item.prompt.text, why, sides))
    return scenes


def _decode_sides(live: Live, ids: list[int], length: int, item: Item | None) -> tuple[Side, Side]:
    student = BASE if live.student is None else path_name(str(live.student.adapter))
    seed = 0 if item is None else row_seed(0, item.example.id, 0)
    sides = []
    for lm, name, decoder in ((live.base, BASE, FIRST), (live.student or live.base, student, live.decoder)):
        row = decode(lm, [ids], decoder, length, seed)[0]
        threshold = getattr(get_decoder(decoder, lm.family.name).rule, "threshold", None)
        setting = "one token" if decoder == FIRST else f"threshold {threshold:g}" if threshold else ""
        tokens = len(row.content)
        cells = lay_out(lm, row.tokens, row.steps, tokens)
        sides.append(Side(f"{name}, {decoder}", setting, cells, row.forwards, tokens, _grade(lm, row, item)))
    return sides[0], sides[1]


def _grade(lm: LM, row: Decoded, item: Item | None) -> bool | None:
    if item is None:
        return None
    try:
        return item.task.grade(item.example, item.prompt.cut(lm.decode(row.answer))).correct
    except TadError:  # no sandbox here: the replay is shown without a verdict
        return None
