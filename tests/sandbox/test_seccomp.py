"""The filter of system calls, run by a small interpreter of its own: for the architecture at hand and for the other one."""

from __future__ import annotations

import errno
import struct

import pytest

from tad_sandbox.seccomp import CLONE3, NEWEST, REFUSED, filter_program

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
MISSING, NO_FAMILY = 0x00050000 | errno.ENOSYS, 0x00050000 | errno.EAFNOSUPPORT
# Calls without which no interpreter starts or stops: read, write, close, mmap (private), execve, exit_group, futex, fork.
NEEDED = {"x86_64": (0, 1, 3, 59, 231, 202, 57, 257), "aarch64": (63, 64, 57, 221, 94, 98, 56, 172)}
CHECKED = {
    "x86_64": {"clone": 56, "socket": 41, "socketpair": 53, "mmap": 9, "prlimit64": 302, "rt_sigaction": 13},
    "aarch64": {
        "clone": 220,
        "socket": 198,
        "socketpair": 199,
        "mmap": 222,
        "prlimit64": 261,
        "rt_sigaction": 134,
    },
}


def judge(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would be told about a call."""
    program = filter_program(machine)
    assert program is not None
    called = struct.pack("=IIQ", number, architecture or ARCHITECTURES[machine], 0)
    called += struct.pack("=6Q", *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("=HBBI", program, place) for place in range(0, len(program), 8)]
    accumulator, place = 0, 0
    for _ in range(len(code)):
        instruction, so, otherwise, operand = code[place]
        place += 1
        if instruction == 0x20:
            (accumulator,) = struct.unpack_from("=I", called, operand)
        elif instruction == 0x06:
            return int(operand)
        else:
            holds = {
                0x15: accumulator == operand,
                0x25: accumulator > operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[instruction]
            place += so if holds else otherwise
    raise AssertionError("the filter does not end")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_named_is_refused_and_what_is_needed_is_not(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    for name, numbers in REFUSED.items():
        number = numbers[column]
        assert number is None or judge(machine, number) == REFUSE, name
    for number in NEEDED[machine]:
        assert judge(machine, number) == ALLOW, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_other_architectures_other_numbers_and_newer_calls_do_not_pass(machine: str) -> None:
    assert judge(machine, NEEDED[machine][0], architecture=0x40000003) == REFUSE
    assert judge(machine, 0x40000000 + NEEDED[machine][0]) == REFUSE
    assert judge(machine, NEWEST + 1) == MISSING
    assert judge(machine, CLONE3) == MISSING


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "arguments", "verdict"),
    [
        ("clone", (17,), ALLOW),
        ("clone", (0x3D0F00,), ALLOW),  # a thread
        ("clone", (0x10000000 | 17,), REFUSE),  # a user namespace
        ("clone", (0x00020000 | 17,), REFUSE),  # a mount namespace
        ("socket", (1, 1, 0), ALLOW),
        ("socket", (2, 1, 0), ALLOW),
        ("socket", (10, 1, 0), ALLOW),
        ("socket", (16, 3, 0), NO_FAMILY),
        ("socket", (40, 1, 0), NO_FAMILY),
        ("socketpair", (1, 1, 0), ALLOW),
        ("socketpair", (30, 1, 0), NO_FAMILY),
        ("mmap", (0, 4096, 3, 0x22), ALLOW),  # private, without a file
        ("mmap", (0, 4096, 3, 0x01), ALLOW),  # shared, of a file
        ("mmap", (0, 4096, 3, 0x21), REFUSE),
        ("mmap", (0, 4096, 3, 0x23), REFUSE),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (2, 7), REFUSE),
        ("rt_sigaction", (15, 0x7000), ALLOW),
        ("rt_sigaction", (17, 0), ALLOW),  # asks how it is handled
        ("rt_sigaction", (17, 0x7000), REFUSE),
        ("rt_sigaction", (17, 0x700000000000), REFUSE),
    ],
)
def test_calls_whose_arguments_decide(
    machine: str, name: str, arguments: tuple[int, ...], verdict: int
) -> None:
    assert judge(machine, CHECKED[machine][name], *arguments) == verdict


def test_no_number_is_named_twice_and_none_is_newer_than_the_list() -> None:
    for column in range(2):
        numbers = [pair[column] for pair in REFUSED.values() if pair[column] is not None]
        assert len(set(numbers)) == len(numbers)
        assert all(number <= NEWEST for number in numbers if number is not None)


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") is None
