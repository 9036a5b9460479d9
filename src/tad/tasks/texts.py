"""Texts to be graded, from a file: paired with their examples, and their verdicts written beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.tasks.source import parse_json, read_lines
from tad.tasks.task import Example, Task, Verdict


def short_reason(reason: str) -> str:
    """A reason without what is particular to one text: 'program: NameError: x is ...' becomes 'program: NameError'."""
    return ":".join(reason.split("; ")[0].split(":")[:2])


def match_texts(task: Task, split: str | None, file: Path) -> list[tuple[Example, str]]:
    """Pair every text with its example, by id where texts have one, else by position."""
    examples = task.examples(split)
    by_id = {example.id: example for example in examples}
    pairs: list[tuple[Example, str]] = []
    for place, name, text in _read_texts(file):
        if name is not None:
            if name not in by_id:
                raise TadError(
                    f"{place}: no example '{name}' in this split (ids look like '{examples[0].id}')"
                )
            pairs.append((by_id[name], text))
        elif len(pairs) < len(examples):
            pairs.append((examples[len(pairs)], text))
        else:
            raise TadError(f"{place}: more texts than the {len(examples)} examples of the split")
    if not pairs:
        raise TadError(f"{file}: no texts to grade")
    return pairs


def _read_texts(file: Path) -> Iterator[tuple[str, str | None, str]]:
    """Place, id (if given) and text of each entry; a file gives ids to all of them or to none."""
    structured = file.name.endswith((".jsonl", ".jsonl.gz", ".json"))
    named: bool | None = None
    for place, line in read_lines(file):
        if not structured:
            yield place, None, line
        elif line.strip():
            name, text = _read_entry(parse_json(line, place), place)
            if named is not None and named != (name is not None):
                raise TadError(
                    f"{place}: some texts have an id and some have none; give one to all or to none"
                )
            named = name is not None
            yield place, name, text


def _read_entry(entry: Any, place: str) -> tuple[str | None, str]:
    if isinstance(entry, str):
        return None, entry
    if not isinstance(entry, dict):
        raise TadError(
            f"{place}: expected an object with 'text', or a string; this is {type(entry).__name__}"
        )
    if not isinstance(entry.get("text"), str):
        raise TadError(f"{place}: field 'text' is missing or not a string")
    name = entry.get("id")
    return (None if name is None else str(name)), entry["text"]


def write_verdicts(out: Path, pairs: list[tuple[Example, str]], verdicts: list[Verdict]) -> None:
    if not out.parent.is_dir():
        raise TadError(f"{out}: the directory does not exist")
    with out.open("w", encoding="utf-8") as lines:
        for (example, _), verdict in zip(pairs, verdicts, strict=True):
            row = {
                "id": example.id,
                "correct": verdict.correct,
                "reason": verdict.reason,
                "extracted": verdict.extracted,
            }
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
