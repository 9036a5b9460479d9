"""Micro-batches of a distillation run by number: what a data loader asks for, possibly from several worker processes.

Number n of a process belongs to optimizer step n // accumulation. Everything about it is a function of the seed, the
step and the trajectories, so a run may start at any step and be split over any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from tad.errors import TadError
from tad.training.grouping import check_split, plan_batches, split_batch
from tad.training.objectives import Batch, Objective, Row
from tad.training.states import States, Taken, TrajectorySet, draw_items
from tad.trajectories.fingerprint import row_seed


@dataclass(frozen=True)
class Split:
    """How a global batch is cut: `micro` states per forward, on `ranks` processes of which this is `rank`."""

    size: int
    micro: int
    rank: int = 0
    ranks: int = 1

    @property
    def accumulation(self) -> int:
        return check_split(self.size, self.micro, self.ranks)


class MicroBatches(Dataset):
    """`self[n]` is micro-batch n of this process, collated, on the CPU."""

    def __init__(
        self,
        trajectories: TrajectorySet,
        objective: Objective,
        split: Split,
        states: States,
        seed: int,
        pool: int = 8,
        filler: bool = False,
        total_steps: int | None = None,
    ) -> None:
        if states == "all" and not objective.uses_steps:
            raise TadError(
                f"states: all visits the states of a trajectory, but objective '{objective.name}' draws its own noise; "
                "use the number of draws per trajectory and epoch, such as states: 1"
            )
        self.trajectories, self.objective, self.split = trajectories, objective, split
        self.states, self.seed, self.pool, self.filler = states, seed, pool, filler
        self.total_steps = total_steps
        self.accumulation = split.accumulation
        self._lengths = trajectories.lengths(privileged=_sees_privileged(objective))
        self._epoch: int | None = None
        items, batches = self._plan(0)
        self.steps_per_epoch = len(batches)
        self.states_per_trajectory = len(items) / len(trajectories)

    def __getitem__(self, number: int) -> Batch:
        step, part = divmod(number, self.accumulation)
        epoch, items = step // self.steps_per_epoch, self.micro_items(step)[part]
        return collate_items(self.trajectories, self.objective, items, self.seed, epoch, self._progress(step))

    def global_items(self, step: int) -> np.ndarray:
        """(trajectory, state) of a global batch: [size, 2]."""
        epoch, place = divmod(step, self.steps_per_epoch)
        items, batches = self._plan(epoch)
        return items[batches[place]]

    def micro_items(self, step: int) -> list[np.ndarray]:
        """This process's micro-batches of a step, each [micro, 2]."""
        items, cut = self.global_items(step), self.split
        return [items[rows] for rows in split_batch(np.arange(len(items)), cut.micro, cut.rank, cut.ranks)]

    def _progress(self, step: int) -> float:
        return min(1.0, step / self.total_steps) if self.total_steps else 0.0

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Items and batches of an epoch; the last one asked for is kept."""
        if self._epoch != epoch:
            items = draw_items(self.trajectories, self.states, self.seed, epoch, self.filler)
            batches = plan_batches(self._lengths[items[:, 0]], self.split.size, self.pool, self.seed, epoch)
            self._epoch, self._planned = epoch, (items, batches)
        return self._planned


class From(Sampler[int]):
    """start, start + 1, ..., stop - 1; without a length, so that the trainer counts steps and not epochs of its own."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


def collate_items(
    trajectories: TrajectorySet,
    objective: Objective,
    items: np.ndarray,  # [n, 2]: trajectory, state
    seed: int,
    epoch: int = 0,
    progress: float = 0.0,
) -> Batch:
    """Views of the items, as one batch. The noise of an item depends on seed, epoch, trajectory and state."""
    views = []
    for index, step in items.tolist():
        row = trajectories.rows[index]
        rng = np.random.default_rng(row_seed(seed, f"{row.id}/{step}", epoch))
        views += objective.views(row_of(row), step if objective.uses_steps else None, rng, progress)
    return objective.collate(views)


def row_of(taken: Taken) -> Row:
    """A trajectory in memory, as objectives take it."""

    def ids(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64))

    return Row(
        taken.id,
        ids(taken.plain_ids),
        ids(taken.privileged_ids),
        ids(taken.tokens),
        ids(taken.reveal),
        taken.n_real,
    )


def padding_of(batch: Batch) -> tuple[int, int]:
    """Positions that are padding, and all positions, over both canvases."""
    canvases = [canvas for canvas in (batch.student, batch.teacher) if canvas is not None]
    positions = sum(canvas.ids.numel() for canvas in canvases)
    return positions - sum(canvas.tokens for canvas in canvases), positions


def _sees_privileged(objective: Objective) -> bool:
    return objective.needs_teacher and getattr(objective, "teacher", "plain") == "privileged"
