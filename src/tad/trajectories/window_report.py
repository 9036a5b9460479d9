"""The window as it is kept and told: the curve and its crossings, window.json beside a store, and the same in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.files import write_json

WINDOW = "window.json"
FEW = 32  # trajectories below which a window is a guess
LEVELS = {"quality": 0.5, "speed": 0.2}


@dataclass(frozen=True)
class Decay:
    """The curve. Entry d - 1 of each list belongs to distance d."""

    mean: list[float]
    low: list[float]  # 95 % bootstrap interval over trajectories
    high: list[float]
    count: list[int]  # positions behind each mean
    trajectories: int
    states: int
    filler: bool  # whether end filler counts


@dataclass(frozen=True)
class Window:
    """Where the curve falls to a level: the crossing, the whole number to use, and the interval of the crossing."""

    level: float
    crossing: float  # nan where the curve does not fall so far within the measured steps; the window then is their cap
    window: int
    low: float
    high: float

    @property
    def reached(self) -> bool:
        return not math.isnan(self.crossing)

    def __str__(self) -> str:
        if self.reached:
            return f"{self.window} ({self.low:.1f} to {self.high:.1f})"
        return f"{self.window}, the cap: {self.level} is not reached"


@dataclass(frozen=True)
class WindowReport:
    """What `tad window` writes."""

    order: str
    model: str
    decay: Decay
    with_filler: Decay
    windows: dict[str, Window]
    of: str = "confidence"  # or acceptance, of a converted model's drafts

    @property
    def unit(self) -> str:
        """What a distance counts: steps until a reveal, or positions of a draft."""
        return "positions" if self.of == "acceptance" else "steps"


def write_report(report: WindowReport, folder: str | Path) -> None:
    """window.json beside the trajectories; recipes that say `window: quality` read it."""
    write_json(Path(folder) / WINDOW, asdict(report))


def read_report(folder: str | Path) -> WindowReport:
    """What `measure_window` wrote into a store's directory."""
    path = Path(folder) / WINDOW
    try:
        values = _with_nan(json.loads(path.read_bytes()))
        decay, filled = (Decay(**values[name]) for name in ("decay", "with_filler"))
        windows = {name: Window(**entry) for name, entry in values["windows"].items()}
        of = str(values.get("of", "confidence"))
        return WindowReport(values["order"], values["model"], decay, filled, windows, of)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise TadError(f"{path}: is not what 'tad window' writes; run 'tad window {folder}' again") from None


def read_window(folder: str | Path, window: int | str) -> int:
    """A window as recipes give it: a number, or `quality` / `speed` as measured by `tad window`."""
    if isinstance(window, int):
        return window
    if window not in LEVELS:
        raise TadError(f"window is a number, 'quality' or 'speed', not {window!r}")
    if not (Path(folder) / WINDOW).is_file():
        raise TadError(
            f"window '{window}' has not been measured: run 'tad window {folder}' first, or give a number"
        )
    return read_report(folder).windows[window].window


def explain_caps(used: Iterable[tuple[str, str | Path, int | str | None]]) -> str | None:
    """A sentence about the windows of (student, store, window as its recipe gives it) that are the cap of the measurement."""
    found: dict[str, None] = {}
    for student, folder, window in used:
        if window in LEVELS and (Path(folder) / WINDOW).is_file():
            measured = read_report(folder).windows[str(window)]
            if not measured.reached:
                found[f"{student} {measured}"] = None
    return f"Windows whose level the confidence does not fall to: {'; '.join(found)}." if found else None


def _with_nan(value: Any) -> Any:
    """JSON's null back to nan."""
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def keep_better_window(folder: Path, limit: int, states: int) -> None:
    """Refuse to replace a window that was measured in more states than these would be."""
    if not (folder / WINDOW).is_file():
        return
    try:
        before = read_report(folder).decay
    except TadError:  # damaged, so there is nothing to lose
        return
    if before.states > min(limit, before.trajectories) * states:
        raise TadError(
            f"{folder / WINDOW}: was measured in {before.states} states of {before.trajectories} trajectories, which is more "
            f"than --limit {limit} --states {states}; raise them, or replace it with --overwrite"
        )


def explain_windows(report: WindowReport) -> list[str]:
    """A line per window: where the curve falls to its level, or that it does not and what stands in."""
    lines = []
    for name, window in report.windows.items():
        if not window.reached:
            lines.append(
                f"{name} window {window.window}, the cap: {report.of} does not fall to {window.level} within the {window.window} "
                f"{report.unit} that were measured (it is {report.decay.mean[-1]:.2f} there), so all of those count as near"
            )
        else:
            lines.append(
                f"{name} window {window.window}: {report.of} falls to {window.level} after {window.crossing:.1f} "
                f"{report.unit} (95 %: {window.low:.1f} to {window.high:.1f})"
            )
    if report.decay.trajectories < FEW:
        lines.append(
            f"WARNING: measured on {report.decay.trajectories} trajectories; with fewer than {FEW} the windows are a guess"
        )
    sizes = [window.window for window in report.windows.values()]
    if len(set(sizes)) < len(sizes):
        lines.append("the windows are equal, so students that differ in them alone are the same student")
    return lines


def show_decay(report: WindowReport) -> list[str]:
    """The curve at a few distances."""
    marks = [d for d in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128) if d <= len(report.decay.mean)]
    values = {
        "position" if report.unit == "positions" else "steps to reveal": [f"{d:>7d}" for d in marks],
        report.of: [f"{report.decay.mean[d - 1]:>7.3f}" for d in marks],
        "positions": [f"{report.decay.count[d - 1]:>7d}" for d in marks],
    }
    return [f"{name:15s}  " + "".join(cells) for name, cells in values.items()]
