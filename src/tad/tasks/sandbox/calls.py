"""System calls that a sandboxed program is refused: those that give it memory which no limit counts.

A file in memory without a name, or a shared segment that is not attached, belongs to no process's address space and to no
file system with a size, so that neither the limits of a process nor the watch over all of them would see it. This is a
filter for bubblewrap's `--seccomp`, and not a list of what is safe.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

# memfd_create, memfd_secret, shmget, msgget; and how the kernel calls the architecture.
_REFUSED = {
    "x86_64": (0xC000003E, (319, 447, 29, 68)),
    "aarch64": (0xC00000B7, (279, 447, 194, 186)),
}
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in what the kernel hands the filter
_OTHER_ABI = 0x40000000  # from here on, the same calls have other numbers
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for this machine; None where its numbers are not known."""
    if (machine or platform.machine()) not in _REFUSED:
        return None
    architecture, numbers = _REFUSED[machine or platform.machine()]
    # Every jump leads to the last instruction, which refuses.
    last = 5 + len(numbers)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 0, last - 2, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_AT_LEAST, last - 4, 0, _OTHER_ABI),
        *((_JUMP_IF_EQUAL, last - 5 - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def open_filter() -> int | None:
    """The filter as a file to be read once, to be closed by the caller; None where there is none."""
    program = filter_program()
    if program is None:
        return None
    read, write = os.pipe()
    os.write(write, program)
    os.close(write)
    return read
