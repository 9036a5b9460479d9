"""Programs that attack the machine: each is contained, and each succeeds where the one thing that contains it is off.

Off means: no sandbox at all, one limit lifted, or a grader that believes what it is told. Attacks on the verdict are in
test_forgery.py. The targets are
harmless: files of the test itself, a listener on the loopback, a process made to be killed, bounded numbers of children
and bytes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tad_sandbox import Limits, Sandbox, bwrap
from tad_sandbox.seccomp import filter_program

UNSAFE = Sandbox(contained=False)


def test_reading_a_file_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    program, tests = f"text = open({str(secret)!r}).read()", "assert text == 'the secret'"
    assert sandbox.run(program, tests).reason.startswith("program: FileNotFoundError")
    assert UNSAFE.run(program, tests).passed


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", "/root", "/home", "/sys"]
)
def test_reading_the_machine(sandbox: Sandbox, path: str) -> None:
    """Only the directories on the way to the interpreter exist, and they are empty but for it."""
    interpreter = Path(sys.executable).resolve()
    program = (
        "import os\n"
        f"names = os.listdir({path!r}) if os.path.isdir({path!r}) else [open({path!r}).read()]\n"
        f"allowed = {list(interpreter.parts)!r}\n"
    )
    outcome = sandbox.run(program, "assert not set(names) <= set(allowed)")
    assert not outcome.passed, outcome


def test_writing_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    target = tmp_path / "written"
    program = f"open({str(target)!r}, 'w').write('gotcha')"
    assert not sandbox.run(program).passed
    assert not target.exists()
    assert UNSAFE.run(program).passed
    assert target.read_text() == "gotcha"


def test_writing_to_the_interpreter(sandbox: Sandbox) -> None:
    program = "import os, json\nopen(os.path.join(os.path.dirname(json.__file__), 'planted.py'), 'w')"
    assert (
        "Read-only file system" in sandbox.run(program).reason or "Permission" in sandbox.run(program).reason
    )


def test_using_the_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5).close()"
        assert "OSError" in sandbox.run(program).reason or "Connection" in sandbox.run(program).reason
        assert UNSAFE.run(program).passed


def test_a_fork_bomb(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "for _ in range(60):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(3)\n"
        "        os._exit(0)\n"
    )
    assert sandbox.run(program).reason.startswith("program: BlockingIOError")
    assert Sandbox(Limits(processes=None)).run(program).passed


def test_a_thread_bomb(sandbox: Sandbox) -> None:
    program = (
        "import threading, time\nfor _ in range(60): threading.Thread(target=time.sleep, args=(3,)).start()"
    )
    assert sandbox.run(program).reason.startswith("program: RuntimeError: can't start new thread")
    assert Sandbox(Limits(processes=None, memory=None)).run(program).passed


def test_memory_of_one_process(sandbox: Sandbox) -> None:
    program = "x = bytearray(400 << 20)"
    assert Sandbox(Limits(memory=256 << 20)).run(program).reason.startswith("program: MemoryError")
    assert Sandbox(Limits(memory=None)).run(program).passed


def test_memory_of_many_processes(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "children = []\n"
        "for _ in range(4):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        x = bytearray(120 << 20)\n"
        "        time.sleep(1.5)\n"
        "        os._exit(0)\n"
        "    children.append(child)\n"
        "for child in children: assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert Sandbox(Limits(memory=256 << 20)).run(program).reason == "memory limit"
    assert Sandbox(Limits(memory=None)).run(program).passed


def test_spinning(sandbox: Sandbox) -> None:
    program = "import time\nwhile time.process_time() < 1.5: pass"
    assert Sandbox(Limits(cpu_seconds=1)).run(program).reason == "CPU limit"
    assert Sandbox(Limits(cpu_seconds=None)).run(program).passed


def test_spinning_with_the_signal_ignored(sandbox: Sandbox) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile time.process_time() < 4: pass"
    assert not Sandbox(Limits(cpu_seconds=1)).run(program).passed


def test_a_large_file(sandbox: Sandbox) -> None:
    program = "with open('/tmp/big', 'wb') as file: file.write(bytes(20 << 20))"
    assert not sandbox.run(program).passed
    assert Sandbox(Limits(file_size=None)).run(program).passed


def test_many_files(sandbox: Sandbox) -> None:
    program = "for number in range(10): open(f'/tmp/{number}', 'wb').write(bytes(10 << 20))"
    assert "No space left on device" in sandbox.run(program).reason
    assert Sandbox(Limits(scratch=256 << 20)).run(program).passed


def run_guarded(action: Callable[[], object]) -> int:
    """Run something in a process and process group of its own; the wait status tells whether it was killed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        action()
        os._exit(7)
    return os.waitpid(child, 0)[1]


def test_killing_the_parents_process_group(sandbox: Sandbox) -> None:
    program = (
        "import os, signal, time\n"
        "try: parent = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])\n"
        "except OSError: parent = 1\n"
        "os.killpg(os.getpgid(parent), signal.SIGKILL) if os.getpgid(parent) > 1 else os.kill(parent, signal.SIGKILL)\n"
        "time.sleep(1)\n"
    )
    sandbox.check()
    UNSAFE.check()
    survived = run_guarded(lambda: sandbox.run(program))
    assert os.waitstatus_to_exitcode(survived) == 7
    killed = run_guarded(lambda: UNSAFE.run(program))
    assert os.waitstatus_to_exitcode(killed) == -signal.SIGKILL


def test_a_symlink_out_of_the_scratch_space(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    program = f"import os\nos.symlink({str(secret)!r}, 'link')\ntext = open('link').read()"
    assert sandbox.run(program, "assert text == 'the secret'").reason.startswith("program: FileNotFoundError")
    assert UNSAFE.run(program, "assert text == 'the secret'").passed


@pytest.mark.parametrize(
    "leave", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit", "quit = exit = 0"]
)
def test_leaving_early(sandbox: Sandbox, leave: str) -> None:
    tests = "assert False"
    assert not sandbox.run(leave, tests).passed
    # A grader that looks at the exit status would have believed all but the last.
    naive = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{leave}\n{tests}"], capture_output=True, check=False
    )
    assert (naive.returncode == 0) == (leave != "quit = exit = 0")


def processes_with(marker: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return [pid for pid in found if pid != os.getpid()]


def test_a_background_process_left_behind(sandbox: Sandbox) -> None:
    marker = uuid.uuid4().hex
    program = (
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        open('started', 'w').close()\n"
        f"        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(90)', '{marker}'])\n"
        "    os._exit(0)\n"
        "import time\n"
        "while not os.path.exists('started'): time.sleep(0.05)\n"
        "time.sleep(0.5)\n"
    )
    started = "assert os.path.exists('started')"
    assert sandbox.run(program, started).passed
    deadline = time.monotonic() + 40
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(marker) == []
    assert UNSAFE.run(program, started).passed
    left = processes_with(marker)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 1


def run_unfiltered(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox, program: str) -> bool:
    monkeypatch.setattr(bwrap, "open_filter", lambda: None)
    return sandbox.run(program).passed


filtered = pytest.mark.skipif(filter_program() is None, reason="the calls of this machine are not known")
CALL = "import ctypes, os\nlibc = ctypes.CDLL(None)\n"


@filtered
@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(4):\n    os.write(os.memfd_create('hidden'), bytes(1 << 20))",
        CALL + "for _ in range(4):\n    assert libc.shmget(0, 1 << 20, 0o1600) >= 0",
        CALL + "assert libc.msgget(0, 0o1600) >= 0",
        "import mmap\nmmap.mmap(-1, 1 << 20)",  # shared, and kept after MADV_DONTNEED
    ],
)
def test_memory_that_no_process_holds(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    assert sandbox.run(program).reason.startswith(("program: PermissionError", "program: AssertionError"))
    assert run_unfiltered(monkeypatch, sandbox, program)


@filtered
@pytest.mark.parametrize(
    "program",
    [
        CALL + "assert libc.ptrace(0x4206, os.getppid(), 0, 0) == 0",
        "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (8, 8))",
    ],
    ids=["ptrace", "prlimit"],
)
def test_reaching_into_the_tests_process(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    assert not sandbox.run(program).passed
    assert run_unfiltered(monkeypatch, sandbox, program)


@filtered
@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_NETLINK", "AF_PACKET", "AF_ALG"])
def test_families_of_sockets(sandbox: Sandbox, family: str) -> None:
    kind = "SOCK_RAW" if family in ("AF_NETLINK", "AF_PACKET") else "SOCK_STREAM"
    program = f"import socket\nsocket.socket(socket.{family}, socket.{kind})"
    assert "not supported" in sandbox.run(program).reason


def test_sockets_within_the_sandbox_work(sandbox: Sandbox) -> None:
    program = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\nclient.send(b'x')\n"
        "assert server.accept()[0].recv(1) == b'x'\nhere, there = socket.socketpair()\nhere.send(b'x')"
    )
    assert sandbox.run(program).passed


@filtered
def test_the_sandboxs_own_process_cannot_be_freed_from_its_parent(sandbox: Sandbox) -> None:
    """Traced, bubblewrap's first process could be made to outlive this one, and everything in it too."""
    program = CALL + "assert any(libc.ptrace(request, 1, 0, 0) == 0 for request in (16, 0x4206))"
    assert sandbox.run(program).reason == "program: AssertionError"


def test_nothing_is_left_of_a_sandbox_when_its_outcome_is_there(sandbox: Sandbox) -> None:
    marker = uuid.uuid4().hex
    program = (
        "import os, sys\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        f"        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(20)', '{marker}'])\n"
        "import time; time.sleep(0.3)\n"
    )
    assert sandbox.run(program).passed
    assert processes_with(marker) == []  # at once: they were waited for


def test_cpu_time_of_children(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        while time.process_time() < 0.6: pass\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    assert Sandbox(Limits(cpu_seconds=1, seconds=120)).run(program).reason == "CPU limit"
    assert Sandbox(Limits(cpu_seconds=None, seconds=120)).run(program).passed


@filtered
def test_children_that_are_charged_to_nobody(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    assert sandbox.run(program).reason.startswith("program: PermissionError")
    assert run_unfiltered(monkeypatch, sandbox, program)


def test_memory_in_the_buffers_of_sockets(sandbox: Sandbox) -> None:
    program = (
        "import socket, time\n"
        "pairs = [socket.socketpair() for _ in range(60)]\n"
        "for here, there in pairs:\n"
        "    here.setblocking(False)\n"
        "    try:\n"
        "        while True: here.send(bytes(65536))\n"
        "    except BlockingIOError: pass\n"
        "time.sleep(0.6)\n"
    )
    assert sandbox.run(program).reason == "socket limit"
    assert Sandbox(Limits(sockets=None)).run(program).passed


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_more_inodes_than_files_should_need(sandbox: Sandbox, folder: str) -> None:
    program = f"import os, time\nfor number in range(5000): os.symlink('x', f'{folder}/{{number}}')\ntime.sleep(0.5)"
    assert Sandbox(Limits(inodes=4000)).run(program).reason == "inode limit"
    assert sandbox.run(program).passed


def test_shared_pages_are_counted_once(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "data = bytearray(b'x') * (100 << 20)\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.6)\n"
        "        os._exit(0)\n"
        "time.sleep(0.7)\n"
    )
    assert Sandbox(Limits(memory=256 << 20)).run(program).passed


PAGE_TABLES = """
import ctypes, mmap, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
start = libc.mmap(None, {size}, 1, 0x4022, -1, 0)
assert start != ctypes.c_void_p(-1).value, "refused"
libc.madvise(start, {size}, 15)
for place in range(start, start + {size}, 2 << 20):
    ctypes.c_char.from_address(place).value
time.sleep(0.5)
"""


def test_memory_in_page_tables(sandbox: Sandbox) -> None:
    """Read once in each 2 MiB, a mapping of 62 GiB has no pages of its own and 124 MiB of page tables."""
    program = PAGE_TABLES.format(size=62 << 30)
    assert Sandbox(Limits(memory=48 << 20)).run("import time\ntime.sleep(0.5)").passed
    assert Sandbox(Limits(memory=48 << 20)).run(program).reason == "memory limit"
    assert Sandbox(Limits(memory=400 << 20)).run(program).passed
    assert "refused" in sandbox.run(PAGE_TABLES.format(size=100 << 30)).reason
