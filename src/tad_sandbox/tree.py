"""What of the machine a sandboxed program can see: this interpreter, its standard library, the C libraries they need.

Everything is mounted read-only at its own path. When the caller is root the sandbox runs as an unprivileged user
(the kernel exempts root from the limit on processes), who may be unable to reach an interpreter under /root: then the
interpreter is copied once to a place that only root can change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tad_sandbox.errors import SandboxError

SYSTEM_LIBRARIES = ("/lib", "/usr/lib")
STAGING = Path("/var/tmp")
_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
)


@dataclass(frozen=True)
class Tree:
    """`mounts` are (source on the machine, target in the sandbox); `hidden` are directories inside them that are covered by
    an empty one."""

    python: Path
    mounts: tuple[tuple[Path, Path], ...]
    hidden: tuple[Path, ...]


@cache
def interpreter_tree(unprivileged: bool) -> Tree:
    """The mounts for this interpreter; with `unprivileged`, from sources that every user can read."""
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    shared = _shared_libraries([python, *sorted((library / "lib-dynload").glob("*.so"))])
    paths = [python, library, *(_mountable(path) for path in shared)]
    own = [path for path in dict.fromkeys(paths) if unprivileged and not _is_public(path)]
    staged = _stage(own) if own else {}
    mounts = tuple((staged.get(path, path), path) for path in dict.fromkeys(paths))
    hidden = tuple(path for name in _LEFT_OUT[:2] if (path := library / name).is_dir())
    return Tree(python, mounts, hidden if library not in staged else ())


def _mountable(path: Path) -> Path:
    """System libraries come with their directory (a mount per file would cost more than the program); others alone."""
    directory = path.parent
    if (
        str(directory).startswith(SYSTEM_LIBRARIES)
        and str(directory) not in SYSTEM_LIBRARIES
        and directory.name != "lib64"
    ):
        return directory
    return path


def _shared_libraries(binaries: list[Path]) -> list[Path]:
    listing = subprocess.run(
        ["ldd", *map(str, binaries)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout
    found = []
    for line in listing.splitlines():
        words = line.strip().split(" => ")[-1].split(" (")[0]
        if line.startswith(("\t", " ")) and words.startswith("/") and Path(words).exists():
            found.append(Path(words))
    if not found:
        raise SandboxError(
            "cannot list the libraries of this Python with ldd; the code sandbox needs a Linux with glibc"
        )
    return list(dict.fromkeys(found))


def _is_public(path: Path) -> bool:
    """Whether a user without any rights can read a path."""
    parents = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)
    return parents and bool(path.stat().st_mode & stat.S_IROTH)


@cache
def show_publicly(path: str) -> str:
    """Where an unprivileged user can find a directory: at its own place, or at an empty one where root mounts it."""
    if _is_public(Path(path)):
        return path
    place = STAGING / f"tad-packages-{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    place.mkdir(mode=0o755, exist_ok=True)
    _check_owner(place)
    return str(place)


def _check_owner(place: Path) -> None:
    owner = place.lstat()
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode) or owner.st_mode & 0o022:
        raise SandboxError(
            f"{place}: is not ours alone to write; remove it, the sandbox takes its interpreter from there"
        )


def _stage(paths: list[Path]) -> dict[Path, Path]:
    """Copy files and the standard library below STAGING, once per version of them."""
    marks = "".join(f"{path}:{path.stat().st_mtime_ns}:{path.stat().st_size}" for path in paths)
    home = STAGING / f"tad-python-{hashlib.sha256(marks.encode()).hexdigest()[:16]}"
    if not home.exists():
        building = Path(tempfile.mkdtemp(prefix="tad-python-", dir=STAGING))
        building.chmod(0o755)
        for number, path in enumerate(paths):
            if path.is_dir():
                shutil.copytree(path, building / str(number), ignore=_ignore, symlinks=True)
            else:
                shutil.copy2(path, building / str(number))
        try:
            building.rename(home)
        except OSError:
            # Another process was faster; its copy is the same.
            shutil.rmtree(building)
    _check_owner(home)
    return {path: home / str(number) for number, path in enumerate(paths)}


def _ignore(directory: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if name in _LEFT_OUT or name.startswith("config-") or name.endswith(".opt-2.pyc")
    ]
