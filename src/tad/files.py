"""Files that survive a kill: written whole or not at all, appended to line by line, and one writer at a time.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tad.errors import TadError

_LOCK = ".lock"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under another name, make it durable, then rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _full_disk(path.parent):
        try:
            with open(partial, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


def drop_partial(path: Path) -> None:
    """Remove what a writer of this file left when it was killed."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        partial.unlink()


def write_json(path: Path, value: Any) -> None:
    """`write_whole` of indented JSON; numbers that are not finite become null."""
    write_whole(path, json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")


def finite(value: Any) -> Any:
    """The value with nan and infinities as None, as JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Add JSON lines and make them durable; a kill can tear the last ones only."""
    text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    with _full_disk(path.parent), open(path, "ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file up to the first that is torn."""
    with open(path, "rb") as file:
        for line in file:
            value = _parse(line)
            if value is None:
                return
            yield value


def cut_torn(path: Path) -> None:
    """Drop what a killed writer left behind the last whole line."""
    end = 0
    with open(path, "r+b") as file:
        for line in file:
            if _parse(line) is None:
                break
            end += len(line)
        file.truncate(end)


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def create_folder(folder: Path) -> None:
    with _full_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)


def is_vacant(folder: Path) -> bool:
    """Whether nothing stands there but files whose names begin with a dot: locks and half-written files."""
    return not folder.exists() or all(
        path.name.startswith(".") and path.is_file() for path in folder.iterdir()
    )


@contextmanager
def writing(folder: Path, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Hold the right to write in a folder; a second run is refused. The processes of one run share it, by rank."""
    name = _LOCK if world == 1 else f"{_LOCK}-{rank}-of-{world}"
    with _full_disk(folder), open(folder / name, "w") as lock:
        others = [path for path in folder.glob(f"{_LOCK}*") if path.name != name]
        others = [path for path in others if world == 1 or not path.name.endswith(f"-of-{world}")]
        if not _try_lock(lock) or any(_is_locked(path) for path in others):
            raise TadError(f"{folder}: another process is writing there; wait for it or stop it")
        yield


@contextmanager
def waiting(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock among the processes of one run, waiting for it."""
    with _full_disk(folder), open(folder / f".{name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def claiming(folder: Path, name: str) -> Iterator[bool]:
    """Take a lock among the processes of one run if it is free; whether it was. A process that dies gives it back."""
    with _full_disk(folder), open(folder / f".{name}", "w") as lock:
        yield _try_lock(lock)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as file:
            return not _try_lock(file)
    except FileNotFoundError:
        return False


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TadError(
                f"{folder}: the disk is full; free some space and run the same command again"
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise TadError(f"{folder}: cannot write here ({error.strerror}); use another directory") from None
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise TadError(
                f"{folder}: this file system has no locks ({error.strerror}); use another one"
            ) from None
        raise
