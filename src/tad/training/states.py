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

from tad.errors import TadError
from tad.models import LM
from tad.trajectories.fingerprint import fingerprint_model, fingerprint_tokenizer, row_seed
from tad.trajectories.store import StoreMeta, TrajectoryStore

States = int | Literal["all"]
_COLUMNS = ("plain_ids", "privileged_ids", "tokens", "reveal")


@dataclass(frozen=True)
class Taken:
    """What training needs of one trajectory, as arrays; `store` is its place among the stores."""

    id: str
    store: int
    plain_ids: np.ndarray
    privileged_ids: np.ndarray
    tokens: np.ndarray
    reveal: np.ndarray
    n_real: int


class TrajectorySet:
    """The trajectories of one or several stores, as int32 arrays: about 4 KB each at the paper's lengths."""

    def __init__(self, rows: Sequence[Taken], metas: Sequence[StoreMeta], folders: Sequence[Path]) -> None:
        self.rows, self.metas, self.folders = list(rows), list(metas), list(folders)

    def __len__(self) -> int:
        return len(self.rows)

    def digest(self) -> str:
        """Of everything training sees of them, in order."""
        found = hashlib.blake2b(digest_size=8)
        for row in self.rows:
            for values in (row.plain_ids, row.privileged_ids, row.tokens, row.reveal):
                found.update(len(values).to_bytes(4, "little") + values.tobytes())
            found.update(f"{row.id} {row.n_real}".encode())
        return found.hexdigest()

    def steps(self, filler: bool) -> np.ndarray:
        """The number of states of each trajectory; those past the end of the answer only with `filler`."""
        return np.array(
            [int(row.reveal.max()) if filler else row.n_real for row in self.rows], dtype=np.int64
        )

    def lengths(self, privileged: bool) -> np.ndarray:
        """[trajectories, 2]: prompt lengths of student and teacher; what their rows cost, and how to group them."""
        pairs = [
            (len(row.plain_ids), len(row.privileged_ids if privileged else row.plain_ids))
            for row in self.rows
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def read_stores(folders: Sequence[Path], lm: LM | None = None) -> TrajectorySet:
    """Read trajectories; with a model, refuse those of another model or tokenizer."""
    if not folders:
        raise TadError("trajectories: name at least one store made by 'tad collect'")
    rows: list[Taken] = []
    metas: list[StoreMeta] = []
    for place, folder in enumerate(folders):
        store = TrajectoryStore.open(folder)
        if lm is not None:
            check_store(store, lm)
        if metas and store.meta.gen_length != metas[0].gen_length:
            raise TadError(
                f"{folder}: its canvas has {store.meta.gen_length} positions, that of {folders[0]} has "
                f"{metas[0].gen_length}; train on them one after the other"
            )
        metas.append(store.meta)
        rows += _take(store.table(), place)
    if not rows:
        names = ", ".join(str(folder) for folder in folders)
        raise TadError(f"{names}: no trajectories in the store; collect some, or collect with keep=all")
    return TrajectorySet(rows, metas, [Path(folder) for folder in folders])


def check_store(store: TrajectoryStore, lm: LM) -> None:
    """Refuse trajectories of another model or tokenizer, naming what differs."""
    meta, tokens = store.meta, lm.tokens
    for what, there, here in (
        ("family", meta.family, lm.family.name),
        ("tokenizer", meta.tokenizer, fingerprint_tokenizer(lm)),
        ("mask token", meta.mask_token, tokens.mask),
        ("model", meta.model, fingerprint_model(lm)),
    ):
        if there != here:
            raise TadError(
                f"{store.folder}: trajectories of another {what}: {there} there, {here} is {lm.source}; "
                "train the model they come from, or collect again"
            )


def _take(table: pa.Table, store: int) -> list[Taken]:
    """Rows of a table as arrays, without a Python integer per token on the way."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in _COLUMNS:
        column = table[name].combine_chunks()
        values = column.values.to_numpy(zero_copy_only=False).astype(np.int32)
        parts[name] = np.split(values, column.offsets.to_numpy()[1:-1]) if len(column) else []
    ids, real = table["id"].to_pylist(), table["n_real"].to_pylist()
    return [
        Taken(id=ids[i], store=store, n_real=int(real[i]), **{name: parts[name][i] for name in _COLUMNS})
        for i in range(len(ids))
    ]


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
    for index, (row, steps) in enumerate(zip(trajectories.rows, trajectories.steps(filler), strict=True)):
        drawn = draw_steps(int(steps), states, seed, epoch, row.id)
        found.append(np.stack([np.full_like(drawn, index), drawn], axis=1))
    return np.concatenate(found)
