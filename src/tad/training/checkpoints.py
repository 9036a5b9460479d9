"""Checkpoints of a training run: folders `checkpoint-STEP`, each with the size and hash of every file in it.

A checkpoint appears whole or not at all. One that was damaged later (a file missing, cut short or changed) is refused by
name, and the one before it is used. What the files hold is the trainer's matter.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.files import create_folder, full_disk, grant_usual_modes, hash_file, write_json, writing
from tad.models.stored import read_json
from tad.runs.identity import find_difference, find_rank

POSITION = "position.json"
"""Where in the data and under which recipe a checkpoint was made."""
CHECKSUMS = "checksums.json"
UNFINISHED = "unfinished"
"""Where a checkpoint is written before it gets its name."""

_LOG = logging.getLogger(__name__)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in run.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def seal(folder: Path, final: Path) -> None:
    """Add the checksums to what was written in `folder`, make all of it durable, and give it its final name."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "hash": hash_file(path)}
    write_json(folder / CHECKSUMS, sums)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: 'optimizer.pt is missing'; None if every file is as it was written."""
    try:
        sums = json.loads((checkpoint / CHECKSUMS).read_bytes())
        for name, wanted in sums.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["size"] or hash_file(path) != wanted["hash"]:
                return f"{name} is damaged"
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{CHECKSUMS} is damaged"
    return None


@contextmanager
def open_run(
    out: Path, results: Sequence[str], resume: bool, decides: dict[str, Any], keep: int
) -> Iterator[Path | None]:
    """Hold a run's directory; gives the checkpoint to go on from, None for a new run.

    Refuses to overwrite a run, to go on with another recipe, and a second run at the same time. What a killed run left
    half written is removed; a full disk is one line.
    """
    rank, ranks = find_rank()
    create_folder(out)
    with writing(out, rank, ranks), full_disk(out):
        if not resume and (checkpoints(out) or any((out / name).exists() for name in results)):
            raise TadError(f"{out}: already holds a run; pass --resume to go on with it, or another --out")
        checkpoint, damaged = _newest_whole(out) if resume else (None, [])
        if checkpoint is not None:
            check_position(checkpoint, "recipe", decides)
        if rank == 0:
            for path in damaged:
                shutil.rmtree(path)
            for path in (out / UNFINISHED, *(out / f".{name}" for name in results)):
                shutil.rmtree(path, ignore_errors=True)
            prune(out, keep)
        yield checkpoint


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write a run's result in; it gets its name when it is whole."""
    staging = folder.with_name(f".{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    yield staging
    grant_usual_modes(staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)


def _newest_whole(run: Path) -> tuple[Path, list[Path]]:
    """The newest checkpoint without damage, and the damaged ones after it."""
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints(run)):
        problem = find_damage(path)
        if problem is None:
            for bad, why in damaged.items():
                _LOG.warning("%s: %s; it is removed, and the run goes on from %s", bad, why, path.name)
            return path, list(damaged)
        damaged[path] = problem
    if not damaged:
        raise TadError(f"{run}: no checkpoint to resume from; start without --resume")
    newest, why = next(iter(damaged.items()))
    raise TadError(f"{newest}: {why}, and no checkpoint before it is whole; start again with another --out")


def check_position(checkpoint: Path, part: str, now: dict[str, Any]) -> None:
    """Refuse to go on where a part of what decides the result (the recipe, what it names) is not as it was."""
    before = read_json(checkpoint / POSITION).get(part, {})
    found = find_difference(before, {field: now.get(field) for field in before})
    if found is not None:
        raise TadError(
            f"{checkpoint}: was made with {found.field}={found.before!r}, now it is {found.now!r}; "
            "resume with what it was, or start another run with another --out"
        )
