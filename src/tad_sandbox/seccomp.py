"""System calls that a sandboxed program is refused, as a filter for bubblewrap's `--seccomp`.

Refused are calls that reach into another process (so that the program never gets at the tests, or at bubblewrap's own
process), that give memory which no limit counts, that make namespaces, mounts or keys, or that are of no use to a program
under test and large surfaces of the kernel; and every call that is newer than this list. Numbers are known for x86_64
and aarch64; elsewhere there is no filter.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

# How the kernel calls the architecture, and the place of its numbers in the table below.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: (x86_64, aarch64); None where the architecture has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # memory that belongs to no process and to no file system with a size
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    "remap_file_pages": (216, 234),
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
}
CLONE3 = 435  # its flags lie in memory where no filter sees them; told that it is missing, libc uses clone
NEWEST = 451
_CHECKED = {
    "clone": (56, 220),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "mmap": (9, 222),
    "prlimit64": (302, 261),
    "rt_sigaction": (13, 134),
}
_NEW_NAMESPACES = 0x7E020000  # the CLONE_NEW* flags
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_SIGCHLD = 17

_LOAD, _IF_EQUAL, _IF_ABOVE, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in what the kernel hands the filter
_OTHER_ABI = 0x40000000  # from here on, the same calls have other numbers
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000

Line = tuple[int, int, str | None, str | None]  # code, operand, where to go if so, where to go if not


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for this machine; None where its numbers are not known."""
    known = _ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column = known
    lines: list[Line | str] = [
        (_LOAD, _ARCHITECTURE_AT, None, None),
        (_IF_EQUAL, architecture, None, "refuse"),
        (_LOAD, _NUMBER_AT, None, None),
        (_IF_AT_LEAST, _OTHER_ABI, "refuse", None),
        (_IF_ABOVE, NEWEST, "missing", None),
        (_IF_EQUAL, CLONE3, "missing", None),
    ]
    lines += [(_IF_EQUAL, numbers[column], name, None) for name, numbers in _CHECKED.items()]
    lines += [
        (_IF_EQUAL, number, "refuse", None)
        for numbers in REFUSED.values()
        if (number := numbers[column]) is not None
    ]
    lines += [(_RETURN, _ALLOW, None, None)]
    lines += ["clone", _argument(0), (_IF_ANY_BIT, _NEW_NAMESPACES, "refuse", "allow")]
    lines += ["socket", _argument(0)]
    lines += [(_IF_EQUAL, family, "allow", None) for family in (_AF_INET, _AF_INET6)]
    lines += [(_IF_EQUAL, _AF_UNIX, "allow", "family")]
    lines += ["socketpair", _argument(0), (_IF_EQUAL, _AF_UNIX, "allow", "family")]
    # Shared memory without a file outlives its unmapping in every process that could be charged for it.
    lines += ["mmap", _argument(3), (_IF_ANY_BIT, _MAP_ANONYMOUS, None, "allow")]
    lines += [(_IF_ANY_BIT, _MAP_SHARED, "refuse", "allow")]
    lines += ["prlimit64", _argument(0), (_IF_EQUAL, 0, "allow", "refuse")]
    # With SIGCHLD ignored, the time of children is charged to nobody.
    lines += ["rt_sigaction", _argument(0), (_IF_EQUAL, _SIGCHLD, None, "allow")]
    lines += [_argument(1), (_IF_EQUAL, 0, None, "refuse"), _argument(1, high=True)]
    lines += [(_IF_EQUAL, 0, "allow", "refuse")]
    lines += ["allow", (_RETURN, _ALLOW, None, None)]
    lines += ["missing", (_RETURN, _ERROR | errno.ENOSYS, None, None)]
    lines += ["family", (_RETURN, _ERROR | errno.EAFNOSUPPORT, None, None)]
    lines += ["refuse", (_RETURN, _ERROR | errno.EPERM, None, None)]
    return _assemble(lines)


def open_filter() -> int | None:
    """The filter as a file to be read once, to be closed by the caller; None where there is none."""
    program = filter_program()
    if program is None:
        return None
    read, write = os.pipe()
    os.write(write, program)
    os.close(write)
    return read


def _argument(number: int, high: bool = False) -> Line:
    """Load half of an argument of the call."""
    return (_LOAD, _ARGUMENTS_AT + 8 * number + 4 * high, None, None)


def _assemble(lines: list[Line | str]) -> bytes:
    """Instructions with their labels turned into distances, which only lead forward."""
    labels: dict[str, int] = {}
    instructions: list[Line] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(instructions)
        else:
            instructions.append(line)
    program = b""
    for place, (code, operand, so, otherwise) in enumerate(instructions):
        jumps = [labels[label] - place - 1 if label else 0 for label in (so, otherwise)]
        program += struct.pack("=HBBI", code, *jumps, operand)
    return program
