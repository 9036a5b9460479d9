"""The sandbox: build bubblewrap's command, start it, hand the job over, keep what the monitor says."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tad_sandbox.errors import NoSandboxError, SandboxError
from tad_sandbox.monitor import Limits, Monitor, Outcome, Pipes
from tad_sandbox.seccomp import open_filter
from tad_sandbox.tree import interpreter_tree, show_publicly
from tad_sandbox.usage import Cgroup, find_cgroup

NOBODY = 65534
SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin"
# Not /dev/zero: mapped, it is memory that no limit counts.
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
ZONES = "/usr/share/zoneinfo"
INSIDE = "tad_sandbox.inside"
# In the order in which they need each other.
MODULES = ("values", "channel", "program", "stubs", "shipping", "trial", "start")
# Reads the modules of `inside` from the job's pipe, compiled, and starts the last of them.
BOOTSTRAP = """
import marshal, os, sys, types
job, report = map(int, sys.argv[1:3])
def read(count):
    data = b""
    while len(data) < count:
        data += os.read(job, count - len(data)) or sys.exit(1)
    return data
for name, code in marshal.loads(read(int(read(16)))):
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, module.__dict__)
for name in [name for name in sys.modules if name.startswith("tad_sandbox.")]:
    del sys.modules[name]
module.main(job, report)
"""


@dataclass(frozen=True)
class Job:
    """A program and its tests. Tests see the program's names, or, `as_module`, import it as `solution`.

    `names` are those of the program that its tests mean even where Python has a built-in one: a task about a function
    `sum` has such a test.
    """

    program: str
    tests: str
    as_module: bool = False
    names: tuple[str, ...] = ()


class Sandbox:
    """A way to run programs. One instance serves any number of threads."""

    def __init__(
        self,
        limits: Limits | None = None,
        contained: bool = True,
        packages: bool = False,
        together: bool = False,
    ) -> None:
        """`packages` lets programs import what is installed next to this package, read-only.

        `together` runs tests that cannot judge a program in its own process once more, in one process with it, where a
        program can forge its verdict.
        """
        self.together = together
        self.limits = limits or Limits()
        self.contained = contained
        self.paths = [path for path in sys.path if path.endswith("site-packages")] if packages else []
        self._checked = threading.Lock()
        self._usable = False

    def run(self, program: str, tests: str = "", as_module: bool = False) -> Outcome:
        return self.run_job(Job(program, tests, as_module))

    def run_many(
        self, jobs: Iterable[Job], workers: int | None = None, progress: Callable[[int], None] | None = None
    ) -> list[Outcome]:
        """All outcomes in order, `workers` programs at a time (default: one per core); `progress` is told of each."""

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
        try:
            outcome = self._run(job)
            if outcome.verdict == "cannot judge" and self.together:
                outcome = self._run(job, together=True)
            return outcome
        except Exception as error:  # whatever a program does to its judge, the others are judged
            return Outcome("failed", f"the judge failed: {type(error).__name__}: {error}"[:300], 0.0)

    def check(self) -> None:
        """Raise unless programs run here and, if they are to be contained, are. Done once."""
        with self._checked:
            if self._usable:
                return
            outcome = self._run(Job("", CONTAINED_CHECK if self.contained else ""))
            if not outcome.passed:
                cause = " ".join((outcome.output or outcome.reason).split())[:300]
                if self.contained:
                    raise NoSandboxError(f"the code sandbox does not work here ({cause}); {ADVICE}")
                raise SandboxError(f"cannot run programs here ({cause})")
            self._usable = True

    def _run(self, job: Job, together: bool = False) -> Outcome:
        cgroup = None
        if self.contained and (place := find_cgroup()) is not None:
            cgroup = Cgroup(place, self.limits.memory, self.limits.processes)
        with contextlib.ExitStack() as ours:
            if cgroup is not None:
                ours.callback(cgroup.remove)
            command, options, passed = self._command(ours)
            with contextlib.ExitStack() as theirs:
                job_read, job_write = _open_pipe(theirs, ours)
                report_read, report_write = _open_pipe(ours, theirs)
                output_read, output_write = _open_pipe(ours, theirs)
                status_read = release_write = -1
                if self.contained:
                    status_read, status_write = _open_pipe(ours, theirs)
                    command[-2:-2] = ["--json-status-fd", str(status_write)]
                    passed.append(status_write)
                if cgroup is not None:
                    release_read, release_write = _open_pipe(theirs, ours)
                    command[-2:-2] = ["--block-fd", str(release_read)]
                    passed.append(release_read)
                started = time.monotonic()
                process = subprocess.Popen(
                    [*command, *PYTHON_OPTIONS, "-c", BOOTSTRAP, str(job_read), str(report_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=output_write,
                    pass_fds=(job_read, report_write, *passed),
                    env={"PATH": SYSTEM_PATH} if command[0] == "unshare" else {},
                    **options,
                )
            pipes = Pipes(job_write, report_read, output_read, status_read, release_write)
            token = secrets.token_hex(16)
            message = self._message(job, token, together)
            monitor = Monitor(process, self.limits, started, message, token, pipes, cgroup)
            try:
                monitor.follow()
            finally:
                monitor.end(group=not self.contained)
            return replace(monitor.outcome(), together=together)

    def _message(self, job: Job, token: str, together: bool) -> bytes:
        """The code inside, what it must know before it forks, and the job, each behind its length.

        Only a report with the `token` counts: it is never in the program's process.
        """
        setup = {"limits": asdict(self.limits), "paths": self.paths}
        work = {**asdict(job), "token": token, "together": together}
        parts = (_inside_code(), json.dumps(setup).encode(), json.dumps(work).encode())
        return b"".join(b"%016d" % len(part) + part for part in parts)

    def _command(self, stack: contextlib.ExitStack) -> tuple[list[str], dict[str, Any], list[int]]:
        """What comes before the interpreter's arguments, options of `Popen`, and files to pass on."""
        if self.contained:
            shown = {path: show_publicly(path) if os.getuid() == 0 else path for path in self.paths}
            bwrap, *arguments = _contained_command(_find_bwrap(), self.limits.scratch, tuple(shown.items()))
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
                for path, public in shown.items():
                    if public != path:
                        command = ["unshare", "--mount", "sh", "-c", BIND, "sh", path, public, *command]
                return command, {}, passed
            return command, {"user": NOBODY, "group": NOBODY, "extra_groups": []}, passed
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tad-unsafe-"))
        return [str(Path(sys.executable).resolve())], {"cwd": scratch, "start_new_session": True}, []


# Root shows a directory at another place, to the command that follows and to nobody else.
BIND = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
PYTHON_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
ADVICE = "install bubblewrap (apt install bubblewrap) and allow user namespaces"

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
        raise NoSandboxError(
            f"generated code is only run in a sandbox, and bubblewrap (bwrap) is missing; {ADVICE}"
        )
    return bwrap


@cache
def _contained_command(bwrap: str, scratch: int, paths: tuple[tuple[str, str], ...]) -> list[str]:
    tree = interpreter_tree(unprivileged=os.getuid() == 0)
    command = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
    if "--disable-userns" in _bwrap_help(bwrap):
        command += ["--disable-userns"]
    # The scratch first: what is bound below may itself lie under /tmp, and must not be covered.
    command += ["--size", str(scratch), "--tmpfs", "/tmp"]
    # Semaphores and shared memory of `multiprocessing`.
    command += ["--size", str(scratch), "--perms", "1777", "--tmpfs", "/dev/shm"]
    for source, target in tree.mounts:
        command += ["--ro-bind", str(source), str(target)]
    for path in tree.hidden:
        command += ["--tmpfs", str(path), "--remount-ro", str(path)]
    for packages, shown in paths:
        command += ["--ro-bind", shown, packages]
    if Path(ZONES).is_dir():
        command += ["--ro-bind", ZONES, ZONES]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--chdir", "/tmp", "--remount-ro", "/"]
    return [*command, "--", str(tree.python)]


@cache
def _inside_code() -> bytes:
    """The modules of `inside`, compiled."""
    folder = Path(__file__).with_name("inside")
    return marshal.dumps(
        [
            (f"{INSIDE}.{name}", compile((folder / f"{name}.py").read_text(encoding="utf-8"), name, "exec"))
            for name in MODULES
        ]
    )


@cache
def _bwrap_help(bwrap: str) -> str:
    return subprocess.run([bwrap, "--help"], capture_output=True, text=True, check=False).stdout


def _open_pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """The two ends of a pipe, each closed by the stack of its owner."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write
