"""The sandbox itself: build the command, run it, watch it, read its report."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.tasks.sandbox.calls import open_filter
from tad.tasks.sandbox.tree import interpreter_tree
from tad.tasks.task import Progress

NOBODY = 65534
SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin"
WATCH_SECONDS = 0.1
REPORT_BYTES = 4096
KEPT_OUTPUT = 2000
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Limits:
    """What one program may use; None lifts a limit. Memory holds for each process and for all of them together.

    A verdict should not depend on how busy the machine is, so it is CPU time that bounds honest programs; `seconds` of
    wall clock end the ones that wait.
    """

    seconds: float = 30.0
    cpu_seconds: int | None = 10
    memory: int | None = 1 << 30
    processes: int | None = 32
    file_size: int | None = 16 << 20
    scratch: int = 64 << 20
    output: int | None = 1 << 20


@dataclass(frozen=True)
class Job:
    """A program and its tests. Tests run in the program's namespace, or, `as_module`, import it as `solution`."""

    program: str
    tests: str
    as_module: bool = False


@dataclass(frozen=True)
class Outcome:
    """`output` is the beginning of what the program printed."""

    passed: bool
    reason: str
    seconds: float
    output: str = ""


class Sandbox:
    """A way to run programs. One instance serves any number of threads."""

    def __init__(self, limits: Limits | None = None, contained: bool = True, packages: bool = False) -> None:
        """`packages` lets programs import what is installed next to tad, read-only."""
        self.limits = limits or Limits()
        self.contained = contained
        self.paths = [path for path in sys.path if path.endswith("site-packages")] if packages else []
        self._checked = threading.Lock()
        self._usable = False

    def run(self, program: str, tests: str = "", as_module: bool = False) -> Outcome:
        return self.run_job(Job(program, tests, as_module))

    def run_many(
        self, jobs: Iterable[Job], workers: int | None = None, progress: Progress | None = None
    ) -> list[Outcome]:
        """All outcomes in order, `workers` programs at a time (default: one per core)."""

        def run(job: Job) -> Outcome:
            outcome = self.run_job(job)
            if progress is not None:
                progress(1)
            return outcome

        self.check()
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as threads:
            return list(threads.map(run, jobs))

    def run_job(self, job: Job) -> Outcome:
        self.check()
        return self._run(job)

    def check(self) -> None:
        """Raise unless programs run here and, if they are to be contained, are. Done once."""
        with self._checked:
            if self._usable:
                return
            outcome = self._run(Job("", CONTAINED_CHECK if self.contained else ""))
            if not outcome.passed:
                cause = " ".join((outcome.output or outcome.reason).split())[:300]
                raise TadError(
                    f"the code sandbox does not work here ({cause}); {ADVICE}"
                    if self.contained
                    else f"cannot run programs here ({cause})"
                )
            self._usable = True

    def _run(self, job: Job) -> Outcome:
        nonce = secrets.token_hex(16)
        payload = json.dumps({**asdict(job), "limits": asdict(self.limits), "paths": self.paths}).encode()
        message = b"%016d" % len(payload) + payload + nonce.encode()
        with contextlib.ExitStack() as ours:
            command, options, passed = self._command(ours)
            with contextlib.ExitStack() as theirs:
                job_read, job_write = _open_pipe(theirs, ours)
                report_write, report_read = reversed(_open_pipe(ours, theirs))
                output_write, output_read = reversed(_open_pipe(ours, theirs))
                started = time.monotonic()
                process = subprocess.Popen(
                    [
                        *command,
                        "-I",
                        "-S",
                        "-B",
                        "-X",
                        "utf8",
                        "-c",
                        runner_source(),
                        str(job_read),
                        str(report_write),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=output_write,
                    pass_fds=(job_read, report_write, *passed),
                    env={},
                    **options,
                )
            watch = Watch(process, self.limits, started, message, job_write, report_read, output_read)
            try:
                watch.follow()
            finally:
                _end(process, group=not self.contained)
        return watch.outcome(nonce)

    def _command(self, stack: contextlib.ExitStack) -> tuple[list[str], dict[str, Any], list[int]]:
        """What comes before the interpreter's arguments, options of `Popen`, and files to pass on."""
        if self.contained:
            bwrap, *arguments = _contained_command(_find_bwrap(), self.limits.scratch, tuple(self.paths))
            passed = []
            if (calls := open_filter()) is not None:
                stack.callback(os.close, calls)
                passed.append(calls)
                arguments = ["--seccomp", str(calls), *arguments]
            command = [bwrap, *arguments]
            if os.getuid() != 0:
                return command, {}, passed
            if setpriv := shutil.which("setpriv", path=SYSTEM_PATH):
                # Cheaper than the option below, with which Python has to copy this process's page tables.
                command = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
                return command, {}, passed
            return command, {"user": NOBODY, "group": NOBODY, "extra_groups": []}, passed
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tad-unsafe-"))
        return [str(Path(sys.executable).resolve())], {"cwd": scratch, "start_new_session": True}, []


ADVICE = "install bubblewrap (apt install bubblewrap) and allow user namespaces, or accept the risk with --unsafe-no-sandbox"

# What must be true of a contained process, checked from inside by the first program of every sandbox.
CONTAINED_CHECK = """
import os
assert not os.path.exists('/etc/passwd') and not os.path.exists('/home') and not os.path.exists('/proc')
assert set(os.environ) <= {'PWD', 'LC_CTYPE'}, set(os.environ)
assert os.getpid() < 10
assert os.getsid(0) != 0
try:
    open('/probe', 'w')
except OSError:
    pass
else:
    raise AssertionError('the root directory is writable')
"""


def _find_bwrap() -> str:
    bwrap = shutil.which("bwrap", path=SYSTEM_PATH)
    if bwrap is None:
        raise TadError(
            f"generated code is only run in a sandbox, and bubblewrap (bwrap) is missing; {ADVICE}"
        )
    return bwrap


@cache
def _contained_command(bwrap: str, scratch: int, paths: tuple[str, ...]) -> list[str]:
    tree = interpreter_tree(unprivileged=os.getuid() == 0)
    command = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
    if "--disable-userns" in _bwrap_help(bwrap):
        command += ["--disable-userns"]
    # The scratch first: what is bound below may itself lie under /tmp, and must not be covered.
    command += ["--size", str(scratch), "--tmpfs", "/tmp"]
    for mount in tree.mounts:
        command += ["--ro-bind", str(mount.source), str(mount.target)]
    for path in tree.hidden:
        command += ["--tmpfs", str(path), "--remount-ro", str(path)]
    for packages in paths:
        command += ["--ro-bind", packages, packages]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--chdir", "/tmp", "--remount-ro", "/"]
    return [*command, "--", str(tree.python)]


@cache
def runner_source() -> str:
    """The text of the first program inside."""
    return Path(__file__).with_name("runner.py").read_text(encoding="utf-8")


@cache
def _bwrap_help(bwrap: str) -> str:
    return subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False).stdout


class Watch:
    """Feeds a job to a process, collects what comes back, and stops it at the first limit it passes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        started: float,
        message: bytes,
        job_pipe: int,
        report_pipe: int,
        output_pipe: int,
    ) -> None:
        self.process, self.limits, self.started, self.message = process, limits, started, message
        self.job_pipe, self.report_pipe, self.output_pipe = job_pipe, report_pipe, output_pipe
        self.report = b""
        self.output = b""
        self.printed = 0
        self.stopped: str | None = None
        for pipe in (job_pipe, report_pipe, output_pipe):
            os.set_blocking(pipe, False)

    def follow(self) -> None:
        """Return when the process has ended or must be ended."""
        exit_watch = os.pidfd_open(self.process.pid)
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(exit_watch, selectors.EVENT_READ)
                selector.register(self.report_pipe, selectors.EVENT_READ)
                selector.register(self.output_pipe, selectors.EVENT_READ)
                selector.register(self.job_pipe, selectors.EVENT_WRITE)
                deadline = self.started + self.limits.seconds
                measured = self.started
                while self.stopped is None:
                    now = time.monotonic()
                    if now >= deadline:
                        self.stopped = "time limit"
                    elif now >= measured + WATCH_SECONDS:
                        measured = now
                        if self._too_much_memory():
                            self.stopped = "memory limit"
                    ended = False
                    for key, _ in selector.select(min(deadline - now, WATCH_SECONDS)):
                        if key.fd == exit_watch:
                            ended = True
                        elif key.fd == self.job_pipe:
                            self._feed(selector)
                        elif not self._collect(key.fd):
                            selector.unregister(key.fd)
                    if ended:
                        for pipe in (self.report_pipe, self.output_pipe):
                            while self._collect(pipe):
                                pass
                        break
            finally:
                os.close(exit_watch)

    def outcome(self, nonce: str) -> Outcome:
        seconds = time.monotonic() - self.started
        output = self.output.decode(errors="replace")
        passed, reason = self._judge(nonce)
        return Outcome(passed, reason, seconds, output)

    def _judge(self, nonce: str) -> tuple[bool, str]:
        for line in self.report.split(b"\n"):
            try:
                report = json.loads(line)
            except (ValueError, RecursionError):  # the program has found the pipe
                continue
            given = str(report.get("nonce")) if isinstance(report, dict) else ""
            if secrets.compare_digest(given.encode(errors="replace"), nonce.encode()):
                return report["passed"] is True, str(report["reason"])
        if self.stopped is not None:
            return False, self.stopped
        code = self.process.returncode
        if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
            return False, "CPU limit"
        return False, f"ended without a verdict (exit status {code})"

    def _feed(self, selector: selectors.BaseSelector) -> None:
        try:
            self.message = self.message[os.write(self.job_pipe, self.message) :]
        except BrokenPipeError:
            self.message = b""
        if not self.message:
            selector.unregister(self.job_pipe)

    def _collect(self, pipe: int) -> bool:
        """Read what is there; False at the end of the stream, when nothing is there, or when it was too much."""
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return False
        if not data or self.stopped is not None:
            return False
        if pipe == self.report_pipe:
            self.report += data
            if len(self.report) > REPORT_BYTES:
                self.report, self.stopped = b"", "report limit"
        else:
            self.printed += len(data)
            self.output = (self.output + data)[:KEPT_OUTPUT]
            if self.limits.output is not None and self.printed > self.limits.output:
                self.stopped = "output limit"
        return True

    def _too_much_memory(self) -> bool:
        if self.limits.memory is None:
            return False
        return sum(map(_resident_bytes, _descendants(self.process.pid))) > self.limits.memory


def _open_pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """The two ends of a pipe, each closed by the stack of its owner."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _descendants(int(child))


def _resident_bytes(pid: int) -> int:
    # A process may end while it is being measured: it then uses nothing.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _end(process: subprocess.Popen[bytes], group: bool) -> None:
    """Kill a process, with bubblewrap's whole namespace, or without it at least the process group."""
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
