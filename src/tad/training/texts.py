"""Texts as trajectories: rows of questions and answers, tasks' solutions and stores of generations, for `tad convert`.

A text is a trajectory from left to right: its prompt, its answer's tokens, and reveal steps 1, 2, ... Rows are samples of their own:
none sees another. What a row of a file may hold is checked here, and named by file and line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tad.errors import TadError
from tad.models import LM
from tad.runs.fingerprint import row_seed
from tad.tasks import get_task, task_names
from tad.tasks.source import SUFFIXES, Row, read_rows
from tad.training.recipe import TextSection
from tad.training.states import TrajectorySet, check_store
from tad.trajectories.privileged import plain_ids
from tad.trajectories.store import META, TrajectoryStore

_WHOLE = 2**62  # a hash of a row, as a share of this, decides what a weight leaves out


@dataclass(frozen=True)
class Text:
    """A question and its answer, as tokens."""

    id: str
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Texts:
    """What a conversion is trained on and measured on, and what was left out."""

    trained: TrajectorySet
    held_out: TrajectorySet | None
    rows: int  # distinct ones that are trained on
    too_long: int


def read_texts(
    sections: Sequence[TextSection],
    lm: LM,
    longest: int,
    held_out: int,
    least: int,
    seed: int,
    data_dir: str | None = None,
) -> Texts:
    """All sections, mixed by their weights. Rows that are held out are chosen by a hash of their place; with fewer rows than
    `least`, the size of a batch, rows are repeated, under noise of their own each time."""
    found, too_long = list[tuple[Text, float]](), 0
    for number, section in enumerate(sections):
        rows = 0
        for text in _read_section(section, lm, data_dir):
            rows += 1
            if len(text.prompt) + len(text.answer) > min(longest, lm.context):
                too_long += 1
            else:
                found.append((Text(f"{number}/{text.id}", text.prompt, text.answer), section.weight))
            if rows == section.limit:
                break
        if not rows:
            raise TadError(f"{section.source}: no rows in it")
    if not found:
        raise TadError(
            f"all {too_long} rows are longer than {min(longest, lm.context)} tokens; raise longest, or give shorter ones"
        )
    order = sorted(range(len(found)), key=lambda i: row_seed(seed, found[i][0].id, -1))
    held = set(order[: min(held_out, len(found) // 10)])
    kept = [pair for i, pair in enumerate(found) if i not in held]
    trained = [copy for text, weight in kept for copy in _repeat(text, weight, seed)]
    if not trained:
        raise TadError("data: the weights leave no row to train on; raise them")
    again = math.ceil(least / len(trained))
    copies = [Text(f"{text.id}~{n}", text.prompt, text.answer) for n in range(1, again) for text in trained]
    return Texts(
        as_trajectories([*trained, *copies]),
        as_trajectories([found[i][0] for i in sorted(held)]) if held else None,
        len(kept),
        too_long,
    )


def as_trajectories(texts: Sequence[Text]) -> TrajectorySet:
    """Texts as trajectories that were revealed from left to right."""
    columns: dict[str, Any] = {
        "id": pa.array([text.id for text in texts], pa.string()),
        "n_real": pa.array([len(text.answer) for text in texts], pa.int32()),
    }
    lists = {
        "plain_ids": [text.prompt for text in texts],
        "privileged_ids": [text.prompt for text in texts],
        "tokens": [text.answer for text in texts],
        "reveal": [list(range(1, len(text.answer) + 1)) for text in texts],
    }
    columns |= {name: pa.array(values, pa.list_(pa.int32())) for name, values in lists.items()}
    return TrajectorySet(pa.table(columns))


def _repeat(text: Text, weight: float, seed: int) -> Iterator[Text]:
    """As often as the weight says; of what is less than once, a share of the rows chosen by a hash."""
    times, rest = int(weight), weight - int(weight)
    times += row_seed(seed, text.id, -2) % _WHOLE < rest * _WHOLE
    for number in range(times):
        yield text if number == 0 else Text(f"{text.id}*{number}", text.prompt, text.answer)


def _read_section(section: TextSection, lm: LM, data_dir: str | None) -> Iterator[Text]:
    source = section.source
    path = Path(source).expanduser()
    if (path / META).is_file():
        yield from _read_store(path, lm)
    elif path.is_file():
        for number, row in enumerate(read_rows(path)):
            yield _read_row(row, str(number), lm)
    elif source.endswith(SUFFIXES) or path.is_dir() or source.startswith((".", "/", "~")):
        what = "holds no trajectories" if path.is_dir() else "no such file"
        raise TadError(
            f"{source}: {what}; give a file of rows, a store made by 'tad collect' or a task ({', '.join(task_names())})"
        )
    else:
        task = get_task(source, data_dir=data_dir)
        split = section.split or ("train" if "train" in task.splits else None)
        for example in task.examples(split):
            solution = example.meta.get("solution") or example.reference
            if not solution:
                raise TadError(f"task '{source}': example {example.id} has no solution to learn")
            yield Text(example.id, plain_ids(lm, task, example), _answer(lm, str(solution)))


def _read_row(row: Row, name: str, lm: LM) -> Text:
    """A question and its answer, or a chat that ends with the assistant."""
    if "messages" in row.values:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise TadError(f"{row.place}: field 'messages' should be a list of messages")
        *before, last = messages
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or not before:
            raise TadError(f"{row.place}: field 'messages' should end with a message of the assistant")
        asked: Any = before
        answer = last["content"]
    else:
        asked, answer = row.text("question"), row["answer"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise TadError(f"{row.place}: field 'answer' should be a text, it is {type(answer).__name__}")
    answer = str(answer)
    if not answer.strip():
        raise TadError(f"{row.place}: the answer is empty")
    try:
        return Text(name, lm.encode(asked), _answer(lm, answer))
    except TadError as error:
        raise TadError(f"{row.place}: {error}") from None


def _answer(lm: LM, text: str) -> list[int]:
    """The answer's tokens and the one that ends the turn."""
    end = lm.tokens.eos if lm.tokens.eot is None else lm.tokens.eot
    return [*lm.encode_text(text), end]


def _read_store(folder: Path, lm: LM) -> Iterator[Text]:
    """The generations of a store, up to the end of each answer; of this model, whose own answers they are."""
    store = TrajectoryStore.open(folder)
    store.check_graded()
    check_store(store, lm)
    for row in store.rows():
        real = max((place + 1 for place, step in enumerate(row.reveal) if step <= row.n_real), default=0)
        if real:
            yield Text(row.id, row.plain_ids, row.tokens[:real])
