"""What students took: optimizer steps, rollouts and their forwards, all rounds up to a student together.

A store keeps what it cost in a small file of its own, which stays with a study where the trajectories do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tad.files import write_json, write_whole
from tad.trajectories.summary import StoreSummary

COST = "cost.json"  # in a store's directory
_OF_STORE = ("rollouts", "forwards", "kept", "graded", "correct", "unaided")


@dataclass(frozen=True)
class StudentCost:
    """What a student took."""

    student: str
    steps: int  # of the optimizer
    rollouts: int
    forwards: int  # of rollouts, one row each
    kept: int  # trajectories
    unaided: int  # right without the reference, where it was shown where needed only


def add_rounds(student: str, rounds: Sequence[tuple[int, Path]]) -> StudentCost | None:
    """The cost of (optimizer steps, store) of every round; None where a store does not say what it cost."""
    files = [store / COST for _, store in rounds]
    if not all(file.is_file() for file in files):
        return None
    spent = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    names = ("rollouts", "forwards", "kept", "unaided")
    totals = {name: sum(one[name] for one in spent) for name in names}
    return StudentCost(student, sum(steps for steps, _ in rounds), **totals)


def write_cost(folder: Path, found: StoreSummary) -> None:
    """Beside a store that is complete."""
    write_json(folder / COST, {name: getattr(found, name) for name in _OF_STORE})


def write_costs(costs: Sequence[StudentCost], folder: Path) -> None:
    """A table of all students, as Markdown and JSON."""
    lines = [
        "### Costs",
        "",
        "| student | optimizer steps | rollouts | forwards of rollouts | trajectories | right without the reference |",
        "|---" * 6 + "|",
        *("| " + " | ".join(str(value) for value in asdict(cost).values()) + " |" for cost in costs),
        "",
        "All rounds up to a student together, of the first seed where there are several. A forward is one row's; rollouts that "
        "were wrong without the reference count too.",
    ]
    write_whole(folder / "costs.md", "\n".join(lines) + "\n")
    write_json(folder / "costs.json", [asdict(cost) for cost in costs])
