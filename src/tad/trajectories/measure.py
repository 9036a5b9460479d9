"""`tad window` without its printing: measure the decay on a store, write window.json and its picture, read and explain them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tad.errors import TadError
from tad.models import LM
from tad.trajectories.store import Trajectory, TrajectoryStore
from tad.trajectories.summary import plot_decay
from tad.trajectories.window import Decay, Window, WindowReport, choose_windows, measure_decay, write_report

WINDOW = "window.json"


def spread_rows(store: TrajectoryStore, limit: int) -> list[Trajectory]:
    """At most `limit` trajectories at equal distances over the store, whose tasks stand one after the other."""
    rows = list(store.rows())
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(limit, len(rows))).round().astype(int))
    return [rows[index] for index in chosen]


def measure_window(
    lm: LM,
    store: TrajectoryStore,
    limit: int = 256,
    states: int = 8,
    distances: int | None = None,
    batch_size: int = 16,
    use_adapter: bool = False,
) -> WindowReport:
    """Measure on trajectories from all over the store, up to half of the canvas by default, and write the report there."""
    decay, filled, sums = measure_decay(
        lm,
        spread_rows(store, limit),
        states,
        distances or max(2, store.meta.gen_length // 2),
        batch_size,
        use_adapter=use_adapter,
    )
    order = str(store.meta.recipe.get("order", "teacher"))
    report = WindowReport(order, store.meta.model, decay, filled, choose_windows(decay, sums))
    plot_decay(report, store.folder / "window")
    write_report(report, store.folder)  # last: its presence says that the measurement is complete
    return report


def explain_windows(report: WindowReport) -> list[str]:
    """A line per window: where the curve falls to its level, or that it does not and what stands in."""
    lines = []
    for name, window in report.windows.items():
        if math.isnan(window.crossing):
            lines.append(
                f"{name} window {window.window}: confidence does not fall to {window.level} within the {window.window} steps "
                f"that were measured (it is {report.decay.mean[-1]:.2f} there), so all of those count as near"
            )
        else:
            lines.append(
                f"{name} window {window.window}: confidence falls to {window.level} after {window.crossing:.1f} steps "
                f"(95 %: {window.low:.1f} to {window.high:.1f})"
            )
    sizes = [window.window for window in report.windows.values()]
    if len(set(sizes)) < len(sizes):
        lines.append("the windows are equal, so students that differ in them alone are the same student")
    return lines


def show_decay(report: WindowReport) -> list[str]:
    """The curve at a few distances."""
    marks = [d for d in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128) if d <= len(report.decay.mean)]
    values = {
        "steps to reveal": [f"{d:>7d}" for d in marks],
        "confidence": [f"{report.decay.mean[d - 1]:>7.3f}" for d in marks],
        "positions": [f"{report.decay.count[d - 1]:>7d}" for d in marks],
    }
    return [f"{name:15s}  " + "".join(cells) for name, cells in values.items()]


def read_report(folder: str | Path) -> WindowReport:
    """What `measure_window` wrote into a store's directory."""
    path = Path(folder) / WINDOW
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        decays = [Decay(**_with_nan(values[name])) for name in ("decay", "with_filler")]
        windows = {name: Window(**_with_nan(entry)) for name, entry in values["windows"].items()}
        return WindowReport(values["order"], values["model"], decays[0], decays[1], windows)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise TadError(f"{path}: is not what 'tad window' writes; run it again") from None


def _with_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON's null back to nan."""

    def back(value: Any) -> Any:
        if isinstance(value, list):
            return [back(item) for item in value]
        return math.nan if value is None else value

    return {key: back(value) for key, value in values.items()}
