"""The directory of a run: whose it is, its rows, its summary and its record.

    eval.json      the run's identity; a directory is continued only by the run it belongs to
    rows.jsonl     one row per example, in the order of the data
    summary.json   accuracy, tokens per forward and their standard errors
    run.json       every call: time, machine, commit, arguments

While a run is under way its rows are in `part-*.jsonl`, one file per process, in the order they were finished. They become
`rows.jsonl` when the last one is there. A kill at any moment loses the rows in flight and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tad.evaluation.row import Key, Row
from tad.evaluation.summary import summarise
from tad.files import (
    append_lines,
    claim_described,
    cut_torn,
    open_described,
    read_lines,
    waiting,
    write_json,
    write_whole,
    writing,
)
from tad.runs.identity import find_difference
from tad.runs.record import last_call, read_record

SCHEMA_VERSION = 1
META = "eval.json"
_WHAT, _COMMAND = "run", "tad eval"
ROWS = "rows.jsonl"
SUMMARY = "summary.json"
_NAMES = ("source", "code")  # may differ between calls of one run


@dataclass(frozen=True)
class RunMeta:
    """What decides the rows of a run, and where its weights came from."""

    model: str  # fingerprint of the base weights
    adapter: str | None  # fingerprint of the adapter
    tokenizer: str
    family: str
    dtype: str
    decoder: dict[str, Any]  # name, parts and every parameter
    gen_length: int
    seed: int
    tasks: list[dict[str, Any]]
    source: dict[str, Any]  # model and adapter as they were named
    code: str = ""
    schema_version: int = SCHEMA_VERSION

    def difference(self, other: RunMeta) -> str | None:
        """The first thing that differs, in words: 'decoder.threshold is 0.5 there and 0.4 here'."""
        found = find_difference(self.content_hash_fields(), other.content_hash_fields())
        return None if found is None else str(found)

    def content_hash_fields(self) -> dict[str, Any]:
        values = {key: value for key, value in asdict(self).items() if key not in _NAMES}
        values["tasks"] = {entry["name"]: entry for entry in self.tasks}
        return values

    @property
    def planned(self) -> int:
        """How many rows the whole run has."""
        return sum(entry["examples"] * len(entry["templates"]) for entry in self.tasks)


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, without reading its rows; empty where there is none."""
    path = folder / SUMMARY
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def is_whole(folder: Path) -> bool:
    """Whether every row of a run is there, graded or not, without reading them; not of what is no run."""
    return bool(read_summary(folder).get("complete", False))


class Results:
    """A run on disk."""

    def __init__(self, folder: Path, meta: RunMeta) -> None:
        self.folder, self.meta = folder, meta

    @classmethod
    def open(cls, folder: str | Path) -> Results:
        """A run that exists."""
        folder = Path(folder)
        return cls(folder, open_described(folder / META, RunMeta, SCHEMA_VERSION, _WHAT, _COMMAND))

    @classmethod
    def open_or_create(cls, folder: str | Path, meta: RunMeta) -> Results:
        """The run at `folder` if it is the one described by `meta`, or a new one there."""
        folder = Path(folder)
        return cls(folder, claim_described(folder / META, meta, _WHAT, _COMMAND))

    @cached_property
    def call(self) -> dict[str, Any]:
        """The last call of the run's record: machine, commit, time and versions."""
        return last_call(read_record(self.folder))

    @contextmanager
    def writing(self, rank: int = 0, world: int = 1) -> Iterator[None]:
        """Hold the right to add rows, by rank; see `files.writing`."""
        with writing(self.folder, rank, world):
            self._part = self.folder / f"part-{rank:05d}.jsonl"
            if self._part.exists():
                cut_torn(self._part)
            yield

    def add(self, rows: Sequence[Row]) -> None:
        """Add finished rows; not while another process puts rows together and drops the files they came from."""
        with self.quiet():
            append_lines(self._part, [row.as_record() for row in rows])

    def rows(self) -> list[Row]:
        """All rows there are, in the order of the data where the run is complete. A verdict is never lost to a line
        without one: rows may have been graded by another process than the one that wrote them."""
        found: dict[Key, Row] = {}
        whole = self.folder / ROWS
        paths = ([whole] if whole.exists() else []) + sorted(self.folder.glob("part-*.jsonl"))
        for path in paths:
            for number, values in enumerate(read_lines(path), start=1):
                row = Row.from_record(values, f"{path}:{number}")
                if row.correct is not None or row.key not in found or found[row.key].correct is None:
                    found[row.key] = row
        return list(found.values())

    def settle(self, order: Sequence[Key], rows: Sequence[Row]) -> None:
        """Make `rows.jsonl` and the summary of these rows, in `order`, and drop the parts they came from."""
        by_key = {row.key: row for row in rows}
        ordered = [by_key[key] for key in order if key in by_key]
        lines = (json.dumps(row.as_record(), ensure_ascii=False) + "\n" for row in ordered)
        write_whole(self.folder / ROWS, "".join(lines))
        for part in self.folder.glob("part-*.jsonl"):
            part.unlink()
        self.summarise(ordered)

    def close(self, order: Sequence[Key]) -> None:
        """At the end of a process: `settle` if every row of the run is there, else sum up those that are."""
        with self.quiet():
            rows = self.rows()
            if {row.key for row in rows} == set(order):
                self.settle(order, rows)
            else:
                self.summarise(rows)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While no other process of the run replaces files."""
        with waiting(self.folder, "quiet"):
            yield

    def summarise(self, rows: Sequence[Row]) -> None:
        """Write `summary.json`."""
        complete = len(rows) == self.meta.planned
        write_json(self.folder / SUMMARY, {"run": asdict(self.meta), "complete": complete, **summarise(rows)})

    def is_complete(self) -> bool:
        """Whether every row is there, graded or not."""
        return is_whole(self.folder)
