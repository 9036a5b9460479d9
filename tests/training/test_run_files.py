"""The files of a training run: one run at a time, damage that is noticed, leftovers that go, a disk that fills up."""

from __future__ import annotations

import logging
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_store import recipe, same_weights, stopped

from tad.config import load_recipe
from tad.errors import TadError
from tad.files import writing
from tad.training.checkpoints import find_damage, open_run
from tad.training.distill import distill
from tad_lab.pretraining.pretrain import pretrain
from tad_lab.pretraining.recipe import PretrainRecipe

WEIGHTS = "adapter_model.safetensors"


# One run at a time


def test_a_second_run_into_one_directory_is_refused(world: Path, tmp_path: Path) -> None:
    with writing(tmp_path):
        with pytest.raises(TadError, match=str(tmp_path)):
            distill(recipe(world), tmp_path, quiet=True)
        with pytest.raises(TadError, match=str(tmp_path)):
            pretrain(load_recipe(PretrainRecipe, "pretrain-tiny"), tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# Damage


every_damage = pytest.mark.parametrize("how", ["missing", "cut", "flipped"])


@pytest.mark.parametrize("name", [WEIGHTS, "position.json", "checksums.json"])
@every_damage
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    name: str, how: str, run: Path, world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = stopped(run, tmp_path / "run", 2, 4)
    damage(out / "checkpoint-4" / name, how)
    decides = recipe(world).content_hash_fields()
    with caplog.at_level(logging.WARNING), open_run(out, ("adapter",), True, decides, keep=9) as found:
        assert found == out / "checkpoint-2"
    assert not (out / "checkpoint-4").exists()
    (told,) = [r.getMessage() for r in caplog.records if r.name == "tad.training.checkpoints"]
    assert "checkpoint-4" in told
    assert "checkpoint-2" in told
    assert name in told or name == "checksums.json"


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_ends_bit_equal(
    run: Path, world: Path, tmp_path: Path
) -> None:
    out = stopped(run, tmp_path / "run", 2, 4)
    damage(out / "checkpoint-4" / "optimizer.pt", "flipped")
    assert distill(recipe(world), out, resume=True, quiet=True).finished
    assert same_weights(run / "adapter", out / "adapter")


def test_damage_without_a_checkpoint_before_it_is_one_line(run: Path, world: Path, tmp_path: Path) -> None:
    out = stopped(run, tmp_path / "run", 2)
    damage(out / "checkpoint-2" / "optimizer.pt", "flipped")
    with pytest.raises(TadError, match=r"checkpoint-2: optimizer\.pt") as told:
        distill(recipe(world), out, resume=True, quiet=True)
    assert "\n" not in str(told.value)


def test_every_flipped_bit_of_a_checkpoint_is_noticed(run: Path, tmp_path: Path) -> None:
    checkpoint = stopped(run, tmp_path, 2) / "checkpoint-2"
    draws = random.Random(0)
    paths = sorted(path for path in checkpoint.iterdir() if path.is_file())
    assert find_damage(checkpoint) is None
    for path in paths:
        whole = path.read_bytes()
        for _ in range(8):
            flipped, bit = bytearray(whole), draws.randrange(8 * len(whole))
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert find_damage(checkpoint) is not None, (path.name, bit)
        path.write_bytes(whole)


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)


# Leftovers


def test_what_a_killed_run_left_is_gone_after_the_next(run: Path, world: Path, tmp_path: Path) -> None:
    out = stopped(run, tmp_path / "run", 2, 4, 6)  # killed before the oldest was pruned
    (out / "unfinished" / "checkpoint-8").mkdir(parents=True)
    (out / ".adapter").mkdir()
    (out / ".run.json.99999.partial").write_text("half")
    assert distill(recipe(world, keep=1), out, resume=True, quiet=True).finished
    assert sorted(path.name for path in out.iterdir()) == [".lock", "adapter", "checkpoint-6", "run.json"]
    usual = (out / "run.json").stat().st_mode
    assert {file.stat().st_mode for file in (out / "adapter").iterdir()} == {usual}


# A full disk


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of `size` bytes at `folder`; a skip where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


SIZES = (4, 12, 60, 80, 100, 140, 180, 220, 260, 300)


@pytest.mark.parametrize("kilobytes", [40, *(pytest.param(size, marks=pytest.mark.slow) for size in SIZES)])
def test_a_full_disk_is_one_line_wherever_it_strikes(kilobytes: int, world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with small_disk(out, kilobytes * 1024), pytest.raises(TadError, match="the disk is full") as told:
        distill(recipe(world, report_to=None), out, quiet=True)
    assert "\n" not in str(told.value)
