"""The store: round trips, atomic shards, one writer, and refusals that name the difference."""

from __future__ import annotations

import errno
import math
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tad import files
from tad.errors import TadError
from tad.trajectories.store import META, ShardStats, StoreMeta, Trajectory, TrajectoryStore
from tiny_trajectory import make_meta, make_trajectory

STATS = ShardStats(2, 1, 1, {"wrong": 1}, 8, 0, {"toy": [2, 1]})


def describe(**changes: object) -> StoreMeta:
    return make_meta(
        **{"examples": 10, "shards": 3, "recipe": {"order": "teacher", "seed": 0}, "code": "0", **changes}
    )


def trajectory(name: str = "toy/1", length: int = 8, **fields: object) -> Trajectory:
    confidence = [math.nan] + [0.5] * (length - 1)
    plain = {"tokens": list(range(100, 100 + length)), "seed": 2**62 + 1, "teacher_confidence": confidence}
    return make_trajectory(name, **{**plain, "student_confidence": [math.nan] * length, **fields})


def same(a: Trajectory, b: Trajectory) -> bool:
    return str(a) == str(b)  # nan is not equal to itself


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    rows = [trajectory("toy/1"), trajectory("toy/2")]
    store.write(1, rows, STATS)
    again = TrajectoryStore.open(tmp_path / "s")
    assert all(same(a, b) for a, b in zip(again.rows(), rows, strict=True))
    assert [stats for _, stats in again.shards()] == [STATS]
    assert again.table().num_rows == 2
    assert again.missing() == [0, 2]


@settings(max_examples=40)
@given(st.data())
def test_any_tokens_and_reveal_steps_survive(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, 64))
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)
    reveal = list(data.draw(st.permutations(range(1, length + 1))))
    row = trajectory(length=length, tokens=data.draw(ids), reveal=reveal, plain_ids=data.draw(ids))
    store = TrajectoryStore.open_or_create(tmp_path_factory.mktemp("store") / "s", describe())
    store.write(0, [row], STATS)
    assert same(next(iter(store.rows())), row)


def test_a_row_of_256_positions_takes_less_than_three_kilobytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def words(count: int) -> list[int]:  # ids as skewed as text, over a vocabulary of 126,000
        return ((random.zipf(1.2, count) * 7919) % 126_000).tolist()

    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    rows = []
    for i in range(64):
        reveal = np.concatenate([start + 1 + random.permutation(32) for start in range(0, 256, 32)])
        question, reference = words(110), words(150)
        rows.append(
            trajectory(
                f"toy/{i}",
                256,
                tokens=words(256),
                reveal=reveal.tolist(),
                plain_ids=question,
                privileged_ids=[*question, *reference, *range(40)],
                teacher_confidence=(1 - random.exponential(0.1, 256).clip(0, 1)).tolist(),
            )
        )
    store.write(0, rows, STATS)
    assert store.path(0).stat().st_size / 64 < 3000


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    for shard in range(3):
        store.write(shard, [trajectory(f"toy/{shard}")], STATS)
    return store


def test_torn_shards_are_refused_by_name_and_made_again(store: TrajectoryStore) -> None:
    assert store.missing() == []
    data = store.path(1).read_bytes()
    store.path(1).write_bytes(data[: len(data) // 2])
    store.path(2).write_bytes(b"")
    store.path(0).with_suffix(".hash").unlink()
    assert store.missing() == [0, 1, 2]
    for shard in (0, 1):
        with pytest.raises(TadError, match=f"shard-0000{shard}"):
            store.table()
        store.write(shard, [trajectory(f"toy/{shard}")], STATS)
    assert store.missing() == [2]


def test_every_flipped_bit_of_a_shard_is_noticed(store: TrajectoryStore) -> None:
    data = store.path(1).read_bytes()
    for bit in np.random.default_rng(0).permutation(8 * len(data))[:60]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        store.path(1).write_bytes(flipped)
        with pytest.raises(TadError, match="shard-00001"):
            list(store.rows())
    store.path(1).write_bytes(data)
    assert len(list(store.rows())) == 3


def test_a_flipped_bit_of_the_description_never_gives_another_one(store: TrajectoryStore) -> None:
    path = store.folder / META
    data = path.read_bytes()
    for bit in np.random.default_rng(0).permutation(8 * len(data))[:200]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with suppress(TadError):
            assert TrajectoryStore.open(store.folder).meta == store.meta


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model .*'m'.*'other'"),
        ({"recipe": {"order": "student", "seed": 0}}, r"recipe\.order .*'teacher'.*'student'"),
        ({"gen_length": 16}, "gen_length .*8.*16"),
    ],
)
def test_a_store_of_another_run_is_refused_with_the_difference(
    tmp_path: Path, change: dict, words: str
) -> None:
    TrajectoryStore.open_or_create(tmp_path / "s", describe())
    TrajectoryStore.open_or_create(tmp_path / "s", describe(code="1"))  # another version may continue
    with pytest.raises(TadError, match=f"/s: .*{words}"):
        TrajectoryStore.open_or_create(tmp_path / "s", describe(**change))


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TadError, match=META):
        TrajectoryStore.open(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TadError, match="is not empty"):
        TrajectoryStore.open_or_create(tmp_path, describe())
    (tmp_path / META).write_text("{")
    with pytest.raises(TadError, match=META):
        TrajectoryStore.open(tmp_path)
    (tmp_path / META).write_text('{"schema_version": 99}')
    with pytest.raises(TadError, match="schema version 99"):
        TrajectoryStore.open(tmp_path)


def test_a_full_disk_leaves_nothing_behind_and_the_next_writer_clears_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    store.write(0, [trajectory()], STATS)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(TadError, match="the disk is full"):
        store.write(1, [trajectory()], STATS)
    monkeypatch.undo()
    assert store.missing() == [1, 2]
    assert not list((tmp_path / "s").glob("*partial*"))
    leftover = tmp_path / "s" / ".shard-00001.parquet.99999.partial"
    leftover.write_bytes(b"half")
    with store.writing():
        assert not leftover.exists()


def test_ranks_of_one_run_write_side_by_side_and_a_second_run_does_not(tmp_path: Path) -> None:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    for ranks in (((0, 1),), ((0, 2), (1, 2))):
        with ExitStack() as held:
            for rank in ranks:
                held.enter_context(store.writing(*rank))
            for again in ((0, 1), ranks[-1]):
                with pytest.raises(TadError, match=str(tmp_path)), store.writing(*again):
                    pass


def test_a_shard_added_while_another_process_looks_for_missing_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe(shards=1))
    read = TrajectoryStore.read

    def added_just_after(self: TrajectoryStore, shard: int) -> object:
        found = read(self, shard)
        store.write(shard, [trajectory()], STATS)
        return found

    monkeypatch.setattr(TrajectoryStore, "read", added_just_after)
    assert store.missing() == [0]
    assert store.path(0).is_file()
