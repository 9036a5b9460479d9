"""Files that survive a kill: written whole or not at all, appended to line by line, hashed, one writer at a time.

Knows nothing of what the files hold. A lock is a file of its own; it is never followed through a link nor truncated.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from tad.errors import TadError

_LOCK = ".lock"
_TORCH_WRITER = (
    "PytorchStreamWriter",
    "inline_container",
    "iostream error",
)  # in what torch.save says of any failure


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under another name, make it durable, then rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with disk_errors(path.parent):
        try:
            partial.unlink(missing_ok=True)
            with open(partial, "xb") as file:  # a new file: nothing that stands there is written through
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _drop_orphans(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


def _drop_orphans(path: Path) -> None:
    """What writers of this file left that were killed; those that still run keep theirs."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        writer = partial.name.split(".")[-2]
        try:
            os.kill(int(writer), 0)
        except (ProcessLookupError, ValueError, OverflowError):
            partial.unlink(missing_ok=True)
        except PermissionError:  # it runs
            continue


def grant_usual_modes(folder: Path) -> None:
    """Give the files of a new folder the mode that new files have; safetensors leaves its own to their owner alone."""
    usual = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(usual)


def drop_partial(folder: Path, name: str = "*") -> None:
    """Remove what a killed writer of the file, or of any file in the folder, left behind."""
    for partial in folder.glob(f".{name}.*.partial"):
        partial.unlink(missing_ok=True)


def hash_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """`hash_bytes` of a file of any size."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while piece := file.read(2**22):
            found.update(piece)
    return found.hexdigest()


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
    with disk_errors(path.parent), open(path, "ab") as file:
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
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def is_vacant(folder: Path) -> bool:
    """Whether nothing stands there but files whose names begin with a dot: locks and half-written files."""
    return not folder.exists() or all(
        path.name.startswith(".") and path.is_file() for path in folder.iterdir()
    )


class Description(Protocol):
    """What a folder holds, as a dataclass of plain values; see `open_described`."""

    @property
    def schema_version(self) -> int: ...

    def difference(self, other: Any) -> str | None:
        """The first thing that keeps one from going on with the other, in words."""
        ...


D = TypeVar("D", bound=Description)


def open_described(path: Path, kind: type[D], version: int, what: str, command: str) -> D:
    """What the folder of `path` holds, from that JSON file. `what` and `command` (which makes such folders) are for errors."""
    if not path.is_file():
        raise TadError(f"{path.parent}: no {what} here ({path.name} is missing); make one with '{command}'")
    try:
        values = json.loads(path.read_bytes())
        found, wanted = values.get("schema_version"), values.pop("hash", None)
        if found != version:
            raise TadError(
                f"{path}: schema version {found}, this package reads {version}; run '{command}' again"
            )
        if wanted is not None and wanted != _hash_of(values):
            raise TadError(
                f"{path}: is damaged (its hash differs); run '{command}' again, in another directory"
            )
        return kind(**values)
    except (ValueError, TypeError, AttributeError):
        raise TadError(f"{path}: is not the description of a {what}; run '{command}' again") from None


def claim_described(path: Path, meta: D, what: str, command: str) -> D:
    """The folder of `path` for what `meta` describes: as it is there, or new. Anything else there is refused."""
    folder = path.parent
    if path.exists():
        found = open_described(path, type(meta), meta.schema_version, what, command)
        different = found.difference(meta)
        if different:
            raise TadError(f"{folder}: holds another {what}: {different}; use another directory")
        return found
    create_folder(folder)
    if not is_vacant(folder) and not path.exists():  # another process of the run may have made it just now
        raise TadError(f"{folder}: is not empty and holds no {what}; use another directory")
    values = asdict(cast(Any, meta))
    write_json(path, {**values, "hash": _hash_of(values)})
    return meta


def _hash_of(values: dict[str, Any]) -> str:
    return hash_bytes(json.dumps(values, sort_keys=True).encode())


@contextmanager
def writing(folder: Path, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Hold the right to write in a folder; a second run is refused. The processes of one run share it, by rank.

    A single process also removes what a killed one left half written.
    """
    name = _LOCK if world == 1 else f"{_LOCK}-{rank}-of-{world}"
    with _open_lock(folder / name) as lock:
        others = [path for path in folder.glob(f"{_LOCK}*") if path.name != name]
        others = [path for path in others if world == 1 or not path.name.endswith(f"-of-{world}")]
        if not _try_lock(lock, folder) or any(_is_locked(path) for path in others):
            raise TadError(f"{folder}: another process is writing there; wait for it or stop it")
        if world == 1:
            drop_partial(folder)
        yield


@contextmanager
def waiting(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock among the processes of one run, waiting for it."""
    with _open_lock(folder / f".{name}") as lock:
        with disk_errors(folder):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def claiming(folder: Path, name: str) -> Iterator[bool]:
    """Take a lock among the processes of one run if it is free; whether it was. A process that dies gives it back."""
    with _open_lock(folder / f".{name}") as lock:
        yield _try_lock(lock, folder)


@contextmanager
def _open_lock(path: Path, create: bool = True) -> Iterator[int]:
    """The descriptor of a lock file. Anything but a plain file is refused, and what it holds stays as it is."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    with disk_errors(path.parent):
        try:
            found = os.open(path, flags, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            raise TadError(f"{path}: is not a lock but a link or folder; remove it") from None
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise TadError(f"{path}: is not a lock but a device or pipe; remove it")
        yield found
    finally:
        os.close(found)


def _try_lock(file: int, folder: Path) -> bool:
    try:
        with disk_errors(folder):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        with _open_lock(path, create=False) as file:
            return not _try_lock(file, path.parent)
    except FileNotFoundError:
        return False


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written to, in one line."""
    try:
        with full_disk(folder):
            yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise TadError(f"{folder}: cannot write here ({error.strerror}); use another directory") from None
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise TadError(
                f"{folder}: this file system has no locks ({error.strerror}); use another one"
            ) from None
        raise


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A full disk in one line, also from libraries that hide the cause."""
    try:
        yield
    except TadError:
        raise
    except Exception as error:
        if not _is_full(error, folder):
            raise
        raise TadError(
            f"{folder}: the disk is full; free some space and run the same command again"
        ) from None


def _is_full(error: BaseException | None, folder: Path) -> bool:
    """Whether the disk was full. safetensors and torch raise errors of their own, whose text says more or less."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if f"os error {errno.ENOSPC}" in str(error) or os.strerror(errno.ENOSPC) in str(error):
            return True
        if any(mark in str(error) for mark in _TORCH_WRITER) and shutil.disk_usage(folder).free < 2**20:
            return True
        error = error.__cause__ or error.__context__
    return False
