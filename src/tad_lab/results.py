"""Published results: JSON files in results/ with the rows of every problem, and the pages that quote them.

    python -m tad_lab.results                      # writes the tables between the marks of README and docs anew

A file says what made it (command, commit, machine, versions) and holds entries with rows per problem. A page quotes it in two ways,
both of which a test compares with the file:

    <!-- results: claims -->                       a table; what stands between the two marks is written by this module
    <!-- /results -->
    81.9 @ 8.52<!-- claims/nano-llada-speed -->     one number: right answers in percent, and tokens per forward
"""

from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tad.errors import TadError
from tad.files import write_whole

SCHEMA = 1
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_QUOTE = re.compile(r"([\d.]+ @ [\d.]+)<!-- ([\w-]+)/([\w.-]+) -->")


@dataclass(frozen=True)
class Shown:
    """Means over the task families, as everywhere: right answers in percent with their standard error, tokens per forward."""

    n: int
    accuracy: float
    se: float
    tpf: float

    @property
    def text(self) -> str:
        return f"{self.accuracy:.1f} ± {self.se:.1f} @ {self.tpf:.2f}"

    @property
    def quoted(self) -> str:
        return f"{self.accuracy:.1f} @ {self.tpf:.2f}"


def show(entry: dict[str, Any]) -> Shown:
    """Rows are (task, id, question, correct, tokens, forwards, ...); rows without a verdict are left out of the accuracy."""
    by_task: dict[str, list[list[Any]]] = {}
    for row in entry["rows"]:
        by_task.setdefault(row[0], []).append(row)
    accuracy, variance, tpf = [], [], []
    for rows in by_task.values():
        right = np.array([row[3] for row in rows if row[3] is not None], dtype=float)
        tpf.append(sum(row[4] for row in rows) / sum(row[5] for row in rows))
        if len(right):
            accuracy.append(right.mean())
            variance.append(right.var(ddof=1) / len(right) if len(right) > 1 else math.nan)
    k = len(accuracy)
    if not k:
        return Shown(len(entry["rows"]), math.nan, math.nan, float(np.mean(tpf)))
    return Shown(
        len(entry["rows"]),
        100 * float(np.mean(accuracy)),
        100 * math.sqrt(sum(variance)) / k,
        float(np.mean(tpf)),
    )


def read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json.gz"
    if not path.is_file():
        raise TadError(
            f"{path}: no such results; they are in the repository's folder results/, give it as --results"
        )
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    if found.get("schema") != SCHEMA:
        raise TadError(f"{path}: schema {found.get('schema')!r}, this version reads {SCHEMA}")
    return found


def write(folder: Path, name: str, command: str, entries: dict[str, Any] | None = None, **facts: Any) -> Path:
    """The same entries give the same bytes, but for the date and the commit."""
    record = {
        "schema": SCHEMA,
        "command": command,
        "commit": _commit(),
        "date": date.today().isoformat(),
        "machine": facts.pop("machine", "CPU, fp32, one thread per process"),
        "versions": {package: version(package) for package in ("torch", "transformers", "numpy")},
        **facts,
    } | ({} if entries is None else {"entries": entries})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), 9, mtime=0))
    return path


def _commit() -> str | None:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def table_of_claims(record: dict[str, Any]) -> str:
    lines = ["| model | decoder | right, % @ TPF | problems |", "|---|---|---|---|"]
    for entry in record["entries"].values():
        found = show(entry)
        settings = ", ".join(f"{key} {value}" for key, value in entry["settings"].items())
        model = entry["adapter"] or entry["model"]
        lines.append(
            f"| {model}: {entry['title']} | `{entry['decoder']}`{', ' if settings else ''}{settings} | {found.text} | {found.n} |"
        )
    return "\n".join(lines) + "\n"


ORDERS = ("tad, teacher", "tad, left-to-right")


def table_of_squares(record: dict[str, Any]) -> str:
    """The methods at their default setting and at fixed speeds, the two orders against each other; and fixed speeds with the leftmost
    mask kept, whose own runs one token at a time are no measure of what is possible."""
    from tad.evaluation.analysis import RowSpec, analyse
    from tad.evaluation.factors import (
        PROBLEMS,
        SEEDS,
        AccuracyAt,
        Arm,
        Statistic,
        analyse_factors,
        tpf_at_target,
    )
    from tad.evaluation.tables import grid_results, grid_speeds

    lines = []
    for keep, title in (("best", "The most confident mask"), ("leftmost", "The leftmost mask")):
        methods = _squares(record, keep)
        base = methods.pop("base")
        specs = [RowSpec(name, name, one, len(one.seeds)) for name, one in {"base": base, **methods}.items()]
        table = analyse("squares", "squares", specs, base)
        speeds = grid_speeds(table, table.scopes)
        lines += [f"**{title}, beside all below the threshold:**", ""]
        if keep == "best":
            lines += [grid_results(table, table.scopes).markdown(), ""]
        lines += [speeds.markdown(), ""] if speeds else []
        if keep == "leftmost":
            break
        arms = [Arm("base", {"order": name == "tad, teacher"}, methods[name]) for name in ORDERS]
        reached = [set(row.scopes[table.scope].accuracy_at) for row in table.rows if row.method in ORDERS]
        measures: tuple[tuple[str, Statistic, int], ...] = (
            ("TPF at base - 1.5", tpf_at_target, 2),
            *(
                (f"accuracy at TPF {speed:g}, points", AccuracyAt(speed), 1)
                for speed in sorted(set.intersection(*reached))
            ),
        )
        lines += [
            "| the teacher's order less left to right | estimate | over problems | over seeds and problems |",
            "|---|---|---|---|",
        ]
        for name, statistic, digits in measures:
            (effect,) = analyse_factors(arms, {"base": base}, statistic)
            spans = [
                f"[{low:+.{digits}f}, {high:+.{digits}f}]"
                for low, high in (effect.over[PROBLEMS], effect.over[SEEDS])
            ]
            lines.append(f"| {name} | {effect.estimate.value:+.{digits}f} | {' | '.join(spans)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _squares(record: dict[str, Any], keep: str) -> dict[str, Any]:
    """The methods of bench/squares.py with one of its two decoders."""
    from tad.evaluation.measurement import MethodRuns, Outcomes
    from tad.evaluation.sweep import FIRST, Setting

    decoder = {"best": "tad", "leftmost": "tad-leftmost"}[keep]
    found: dict[str, MethodRuns] = {}
    for run in (run for run in record["runs"] if run["keep"] == keep):
        n = len(run["correct"])
        full = np.full(n, 25.0)
        outcomes = Outcomes(
            np.array(["squares"] * n, dtype=object),
            np.array([f"{i}" for i in range(n)], dtype=object),
            np.array(run["correct"], dtype=float),
            full,
            full,
            np.array(run["forwards"], dtype=float),
            full,
        )
        value = run["threshold"]
        setting = Setting(FIRST, {}) if value is None else Setting(decoder, {"threshold": value}, value)
        one = found.setdefault(
            run["method"], MethodRuns(run["method"], [], [], [], trained=run["seed"] is not None)
        )
        if run["seed"] not in one.seeds:
            one.seeds.append(run["seed"])
            one.runs.append([])
        if setting not in one.settings:
            one.settings.append(setting)
        one.runs[one.seeds.index(run["seed"])].append(outcomes)
    return found


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"claims": table_of_claims, "squares": table_of_squares}


def fill(text: str, folder: Path) -> str:
    """A page with its tables as the results say."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise TadError(f"a page asks for the table '{found[2]}'; known: {', '.join(TABLES)}")
        return found[1] + TABLES[found[2]](read(folder, found[2])) + found[4]

    return _BLOCK.sub(table, text)


def wrong_quotes(text: str, folder: Path) -> list[str]:
    """Quoted numbers that are not those of the results, in words."""
    found = []
    for number, name, key in _QUOTE.findall(text):
        entries = read(folder, name).get("entries", {})
        if key not in entries:
            found.append(f"{number}: {name} has no entry '{key}'")
        elif show(entries[key]).quoted != number:
            found.append(f"{number}: {name}/{key} says {show(entries[key]).quoted}")
    return found


def pages(root: Path) -> Iterable[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main() -> None:
    root = Path()
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        filled = fill(text, root / "results")
        if filled != text:
            write_whole(page, filled)
            print(f"written: {page}")
        for problem in wrong_quotes(filled, root / "results"):
            print(f"{page}: {problem}")


if __name__ == "__main__":
    main()
