"""Locks, hashes and whole files: what no link, pipe, kill or full disk may break."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tad.errors import TadError
from tad.files import (
    disk_errors,
    drop_partial,
    finite,
    full_disk,
    hash_bytes,
    hash_file,
    waiting,
    write_whole,
    writing,
)


@pytest.mark.parametrize(
    "take", [lambda p: writing(p), lambda p: waiting(p, "lock")], ids=["writing", "waiting"]
)
@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_a_lock_that_is_something_else_is_refused_and_its_target_stays(kind, take, tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("mine")
    folder.mkdir()
    lock = folder / ".lock"
    if kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(target if kind == "link" else tmp_path / "absent")
    with pytest.raises(TadError, match=r"\.lock: is not a lock"), take(folder):
        pass
    assert target.read_text() == "mine"
    assert not (tmp_path / "absent").exists()


def test_taking_a_lock_leaves_what_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("notes")
    with writing(tmp_path), pytest.raises(TadError, match="another process"), writing(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "notes"


def test_a_file_is_never_written_through_a_link_that_waits_for_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / f".new.{os.getpid()}.partial").symlink_to(target)
    write_whole(tmp_path / "new", "content")
    assert (target.read_text(), (tmp_path / "new").read_text()) == ("mine", "content")
    assert not (tmp_path / "new").is_symlink()


def test_the_next_writer_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".rows.jsonl.99999.partial").write_text("half")
    (tmp_path / ".kept").write_text("not ours")
    with writing(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".kept", ".lock"]
    (tmp_path / ".a.1.partial").touch()
    (tmp_path / ".b.1.partial").touch()
    drop_partial(tmp_path, "a")
    assert (tmp_path / ".b.1.partial").exists()


def test_a_file_written_again_clears_what_a_killed_writer_of_it_left(tmp_path: Path) -> None:
    (tmp_path / ".a.csv.4194999.partial").touch()  # above the highest process number
    (tmp_path / f".a.csv.{os.getppid()}.partial").touch()
    (tmp_path / ".b.csv.4194999.partial").touch()
    write_whole(tmp_path / "a.csv", "x")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f".a.csv.{os.getppid()}.partial", ".b.csv.4194999.partial", "a.csv"]


def test_hashes_of_bytes_and_files_agree(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40_000  # more than one piece
    (tmp_path / "data").write_bytes(data)
    assert hash_file(tmp_path / "data") == hash_bytes(data) != hash_bytes(data[:-1])


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["space", "quota", "library"],
)
def test_a_full_disk_is_one_line_whoever_met_it(error: Exception, tmp_path: Path) -> None:
    outer = RuntimeError("could not save")
    outer.__cause__ = error
    with pytest.raises(TadError, match="the disk is full") as told, disk_errors(tmp_path):
        raise outer
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="PytorchStreamWriter"), disk_errors(tmp_path):
        raise RuntimeError("PytorchStreamWriter failed")
    with pytest.raises(PermissionError), full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied", "elsewhere")


def test_numbers_that_json_does_not_know_become_null() -> None:
    assert finite({"a": [float("nan"), (float("inf"), 1.0)]}) == {"a": [None, [None, 1.0]]}
