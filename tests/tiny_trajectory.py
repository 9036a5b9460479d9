"""Trajectories, descriptions and stores of them, made by hand: everything that a test does not name has a plain value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tad.models import LM
from tad.trajectories.store import ShardStats, StoreMeta, Trajectory, TrajectoryStore


def make_trajectory(name: str = "toy/1", **fields: Any) -> Trajectory:
    """Of eight tokens, revealed from right to left, unless `fields` say otherwise."""
    length = len(fields.setdefault("tokens", list(range(100, 108))))
    plain: dict[str, Any] = {
        "id": f"{name}#0", "task": "toy", "example": name, "sample": 0, "level": None, "seed": 0,
        "plain_ids": [1, 2, 3], "privileged_ids": [1, 9, 2, 3], "reveal": list(range(length, 0, -1)), "n_real": length,
        "teacher_confidence": [1.0] * length, "student_confidence": [1.0] * length, "correct": True, "reason": "",
        "extracted": None, "reference": "gold",
    }  # fmt: skip
    return Trajectory(**{**plain, **fields})


def make_meta(lm: LM | None = None, **fields: Any) -> StoreMeta:
    """Of one shard of trajectories of a model, or of none in particular."""
    fields = {"gen_length": 8, "examples": 1, "shards": 1, **fields}
    if lm is not None:
        return replace(StoreMeta.of(lm, gen_length=8, examples=1, shards=1), **fields)
    whose = {
        "model": "m",
        "tokenizer": "t",
        "family": "llada",
        "mask_token": 310,
        "eos_token": 301,
        "ends": [301, 315],
    }
    return StoreMeta(**{**whose, **fields})


def write_rows(folder: Path, rows: Sequence[Trajectory], meta: StoreMeta) -> Path:
    """A store with these rows in its one shard."""
    count = len(rows)
    store = TrajectoryStore.open_or_create(folder, meta)
    store.write(0, rows, ShardStats(count, count, count, {}, 0, 0, {}))
    return folder
