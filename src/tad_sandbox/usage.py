"""What a running sandbox uses: memory, CPU time, sockets, files; by polling /proc, or from a cgroup where one can be had.

Polling sees only what lasts as long as its interval. A cgroup (version 2) is exact, and the kernel enforces its limits:
`find_cgroup` looks for a place to make one, in TAD_CGROUP (a directory delegated to this user) or next to the cgroup of
this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tad_sandbox.errors import SandboxError

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError, NotADirectoryError)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
CGROUPS = Path("/sys/fs/cgroup")
_KERNEL_OVERHEAD = 64 << 20  # page tables, sockets and the like, which a cgroup charges too


def descendants(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(*_GONE):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from descendants(int(child))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process tree, with the children that were waited for."""
    return sum(map(_cpu_ticks, descendants(pid))) / _TICKS


def exceeds_memory(pid: int, limit: int) -> bool:
    """Whether a process tree holds more than `limit` bytes, page tables among them, shared pages counted once."""
    tree = list(descendants(pid))
    if sum(map(_resident_bytes, tree)) <= limit:  # an upper bound, and cheap
        return False
    return sum(map(_proportional_bytes, tree)) > limit


def open_sockets(pid: int) -> int:
    """Sockets in the network namespace of a process."""
    with contextlib.suppress(*_GONE):
        first = Path(f"/proc/{pid}/net/sockstat").read_text().split("\n", 1)[0].split()
        return int(first[-1])
    return 0


def used_inodes(pid: int, directories: tuple[str, ...], size: int) -> int:
    """Files on the file systems of this size that a process sees at these paths; at first it sees the machine's."""
    total = 0
    for directory in directories:
        with contextlib.suppress(*_GONE):
            state = os.statvfs(f"/proc/{pid}/root{directory}")
            if 0 <= state.f_blocks * state.f_frsize - size < _PAGE:
                total += state.f_files - state.f_ffree
    return total


def _cpu_ticks(pid: int) -> int:
    with contextlib.suppress(*_GONE):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return 0


def _resident_bytes(pid: int) -> int:
    """With the page tables: a large mapping that is only read has no other pages."""
    with contextlib.suppress(*_GONE):  # a process may end while it is being measured: it then uses nothing
        return _field(pid, "status", "VmRSS:") + _field(pid, "status", "VmPTE:")
    return 0


def _field(pid: int, file: str, name: str) -> int:
    """A line of a file of /proc, in bytes; 0 where there is no such line."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def _proportional_bytes(pid: int) -> int:
    try:
        return _field(pid, "smaps_rollup", "Pss:") + _field(pid, "status", "VmPTE:")
    except PermissionError:
        return _resident_bytes(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Cgroup:
    """One cgroup for one sandbox; remove it when all its processes are gone."""

    def __init__(self, parent: Path, memory: int | None, processes: int | None) -> None:
        self.path = parent / f"tad-{secrets.token_hex(8)}"
        self.path.mkdir()
        if memory is not None:
            self._write("memory.max", memory + _KERNEL_OVERHEAD)
            self._write("memory.oom.group", 1)
            if (self.path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
        if processes is not None:
            self._write("pids.max", processes + 8)

    def add(self, pid: int) -> None:
        self._write("cgroup.procs", pid)

    def cpu_seconds(self) -> float:
        return int(self._read("cpu.stat").get("usage_usec", 0)) / 1e6

    def ran_out_of_memory(self) -> bool:
        return int(self._read("memory.events").get("oom_kill", 0)) > 0

    def kill(self) -> None:
        self._write("cgroup.kill", 1)

    def remove(self) -> None:
        for _ in range(200):
            try:
                self.path.rmdir()
            except OSError:  # the last process is still on its way out
                time.sleep(0.01)
            else:
                return
        raise SandboxError(f"{self.path}: processes of a sandbox are still there after they were killed")

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def _read(self, name: str) -> dict[str, str]:
        pairs = (line.split() for line in (self.path / name).read_text().splitlines())
        return {pair[0]: pair[1] for pair in pairs}


@cache
def find_cgroup() -> Path | None:
    """A cgroup below which this process may make others with limits on memory and processes; None if there is none."""
    chosen = os.environ.get("TAD_CGROUP")
    if chosen:
        if not _can_hold(Path(chosen)):
            raise SandboxError(
                f"TAD_CGROUP={chosen}: is not a writable cgroup (version 2) with the controllers memory and pids"
            )
        return Path(chosen)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = CGROUPS / line[3:].lstrip("/")
                return next((place for place in (own, own.parent) if _can_hold(place)), None)
    return None


def _can_hold(place: Path) -> bool:
    """Whether a cgroup can be made there, and a process moved into it."""
    try:
        if not {"memory", "pids"} <= set((place / "cgroup.subtree_control").read_text().split()):
            return False
        trial = Cgroup(place, None, None)
    except OSError:
        return False
    # A zombie until it is waited for, and a zombie can be moved.
    child = os.posix_spawn("/bin/true", ["true"], {})
    try:
        trial.add(child)
    except OSError:
        return False
    else:
        return True
    finally:
        os.waitpid(child, 0)
        trial.remove()
