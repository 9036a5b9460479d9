"""The store: round trips, atomic shards, one writer, and refusals that name the difference."""

from __future__ import annotations

import errno
import math
from contextlib import suppress
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
    assert store.missing() == [1, 2]
    with pytest.raises(TadError, match="shard-00001"):
        store.table()
    store.write(1, [trajectory("toy/1")], STATS)
    assert store.missing() == [2]


def test_every_flipped_bit_of_a_shard_is_noticed(store: TrajectoryStore) -> None:
    data = store.path(1).read_bytes()
    for bit in np.random.default_rng(0).permutation(8 * len(data))[:200]:
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
    for bit in np.random.default_rng(0).permutation(8 * len(data))[:600]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with suppress(TadError):
            assert TrajectoryStore.open(store.folder).meta == store.meta


def test_a_shard_without_its_hash_is_refused(store: TrajectoryStore) -> None:
    store.path(0).with_suffix(".hash").unlink()
    with pytest.raises(TadError, match=r"shard-00000\.hash is missing"):
        list(store.rows())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model is 'm' there and 'other' here"),
        ({"tokenizer": "other"}, "tokenizer is 't' there"),
        ({"recipe": {"order": "student", "seed": 0}}, "recipe.order is 'teacher' there and 'student' here"),
        ({"gen_length": 16}, "gen_length is 8 there and 16 here"),
    ],
)
def test_a_store_of_another_run_is_refused_with_the_difference(
    tmp_path: Path, change: dict, words: str
) -> None:
    TrajectoryStore.open_or_create(tmp_path / "s", describe())
    with pytest.raises(TadError, match="/s: ") as error:
        TrajectoryStore.open_or_create(tmp_path / "s", describe(**change))
    assert words in str(error.value)


def test_another_version_of_the_package_may_continue(tmp_path: Path) -> None:
    TrajectoryStore.open_or_create(tmp_path / "s", describe())
    TrajectoryStore.open_or_create(tmp_path / "s", describe(code="1"))


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


def test_a_second_writer_is_refused_and_ranks_of_one_run_are_not(tmp_path: Path) -> None:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    with store.writing(), pytest.raises(TadError, match="another process is writing"), store.writing():
        pass
    with store.writing(0, 2), store.writing(1, 2):
        with pytest.raises(TadError, match="another process is writing"), store.writing():
            pass
        with pytest.raises(TadError, match="another process is writing"), store.writing(1, 2):
            pass
    with store.writing():
        pass


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(
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


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    store = TrajectoryStore.open_or_create(tmp_path / "s", describe())
    leftover = tmp_path / "s" / ".shard-00001.parquet.99999.partial"
    leftover.write_bytes(b"half")
    with store.writing():
        assert not leftover.exists()


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
