"""Which states of which trajectory are visited: the items of an epoch, and the trajectories they come from, in memory.

State s of a trajectory with n steps shows what was revealed up to step s, s = 0 .. n - 1. `all` visits every state, as
the published trainer does; a number k visits one state from each of k equal parts of the steps, equally spaced from a
start that is drawn anew each epoch, so that every state is equally likely. A draw depends on the seed, the epoch and
the trajectory's id: not on other trajectories, batches or processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from tad.errors import TadError
from tad.models import LM
from tad.runs.fingerprint import fingerprint_model, fingerprint_tokenizer, row_seed, stored_mask
from tad.trajectories.store import StoreMeta, TrajectoryStore

States = int | Literal["all"]
_COLUMNS = ("plain_ids", "privileged_ids", "tokens", "reveal")


@dataclass(frozen=True)
class TrajectoryArrays:
    """What training needs of one trajectory, as CPU tensors."""

    id: str
    plain_ids: Tensor  # [prompt] int64
    privileged_ids: Tensor  # [longer prompt] int64
    tokens: Tensor  # [length] int64
    reveal: Tensor  # [length] int64, from 1
    n_real: int  # reveal steps after this one are end filler

    @property
    def filler(self) -> Tensor:
        """[length] bool: positions that only fill the canvas after the end of the answer."""
        return self.reveal > self.n_real


class TrajectorySet:
    """The trajectories of one or several stores: flat int32 columns, about 4 KB a trajectory at the paper's lengths."""

    def __init__(
        self, table: pa.Table, metas: Sequence[StoreMeta] = (), folders: Sequence[Path] = ()
    ) -> None:
        self.metas, self.folders = list(metas), list(folders)
        self.ids: list[str] = table["id"].to_pylist()
        self.n_real = table["n_real"].to_numpy().astype(np.int64)
        self._values, self._starts = {}, {}  # column -> all its values, and where each row's begin
        for name in _COLUMNS:
            column = table[name].combine_chunks()
            sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False)
            self._values[name] = column.flatten().to_numpy(zero_copy_only=False).astype(np.int32)
            self._starts[name] = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> TrajectoryArrays:
        columns = {}
        for name in _COLUMNS:
            low, high = self._starts[name][index : index + 2]
            columns[name] = torch.from_numpy(self._values[name][low:high].astype(np.int64))
        return TrajectoryArrays(id=self.ids[index], n_real=int(self.n_real[index]), **columns)

    def digest(self) -> str:
        """Of everything training sees of them, in order."""
        found = hashlib.blake2b(repr(self.ids).encode() + self.n_real.tobytes(), digest_size=8)
        for name in _COLUMNS:
            found.update(self._starts[name].tobytes() + self._values[name].tobytes())
        return found.hexdigest()

    def steps(self, filler: bool) -> np.ndarray:
        """The number of states of each trajectory; those past the end of the answer only with `filler`."""
        if not filler:
            return self.n_real
        return np.maximum.reduceat(self._values["reveal"], self._starts["reveal"][:-1]).astype(np.int64)

    def lengths(self, privileged: bool) -> np.ndarray:
        """[trajectories, 2]: lengths of the rows of student and teacher; what they cost, and how to group them."""
        teacher, answer = "privileged_ids" if privileged else "plain_ids", np.diff(self._starts["tokens"])
        return np.stack([answer + np.diff(self._starts[name]) for name in ("plain_ids", teacher)], axis=1)


def read_stores(folders: Sequence[Path], lm: LM | None = None) -> TrajectorySet:
    """Read trajectories; with a model, refuse those of another model or tokenizer."""
    if not folders:
        raise TadError("trajectories: name at least one store made by 'tad collect'")
    tables: list[pa.Table] = []
    metas: list[StoreMeta] = []
    for folder in folders:
        store = TrajectoryStore.open(folder)
        store.check_graded()
        if lm is not None:
            check_store(store, lm)
        if metas and store.meta.gen_length != metas[0].gen_length:
            raise TadError(
                f"{folder}: its canvas has {store.meta.gen_length} positions, that of {folders[0]} has "
                f"{metas[0].gen_length}; train on them one after the other"
            )
        metas.append(store.meta)
        tables.append(store.table())
    table = pa.concat_tables(tables)
    if not table.num_rows:
        names = ", ".join(str(folder) for folder in folders)
        raise TadError(f"{names}: no trajectories in the store; collect some, or collect with keep=all")
    return TrajectorySet(table, metas, [Path(folder) for folder in folders])


def check_store(store: TrajectoryStore, lm: LM) -> None:
    """Refuse trajectories of another model or tokenizer, naming what differs."""
    meta = store.meta
    for what, there, here in (
        ("family", meta.family, lm.family.name),
        ("tokenizer", meta.tokenizer, fingerprint_tokenizer(lm)),
        ("mask token", meta.mask_token, stored_mask(lm)),
        ("model", meta.model, fingerprint_model(lm)),
    ):
        if there != here:
            raise TadError(
                f"{store.folder}: trajectories of another {what}: {there} there, {here} is {lm.source}; "
                "train the model they come from, or collect again"
            )


def draw_steps(steps: int, states: States, seed: int, epoch: int, trajectory: str) -> np.ndarray:
    """The states visited of one trajectory in one epoch, ascending."""
    if states == "all" or states >= steps:
        return np.arange(steps)
    start = np.random.default_rng(row_seed(seed, trajectory, epoch)).random()
    return np.floor((np.arange(states) + start) * (steps / states)).astype(np.int64)


def draw_items(
    trajectories: TrajectorySet, states: States, seed: int, epoch: int, filler: bool = False
) -> np.ndarray:
    """All (trajectory, state) of an epoch: [items, 2], ordered by trajectory and state."""
    found = []
    for index, (name, steps) in enumerate(zip(trajectories.ids, trajectories.steps(filler), strict=True)):
        drawn = draw_steps(int(steps), states, seed, epoch, name)
        found.append(np.stack([np.full_like(drawn, index), drawn], axis=1))
    return np.concatenate(found)
