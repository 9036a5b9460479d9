"""A new objective: cross-entropy on all masks, the sooner the teacher reveals a token the more it counts.

    python examples/objective.py nano-llada runs/trajectories --out runs/sooner --steps 200

The data side (`views`, on the CPU) says what the student sees of a trajectory and what counts. The device side (`counts` and
`loss`) is here `TextObjective`'s: weighted cross-entropy over the global batch. For terms of another kind, such as a teacher's
distribution, write `counts` and `loss` too; `tad.training.objectives.tad` is 100 lines.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat

from tad.config import parse_recipe
from tad.training.distill import distill
from tad.training.objectives import OBJECTIVES, TextObjective, View
from tad.training.recipe import DistillRecipe
from tad.training.states import TrajectoryArrays


@dataclass(frozen=True)
class Sooner(TextObjective):
    """The weight of a mask falls by half every `half_life` steps until its reveal."""

    name: ClassVar[str] = "sooner"
    uses_steps: ClassVar[bool] = True  # `views` is given a state of the trajectory

    half_life: PositiveFloat = 8.0  # fields are settings, which a recipe names under `objective`

    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        assert step is not None
        distance = row.reveal - step  # [length]
        hidden = distance > 0
        weights = torch.where(hidden, 0.5 ** ((distance - 1) / self.half_life), 0.0)
        noisy = row.tokens.masked_fill(hidden, self.mask_token)
        return [View(row.id, prompt=row.plain_ids, noisy=noisy, labels=row.tokens, terms={"hard": weights})]


OBJECTIVES[Sooner.name] = Sooner  # from here on recipes may say `objective: {name: sooner}`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("store", help="made by `tad collect`")
    parser.add_argument("--out", type=Path, default=Path("runs/sooner"))
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    values = {
        "name": "sooner",
        "model": given.model,
        "trajectories": [given.store],
        "objective": {"name": "sooner", "half_life": 8},
        "states": 8,
        "learning": {"lr": 1e-3, "steps": given.steps},
        "batch": {"size": 16, "micro": 8},
        "report_to": [],
    }
    outcome = distill(parse_recipe(DistillRecipe, values), given.out)
    print(f"adapter: {outcome.path}; try: tad generate {given.model} --adapter {outcome.path} '...'")


if __name__ == "__main__":
    main()
