"""Follow one sandbox: feed it its job, collect what comes back, stop it at the first limit it passes, end all of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass

from tad_sandbox.errors import SandboxError
from tad_sandbox.usage import Cgroup, cpu_seconds, exceeds_memory, open_sockets, used_inodes

POLL_SECONDS = 0.1
REPORT_BYTES = 4096
VERDICTS = ("passed", "failed", "cannot judge")
SCRATCH = ("/tmp", "/dev/shm")


@dataclass(frozen=True)
class Limits:
    """What one program may use, together with its tests; None lifts a limit.

    A verdict should not depend on how busy the machine is, so it is CPU time that bounds honest programs; `seconds` of
    wall clock end the ones that wait. `memory` holds for each process and for all of them together, `scratch` for each
    of /tmp and /dev/shm. Of what is printed, `output` bytes are kept.
    """

    seconds: float = 30.0
    cpu_seconds: int | None = 10
    memory: int | None = 1 << 30
    processes: int | None = 32
    file_size: int | None = 16 << 20
    scratch: int = 64 << 20
    output: int | None = 2000
    sockets: int | None = 64
    inodes: int | None = 20_000


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "passed", "failed", or "cannot judge" where the tests ask for more than values. `output` is the beginning
    of what was printed. `together`: the verdict comes from one process with the program, which can forge it."""

    verdict: str
    reason: str
    seconds: float
    output: str = ""
    together: bool = False

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"


@dataclass(frozen=True)
class Pipes:
    """Our ends. `status` is where bubblewrap names its first process, `release` lets it go on; -1 where there is none."""

    job: int
    report: int
    output: int
    status: int = -1
    release: int = -1


class Monitor:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        limits: Limits,
        started: float,
        message: bytes,
        token: str,
        pipes: Pipes,
        cgroup: Cgroup | None = None,
    ) -> None:
        self.process, self.limits, self.started = process, limits, started
        self.message, self.token = message, token
        self.pipes, self.cgroup = pipes, cgroup
        self.report = b""
        self.output = b""
        self.status = b""
        self.stopped: str | None = None
        self.init: int | None = None
        """The first process in the sandbox's process namespace: the others do not outlive it."""
        self.init_watch: int | None = None
        for pipe in (pipes.job, pipes.report, pipes.output, pipes.status):
            if pipe >= 0:
                os.set_blocking(pipe, False)

    def follow(self) -> None:
        """Return when there is a report, when the process has ended, or when it must be ended."""
        exit_watch = os.pidfd_open(self.process.pid)
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(exit_watch, selectors.EVENT_READ)
                selector.register(self.pipes.job, selectors.EVENT_WRITE)
                for pipe in (self.pipes.report, self.pipes.output, self.pipes.status):
                    if pipe >= 0:
                        selector.register(pipe, selectors.EVENT_READ)
                deadline = self.started + self.limits.seconds
                measured = self.started
                while self.stopped is None and b"\n" not in self.report:
                    now = time.monotonic()
                    if now >= deadline:
                        self.stopped = "time limit"
                    elif now >= measured + POLL_SECONDS:
                        measured = now
                        self.stopped = self._passed_limit()
                    ended = False
                    for key, _ in selector.select(max(0.0, min(deadline - now, POLL_SECONDS))):
                        if key.fd == exit_watch:
                            ended = True
                        elif key.fd == self.pipes.job:
                            self._feed(selector)
                        elif not self._collect(key.fd):
                            selector.unregister(key.fd)
                    if ended:
                        break
                for pipe in (self.pipes.report, self.pipes.output):
                    while self._collect(pipe):
                        pass
            finally:
                os.close(exit_watch)

    def end(self, group: bool) -> None:
        """Kill every process of the sandbox and wait for the last; without bubblewrap, at least the process group."""
        if self.pipes.status >= 0 and self.init is None:
            self._collect(self.pipes.status)
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.cgroup is not None:
            self.cgroup.kill()
        try:
            if self.init_watch is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.init_watch, signal.SIGKILL)
                if not select.select([self.init_watch], [], [], 30)[0]:
                    raise SandboxError(f"process {self.init}: a sandbox does not end after it was killed")
        finally:
            if self.init_watch is not None:
                os.close(self.init_watch)
            self.process.kill()
            self.process.wait()

    def outcome(self) -> Outcome:
        seconds = time.monotonic() - self.started
        verdict, reason = self._judge()
        return Outcome(verdict, reason, seconds, self.output.decode(errors="replace"))

    def _judge(self) -> tuple[str, str]:
        line, complete, _ = self.report.partition(b"\n")
        if complete and self.stopped is None:
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
                report = json.loads(line)
                if report["token"] == self.token and report["verdict"] in VERDICTS:
                    return report["verdict"], str(report["reason"])
            return "failed", "a report that cannot be read"
        return "failed", self._end()

    def _end(self) -> str:
        """Why there is no report."""
        if self.stopped is not None:
            return self.stopped
        if self.cgroup is not None and self.cgroup.ran_out_of_memory():
            return "memory limit"
        code = self.process.returncode
        if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
            return "CPU limit"
        return f"ended without a verdict (exit status {code})"

    def _feed(self, selector: selectors.BaseSelector) -> None:
        try:
            self.message = self.message[os.write(self.pipes.job, self.message) :]
        except BrokenPipeError:
            self.message = b""
        if not self.message:
            selector.unregister(self.pipes.job)

    def _collect(self, pipe: int) -> bool:
        """Read what is there; False at the end of the stream, or when nothing is there."""
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return False
        if not data:
            return False
        if pipe == self.pipes.report:
            self.report += data
            if len(self.report) > REPORT_BYTES:
                self.report, self.stopped = b"", "report limit"
                return False
        elif pipe == self.pipes.status:
            self.status += data
            self._find_init()
        else:
            self.output = (self.output + data)[: self.limits.output]
        return True

    def _find_init(self) -> None:
        line, complete, _ = self.status.partition(b"\n")
        if self.init is not None or not complete:
            return
        self.init = int(json.loads(line)["child-pid"])
        with contextlib.suppress(ProcessLookupError):
            self.init_watch = os.pidfd_open(self.init)
        if self.cgroup is not None:
            with contextlib.suppress(ProcessLookupError):
                self.cgroup.add(self.process.pid)
                self.cgroup.add(self.init)
        if self.pipes.release >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.pipes.release, b"go")

    def _passed_limit(self) -> str | None:
        limits, pid, cgroup = self.limits, self.process.pid, self.cgroup
        if limits.cpu_seconds is not None:
            used = cgroup.cpu_seconds() if cgroup is not None else cpu_seconds(pid)
            if used > limits.cpu_seconds + 1:  # each process by itself is ended at the limit, and says so
                return "CPU limit"
        if limits.memory is not None and cgroup is None and exceeds_memory(pid, limits.memory):
            return "memory limit"
        if self.init is not None:
            if limits.sockets is not None and open_sockets(self.init) > limits.sockets:
                return "socket limit"
            if limits.inodes is not None and used_inodes(self.init, SCRATCH, limits.scratch) > limits.inodes:
                return "inode limit"
        return None
