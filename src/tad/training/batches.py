"""Global batches of a distillation run, and the micro-batches that processes and accumulation split them into.

A global batch is a set of (trajectory, state) that depends on (seed, epoch, place) alone; everything about a micro-batch is a
function of the seed, the step and the trajectories. So a run may start at any step and be split over any number of
processes. Rows of similar length stand together, so that little of a batch is padding: a row has two lengths, the
student's and the teacher's, and neighbours are found as in a k-d tree. Items that do not fill a batch at the end of an
epoch are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset, Sampler

from tad.errors import TadError
from tad.runs.fingerprint import row_seed
from tad.training.objectives import Batch, Objective
from tad.training.recipe import DistillRecipe
from tad.training.states import States, TrajectorySet, draw_items
from tad.trajectories.store import TrajectoryStore

MANY_EPOCHS = 100
_ORDER = 3  # keeps these draws apart from other uses of the same seed


@dataclass(frozen=True)
class Split:
    """How a global batch is cut: `micro` states per forward, on `ranks` processes of which this is `rank`."""

    size: int
    micro: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        share = self.size // self.ranks
        if self.size % self.ranks:
            raise TadError(f"batch.size {self.size} is not a multiple of the {self.ranks} processes")
        if share % self.micro:
            fits = max(d for d in range(1, min(self.micro, share) + 1) if share % d == 0)
            raise TadError(
                f"batch.size {self.size} is not a multiple of batch.micro {self.micro} x {self.ranks} processes; "
                f"use batch.micro={fits}"
            )

    @property
    def accumulation(self) -> int:
        """Micro-batches per process and step."""
        return self.size // (self.micro * self.ranks)

    def cut(self, batch: np.ndarray) -> np.ndarray:
        """This process's micro-batches [accumulation, micro, ...] of a global batch [size, ...]."""
        return batch.reshape(-1, self.micro, *batch.shape[1:])[self.rank :: self.ranks]


class MicroBatches(Dataset):
    """`self[n]` is micro-batch n of this process, collated, on the CPU: part n % accumulation of step n // accumulation."""

    def __init__(
        self,
        trajectories: TrajectorySet,
        objective: Objective,
        split: Split,
        states: States,
        seed: int,
        pool: int = 1,
        filler: bool = False,
    ) -> None:
        if states == "all" and not objective.uses_steps:
            raise TadError(
                f"states: all visits the states of a trajectory, but objective '{objective.name}' draws its own noise; "
                "use the number of draws per trajectory and epoch, such as states: 1"
            )
        self.trajectories, self.objective, self.split = trajectories, objective, split
        self.states, self.seed, self.pool, self.filler = states, seed, pool, filler
        self.total_steps: int | None = None  # of the run: curricula go by the share that is done
        self._lengths = trajectories.lengths(privileged=_sees_privileged(objective))
        self._epoch: int | None = None
        items, batches = self._plan(0)
        self.steps_per_epoch = len(batches)
        self.states_per_trajectory = len(items) / len(trajectories)

    def __getitem__(self, number: int) -> Batch:
        step, part = divmod(number, self.split.accumulation)
        epoch, place = divmod(step, self.steps_per_epoch)
        items, batches = self._plan(epoch)
        micro = self.split.cut(items[batches[place]])[part]
        progress = min(1.0, step / self.total_steps) if self.total_steps else 0.0
        return collate_items(self.trajectories, self.objective, micro, self.seed, epoch, progress)

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Items and batches of an epoch; the last one asked for is kept."""
        if self._epoch != epoch:
            items = draw_items(self.trajectories, self.states, self.seed, epoch, self.filler)
            batches = plan_batches(self._lengths[items[:, 0]], self.split.size, self.pool, self.seed, epoch)
            self._epoch, self._planned = epoch, (items, batches)
        return self._planned


class RangeSampler(Sampler[int]):
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
        row = trajectories[index]
        rng = np.random.default_rng(row_seed(seed, f"{row.id}/{step}", epoch))
        views += objective.views(row, step if objective.uses_steps else None, rng, progress)
    return objective.collate(views)


def plan_batches(lengths: np.ndarray, size: int, pool: int, seed: int, epoch: int) -> np.ndarray:
    """Item numbers [batches, size] of an epoch, for rows of `lengths` [items, sides].

    Items are shuffled; then each run of `pool` batches is put in order of length and cut into batches, whose order is
    shuffled.
    """
    if len(lengths) < size:
        raise TadError(
            f"batch.size {size} is more than the {len(lengths)} states of an epoch; make it smaller, "
            "visit more states or collect more trajectories"
        )
    draws = np.random.default_rng([seed, _ORDER, epoch])
    count = len(lengths) // size
    order = draws.permutation(len(lengths))[: count * size]
    whole = count // pool * pool * size  # the last pool may be smaller
    parts = [order[:whole].reshape(-1, pool * size), order[whole:].reshape(1, -1)]
    order = np.concatenate([order_by_length(part, lengths).reshape(-1) for part in parts if part.size])
    return order.reshape(count, size)[draws.permutation(count)]


def order_by_length(groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reorder each row of item numbers [groups, items]: halves that differ in the side that varies most, and so on.

    A group that does not halve evenly is sorted by the sum of its lengths.
    """
    shape = groups.shape
    while groups.shape[1] > 1:
        found = lengths[groups]  # [groups, items, sides]
        if groups.shape[1] % 2:
            key = found.sum(-1)
        else:
            widest = np.ptp(found, axis=1).argmax(-1)
            key = np.take_along_axis(found, widest[:, None, None], axis=-1)[..., 0]
        groups = np.take_along_axis(groups, key.argsort(axis=1, kind="stable"), axis=1)
        if groups.shape[1] % 2:
            break
        groups = groups.reshape(-1, groups.shape[1] // 2)
    return groups.reshape(shape)


def _sees_privileged(objective: Objective) -> bool:
    return objective.needs_teacher and getattr(objective, "teacher", "plain") == "privileged"


def warn_of_epochs(recipe: DistillRecipe, stores: Sequence[TrajectoryStore]) -> str | None:
    """A line where training would see every state of the stores a hundred times or more."""
    found = [stats for store in stores for _, stats in store.shards()]
    kept, steps, attempted = (
        sum(getattr(stats, name) for stats in found) for name in ("kept", "steps", "attempted")
    )
    epochs = recipe.count_epochs(kept, steps / max(1, attempted))
    if epochs < MANY_EPOCHS:
        return None
    return (
        f"WARNING: {recipe.learning.steps or epochs} steps of {recipe.batch.size} states are {epochs:.0f} epochs of {kept} "
        "trajectories; collect more, or set fewer learning.steps"
    )
