"""The trajectory store: a directory of Parquet shards, one row per trajectory, and a JSON file that says whose they are.

A shard is written whole or not at all, and holds the trajectories of a fixed set of examples, so a store that was
interrupted is continued by making the shards that are missing. Beside a shard stands its hash: a shard that was changed
later is never read. A shard that lacks verdicts (`graded: later`) is written again with them. One process writes to a
store at a time. A row holds prompts, final tokens and reveal steps: every intermediate state follows from those (see
`partition`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tad.errors import TadError
from tad.files import claim_described, drop_partial, hash_bytes, open_described, write_whole, writing
from tad.models import LM
from tad.runs.fingerprint import fingerprint_model, fingerprint_tokenizer, stored_mask
from tad.runs.identity import find_difference

SCHEMA_VERSION = 2
WRONG_KEPT = 3  # wrong rollouts of a shard
META = "store.json"
_WHAT, _COMMAND = "trajectory store", "tad collect"

# Confidences need no more than three digits; half precision keeps a row of 256 positions under 3 KB.
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("task", pa.string()),
        ("example", pa.string()),
        ("sample", pa.int32()),
        ("level", pa.string()),
        ("seed", pa.int64()),
        ("plain_ids", pa.list_(pa.int32())),
        ("privileged_ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("reveal", pa.list_(pa.int16())),
        ("n_real", pa.int32()),
        ("teacher_confidence", pa.list_(pa.float16())),
        ("student_confidence", pa.list_(pa.float16())),
        ("correct", pa.bool_()),
        ("reason", pa.string()),
        ("extracted", pa.string()),
        ("reference", pa.string()),  # where the reference came from: gold, majority, none
    ]
)


@dataclass(frozen=True)
class Trajectory:
    """One row. `reveal` counts from 1; steps after `n_real` are end filler. Confidences are nan where none was taken."""

    id: str
    task: str
    example: str
    sample: int
    level: str | None
    seed: int
    plain_ids: list[int]
    privileged_ids: list[int]
    tokens: list[int]
    reveal: list[int]
    n_real: int
    teacher_confidence: list[float]
    student_confidence: list[float]
    correct: bool | None  # None: not graded
    reason: str
    extracted: str | None
    reference: str


@dataclass(frozen=True)
class StoreMeta:
    """Whose trajectories these are. Two stores may be continued or mixed only where these agree."""

    model: str  # fingerprint of the weights
    tokenizer: str  # fingerprint of the tokenizer
    family: str
    mask_token: int
    eos_token: int
    ends: list[int]
    gen_length: int
    examples: int  # how many examples the whole store is made from
    shards: int
    recipe: dict[str, Any] = field(default_factory=dict)  # what decides the content of a shard
    code: str = ""  # version of this package
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, lm: LM, **fields: Any) -> StoreMeta:
        """Of trajectories of this model."""
        tokens = lm.tokens
        return cls(
            model=fingerprint_model(lm),
            tokenizer=fingerprint_tokenizer(lm),
            family=lm.family.name,
            mask_token=stored_mask(lm),
            eos_token=tokens.eos,
            ends=list(tokens.ends),
            **fields,
        )

    def difference(self, other: StoreMeta) -> str | None:
        """The first field that differs, in words; the package's version may."""
        found = find_difference(asdict(replace(self, code="")), asdict(replace(other, code="")))
        return None if found is None else str(found)


@dataclass(frozen=True)
class ShardStats:
    """What became of the rollouts of one shard."""

    attempted: int
    kept: int
    correct: int
    reasons: dict[str, int]  # why rollouts were wrong, or that they could not be judged
    steps: int  # real steps, all rollouts
    unsure: int  # of them, revealed with the teacher's confidence below one half
    by_task: dict[str, list[int]]  # task -> [graded, correct]
    ungraded: int = 0  # of the attempted, those of tasks that are not graded
    pending: int = 0  # of the ungraded, those that will be
    unaided: int = 0  # of the attempted, those without a reference where it is shown where needed only
    failed: int = 0  # rollouts before these that were wrong without it
    failed_steps: int = 0
    wrong: list[dict[str, str]] = field(
        default_factory=list
    )  # a few wrong rollouts, to be read: `WrongRollout`


@dataclass(frozen=True)
class WrongRollout:
    """A rollout that was graded wrong, as text. A shard keeps a few."""

    id: str
    question: str
    reference: str
    text: str
    reason: str


def choose_wrong(found: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Those with the first ids, whatever the order in which they were graded."""
    return sorted(found, key=lambda one: one["id"])[:WRONG_KEPT]


class UngradedError(TadError):
    """A store has rollouts without the verdicts its recipe asks for."""


class TrajectoryStore:
    """A store on disk."""

    def __init__(self, folder: Path, meta: StoreMeta) -> None:
        self.folder, self.meta = folder, meta

    @classmethod
    def open(cls, folder: str | Path) -> TrajectoryStore:
        """A store that exists."""
        folder = Path(folder)
        return cls(folder, open_described(folder / META, StoreMeta, SCHEMA_VERSION, _WHAT, _COMMAND))

    @classmethod
    def open_or_create(cls, folder: str | Path, meta: StoreMeta) -> TrajectoryStore:
        """The store at `folder` if it is the one described by `meta`, or a new one there."""
        folder = Path(folder)
        return cls(folder, claim_described(folder / META, meta, _WHAT, _COMMAND))

    @contextmanager
    def writing(self, rank: int = 0, world: int = 1) -> Iterator[None]:
        """Hold the right to write; a second run is refused. The processes of one run share it, by rank."""
        with writing(self.folder, rank, world):
            for shard in range(rank, self.meta.shards, world):  # of a process that was killed
                for path in (self.path(shard), self.hash_path(shard)):
                    drop_partial(self.folder, path.name)
            yield

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.parquet"

    def hash_path(self, shard: int) -> Path:
        return self.path(shard).with_suffix(".hash")

    def write(self, shard: int, rows: Iterable[Trajectory], stats: ShardStats) -> None:
        """Write one shard, whole or not at all; its hash goes first, so that a shard is never without. Until a shard that was
        there is replaced, the hashes of both stand beside it."""
        table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
        table = table.replace_schema_metadata({"stats": json.dumps(asdict(stats)), "shard": str(shard)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", compression_level=9, use_dictionary=False)
        data = sink.getvalue().to_pybytes()
        own, before = hash_bytes(data) + "\n", ""
        if self.path(shard).exists() and self.hash_path(shard).exists():
            before = self.hash_path(shard).read_text(encoding="utf-8", errors="replace")
        write_whole(self.hash_path(shard), before + own)
        write_whole(self.path(shard), data)
        if before:
            write_whole(self.hash_path(shard), own)

    def read(self, shard: int) -> tuple[pa.Table, ShardStats] | None:
        """The rows of a shard and what became of its rollouts; None where there is no such shard."""
        path = self.path(shard)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            if hash_bytes(data).encode() not in self.hash_path(shard).read_bytes().splitlines():
                raise TadError(f"{path}: is damaged (its hash differs); collect again, which makes it anew")
        except FileNotFoundError:
            raise TadError(
                f"{path}: its {self.hash_path(shard).name} is missing; collect again, which makes it anew"
            ) from None
        table = pq.read_table(pa.BufferReader(data))
        return table.replace_schema_metadata(None), ShardStats(**json.loads(table.schema.metadata[b"stats"]))

    def shards(self) -> Iterator[tuple[pa.Table, ShardStats]]:
        """The shards that are there, in order, one in memory at a time. A damaged one is an error."""
        for shard in range(self.meta.shards):
            found = self.read(shard)
            if found is not None:
                yield found

    def missing(self, rank: int = 0, world: int = 1) -> list[int]:
        """This process's shards that are not there, or are damaged: those that have to be made."""
        return [shard for shard in range(rank, self.meta.shards, world) if self._stats(shard) is None]

    def pending(self) -> list[int]:
        """The whole shards with rollouts that wait for a verdict."""
        stats = {shard: self._stats(shard) for shard in range(self.meta.shards)}
        return [shard for shard, found in stats.items() if found is not None and found.pending]

    def _stats(self, shard: int) -> ShardStats | None:
        """None where the shard is not there or damaged."""
        try:
            found = self.read(shard)
        except TadError:
            return None
        return None if found is None else found[1]

    def check_graded(self) -> None:
        """Refuse a store with rollouts that wait for a verdict: wrong ones are still among them."""
        waiting = sum(stats.pending for _, stats in self.shards())
        if waiting:
            raise UngradedError(
                f"{self.folder}: {waiting} rollouts wait for a verdict (graded: later); run 'tad regrade {self.folder} "
                "--model MODEL' where there is a sandbox"
            )

    def wrong(self) -> Iterator[WrongRollout]:
        """The wrong rollouts that shards have kept to be read."""
        for _, stats in self.shards():
            for values in stats.wrong:
                yield WrongRollout(**values)

    def table(self) -> pa.Table:
        """All rows that are there, in order."""
        tables = [table for table, _ in self.shards()]
        return pa.concat_tables(tables) if tables else SCHEMA.empty_table()

    def find(self, name: str) -> Trajectory:
        """A trajectory by its id, or the first of an example."""
        for row in self.rows():
            if name in (row.id, row.example):
                return row
        first = next(self.rows(), None)
        hint = f"; ids look like {first.id}" if first else "; the store is empty"
        raise TadError(f"{self.folder}: no trajectory '{name}'{hint}")

    def rows(self) -> Iterator[Trajectory]:
        """All rows that are there, in order, one shard in memory at a time."""
        for table, _ in self.shards():
            for row in table.to_pylist():
                yield Trajectory(**row)
