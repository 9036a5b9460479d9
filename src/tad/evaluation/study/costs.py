"""What students took: optimizer steps, rollouts and their forwards, all rounds up to a student together.

A store keeps what it cost in a small file of its own, which stays with a study where the trajectories do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tad.files import write_json, write_whole
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.summary import summarise

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

    def plus(self, steps: int, store: Path) -> StudentCost | None:
        """With one more round; None where its store does not say what it cost."""
        if not (store / COST).is_file():
            return None
        found = json.loads((store / COST).read_text(encoding="utf-8"))
        spent = {
            name: getattr(self, name) + found[name] for name in ("rollouts", "forwards", "kept", "unaided")
        }
        return StudentCost(self.student, self.steps + steps, **spent)


def add_rounds(student: str, rounds: Sequence[tuple[int, Path]]) -> StudentCost | None:
    """The cost of (optimizer steps, store) of every round; None where a store is not collected yet."""
    total: StudentCost | None = StudentCost(student, 0, 0, 0, 0, 0)
    for steps, store in rounds:
        total = None if total is None else total.plus(steps, store)
    return total


def write_cost(store: TrajectoryStore) -> None:
    """Beside a store that is complete."""
    found = summarise(store)
    write_json(store.folder / COST, {name: getattr(found, name) for name in _OF_STORE})


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
