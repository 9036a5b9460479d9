"""What was tried before a method was chosen: trials on problems that are not the test's, their scores, and their table."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tad.evaluation.tables import Grid, GridGroup, cells
from tad.pipeline.recipe import Values
from tad.runs.identity import flatten


@dataclass(frozen=True)
class TrialResult:
    """What a trial changes, and what came of it; None while it has not been run."""

    method: str
    title: str
    number: int
    changes: Values
    score: float | None = None
    accuracy: float | None = None  # at its best setting
    tpf: float | None = None  # at the target accuracy; None where it is not reached
    chosen: bool = False


@dataclass(frozen=True)
class Tuning:
    """All trials of a study."""

    trials: list[TrialResult]
    seed: int
    tasks: str
    tolerance: float

    @property
    def count(self) -> int:
        """Trials of a method."""
        return max((trial.number + 1 for trial in self.trials), default=0)

    def grid(self) -> Grid:
        head = [
            "method",
            "trial",
            "changes",
            "best accuracy %",
            f"TPF at base - {self.tolerance:g}",
            "chosen",
        ]
        rows = []
        for trial in self.trials:
            changed = flatten(trial.changes).items()
            changes = ", ".join(
                f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in changed
            )
            numbers = ("not run yet", "")
            if trial.accuracy is not None:
                numbers = (
                    f"{trial.accuracy:.1f}",
                    "not reached" if trial.tpf is None else f"{trial.tpf:.2f}",
                )
            chosen = "yes" if trial.chosen else ""
            rows.append(cells(trial.title, str(trial.number), changes or "none", *numbers, chosen))
        return Grid("Trials", head, [GridGroup("", rows)])

    def markdown(self) -> str:
        about = f"{self.count} trials for each method, seed {self.seed}, on {self.tasks}; the test problems were not used."
        return "\n".join(["### Tuning", "", self.grid().markdown(), "", about]) + "\n"
