"""Programs that attack: each is contained, and each succeeds where the one thing that contains it is switched off.

Switched off means: no sandbox at all, one limit lifted, or a grader that believes what it is told. The targets are
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

from tad.tasks.sandbox import Limits, Sandbox, box
from tad.tasks.sandbox.calls import filter_program

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
    program = "import time\nwhile time.process_time() < 2: pass"
    assert Sandbox(Limits(cpu_seconds=1)).run(program).reason == "CPU limit"
    assert Sandbox(Limits(cpu_seconds=None)).run(program).passed


def test_spinning_with_the_signal_ignored(sandbox: Sandbox) -> None:
    program = "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile time.process_time() < 4: pass"
    assert not Sandbox(Limits(cpu_seconds=1)).run(program).passed


def test_endless_output(sandbox: Sandbox) -> None:
    program = "for _ in range(300): print('x' * 10_000)"
    assert sandbox.run(program).reason == "output limit"
    assert Sandbox(Limits(output=None)).run(program).passed


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
        "parent = os.getppid()\n"
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


FAKE = """
import json, os, sys
print("passed")
for descriptor in range(1, 64):
    try:
        os.write(descriptor, b'passed\\n{"nonce": "", "passed": true, "reason": "passed"}\\n')
    except OSError:
        pass
frame = sys._getframe()
while frame is not None:
    for value in list(frame.f_locals.values()):
        if isinstance(value, str) and len(value) == 32:
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, json.dumps({"nonce": value, "passed": True, "reason": "passed"}).encode())
                except OSError:
                    pass
    frame = frame.f_back
os._exit(0)
"""


def test_writing_a_fake_verdict(sandbox: Sandbox) -> None:
    outcome = sandbox.run(FAKE, "assert False")
    assert not outcome.passed
    # A grader that looks for the word in the output would have believed it.
    assert "passed" in outcome.output


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


def test_leaving_early_from_the_function_under_test(sandbox: Sandbox) -> None:
    program = "def f():\n    import os\n    os._exit(0)"
    outcome = sandbox.run(program, "assert f() == 1")
    assert outcome.reason == "ended without a verdict (exit status 0)"


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
        f"        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(20)', '{marker}'])\n"
        "    os._exit(0)\n"
        "import time; time.sleep(0.5)\n"
    )
    started = "assert os.path.exists('started')"
    assert sandbox.run(program, started).passed
    deadline = time.monotonic() + 5
    while processes_with(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(marker) == []
    assert UNSAFE.run(program, started).passed
    left = processes_with(marker)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 1


@pytest.mark.parametrize("line", ['{"nonce": "é"}\n'.encode(), b"[" * 3900 + b"\n"])
def test_a_report_that_breaks_its_reader(sandbox: Sandbox, line: bytes) -> None:
    program = (
        f"import os\nfor pipe in range(3, 30):\n    try: os.write(pipe, {line!r})\n    except OSError: pass"
    )
    assert sandbox.run(program, "assert False").reason == "tests: AssertionError"


@pytest.mark.skipif(filter_program() is None, reason="the calls of this machine are not known")
@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(4):\n    os.write(os.memfd_create('hidden'), bytes(1 << 20))",
        "import ctypes\nfor _ in range(4):\n    assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
    ],
)
def test_memory_that_no_process_holds(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    assert sandbox.run(program).reason.startswith(("program: PermissionError", "program: AssertionError"))
    monkeypatch.setattr(box, "open_filter", lambda: None)
    assert sandbox.run(program).passed
