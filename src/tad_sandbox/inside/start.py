"""The first code inside: limit this process, fork the one for the program, run the tests in this one, report.

The fork happens before the tests are read, and the program's process closes the pipes of the job and of the report
before it sees the program: neither is ever in its memory or among its files.
"""

from __future__ import annotations

import _signal
import itertools
import json
import os
import resource
import sys

from tad_sandbox.inside.channel import Channel, Gone
from tad_sandbox.inside.program import Program, execute
from tad_sandbox.inside.shipping import Shipper
from tad_sandbox.inside.stubs import JUDGES, Judge
from tad_sandbox.inside.trial import (
    Apart,
    Together,
    Watched,
    describe,
    replaces_elsewhere,
    run_tests,
    share_seeds,
)

# Threads reserve a lot and use little; page tables of more than this would be memory that no other limit counts.
ADDRESS_SPACE = 64 << 30

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from typing import Any


def read_exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            raise EOFError("the job ended early")
        data += part
    return data


def read_part(descriptor: int) -> Any:
    return json.loads(read_exactly(descriptor, int(read_exactly(descriptor, 16))))


def set_limits(limits: dict) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"] and limits["cpu_seconds"] + 1,
        resource.RLIMIT_DATA: limits["memory"],
        resource.RLIMIT_AS: limits["memory"] and max(limits["memory"], ADDRESS_SPACE),
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["file_size"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(hard, value)
            # Past the lower CPU limit comes a signal that tells the parent why; past the upper one SIGKILL.
            soft = max(value - 1, 1) if kind == resource.RLIMIT_CPU else value
            resource.setrlimit(kind, (soft, value))


def serve_program(channel: Channel) -> None:
    """Run the program and whatever the tests ask of it, until they are done."""
    try:
        Program().serve(channel)
    except Gone:
        os._exit(0)


def main(job_pipe: int, report_pipe: int) -> None:
    setup = read_part(job_pipe)
    sys.argv = [""]
    sys.path += setup["paths"]
    set_limits(setup["limits"])
    asked, answered = os.pipe(), os.pipe()
    ours = Channel(answered[0], asked[1])
    child = os.fork()
    if child == 0:
        theirs = Channel(asked[0], answered[1])
        close_others(theirs)
        serve_program(theirs)
    close_others(ours, job_pipe, report_pipe)
    os.set_inheritable(report_pipe, False)
    # A signal of the program's ends the tests, and raises nothing.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    keep_imports()
    job = read_part(job_pipe)
    token = job.pop("token")
    judge = Judge(ours)
    verdict, reason = run_job(judge, job, child)
    if os.getpid() != judge.process:  # a child of the tests that came this far
        os._exit(1)
    if sys.__stdout__ is not None and not sys.__stdout__.closed:
        sys.__stdout__.flush()
    report = {"token": token, "verdict": verdict, "reason": reason[:300]}
    os.write(report_pipe, json.dumps(report).encode() + b"\n")
    os._exit(0)


def run_job(judge: Judge, job: dict[str, Any], child: int) -> tuple[str, str]:
    """The verdict and why. Whatever a test made of it, what could not be judged or answered did not pass."""
    JUDGES.append(judge)
    shipper = Shipper(judge)
    judge.export, judge.around = shipper.export, Watched().changes
    failure: str | None = ""
    try:
        program: Apart | Together
        if job["together"]:
            program = Together(execute(job["program"]))
        else:
            program = Apart(judge, job["program"])
            if "random.seed" in job["tests"]:
                share_seeds(judge)
    except Gone:
        return "failed", describe_end(child, judge)
    except BaseException as error:
        return "failed", f"program: {describe(error)}"
    try:
        failure = run_tests(program, job)
    except Gone:
        judge.broken = judge.broken or "stopped answering"
    if judge.refused is not None:
        return "cannot judge", judge.refused or "the tests ask for more than values"
    if judge.broken is not None:
        return "failed", describe_end(child, judge)
    if failure is not None:
        if isinstance(program, Apart) and replaces_elsewhere(job["tests"]):
            return "cannot judge", f"the tests replace what the program does not see ({failure})"
        return "failed", failure
    return "passed", "passed"


def keep_imports() -> None:
    """Nothing is imported into this process from where the program can write."""
    known = [path.rstrip("/") for path in sys.path]

    def keep(hook: Any) -> Any:
        def find(path: str) -> Any:
            if not any(path == place or path.startswith(f"{place}/") for place in known):
                raise ImportError(path)
            return hook(path)

        return find

    sys.path_hooks[:] = map(keep, sys.path_hooks)


def close_others(channel: Channel, *more: int) -> None:
    """Leave open the three streams, this channel, and `more`."""
    kept = sorted({2, *more, channel.read, channel.write, 1024})
    for low, high in itertools.pairwise(kept):
        os.closerange(low + 1, high)


def describe_end(child: int, judge: Judge) -> str:
    """How the program's process ended; one that only stopped answering is ended."""
    import signal
    import time

    ended, status = os.waitpid(child, os.WNOHANG)
    for _ in range(50):
        if ended:
            break
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        return f"program: {judge.broken or 'stopped answering'}"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "CPU limit" if number == signal.SIGXCPU else f"program: ended by {signal.Signals(number).name}"
    return f"program: ended with exit status {os.WEXITSTATUS(status)}"
