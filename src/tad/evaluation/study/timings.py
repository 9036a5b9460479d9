"""How long pieces of work took, and how long their like may take. A file of JSON lines, added to by every call."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from tad.files import append_lines, read_lines


class Timings:
    """`kind` is the kind of work (collect, train, answer), `what` its name: a store, an objective, a setting."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, what: str, began: float) -> None:
        """Work that began at a time of the monotonic clock and has just ended."""
        seconds = round(time.monotonic() - began, 3)
        append_lines(self.path, [{"kind": kind, "what": what, "seconds": seconds}])

    def typical(self, kind: str, what: str) -> float | None:
        """The median of the same kind of work, of the same name where there is one; None where there was none."""
        lines = list(read_lines(self.path)) if self.path.is_file() else []
        alike = [line for line in lines if line["kind"] == kind]
        same = [line["seconds"] for line in alike if line["what"] == what]
        found = same or [line["seconds"] for line in alike]
        return statistics.median(found) if found else None
