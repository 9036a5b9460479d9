"""The objective's loss on trajectories that are not trained on: the same states every time, no dropout."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from tad.training.batches import Split, collate_items, order_by_length
from tad.training.objectives import Objective, averages
from tad.training.states import TrajectorySet, draw_items
from tad.training.trainer import LossTrainer, named_terms


class HeldOut:
    """Batches of held-out states, and their loss under the model as it is."""

    def __init__(
        self, trajectories: TrajectorySet, objective: Objective, states: int, split: Split, seed: int
    ) -> None:
        items = draw_items(trajectories, states, seed, epoch=0)
        lengths = trajectories.lengths(privileged=True)[items[:, 0]]
        items = items[order_by_length(np.arange(len(items))[None], lengths)[0]]
        parts = np.array_split(items, -(-len(items) // split.micro))
        # Every process runs the same number of forwards, as sharded models need; what is too much does not count.
        rounds = -(-len(parts) // split.ranks)
        mine = [round * split.ranks + split.rank for round in range(rounds)]
        self.objective = objective
        self.batches = [
            (
                collate_items(trajectories, objective, parts[min(n, len(parts) - 1)], seed, progress=0.5),
                n < len(parts),
            )
            for n in mine
        ]

    @torch.no_grad()
    def measure(self, trainer: LossTrainer) -> dict[str, float]:
        """Held-out terms and statistics, over all processes."""
        model = trainer.model_wrapped
        model.eval()
        counted: dict[str, float] = defaultdict(float)
        for batch, counts in self.batches:
            for name, value in self.objective.counts(batch).items():
                counted[name] += value * counts
        totals = trainer.over_processes(counted)
        sums: dict[str, Tensor | float] = defaultdict(float)
        for batch, counts in self.batches:
            found = model(batch.to(trainer.args.device), totals)
            for name, value in ({"loss": found.total} | named_terms(found)).items():
                sums[name] += value.double() * counts
        means = averages(trainer.over_processes(sums))
        return {f"held_out_{name.replace('/', '_')}": value for name, value in means.items()}
