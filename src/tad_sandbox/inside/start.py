"""The first code inside: limit this process, fork the one for the program, run the tests in this one, report.

The fork happens before the tests are read, and the program's process closes the pipes of the job and of the report
before it sees the program: neither is ever in its memory or among its files.
"""

from __future__ import annotations

import _signal
import contextlib
import itertools
import json
import os
import resource
import sys
import types

from tad_sandbox.inside.channel import Channel, Gone
from tad_sandbox.inside.peer import Peer
from tad_sandbox.inside.trial import run_trial

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from typing import Any

PROGRAM_FILE = "/tmp/solution.py"


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
        resource.RLIMIT_DATA: limits["memory"],  # not the address space: threads reserve a lot and use little
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


class Loader:
    """Gives `inspect` the text of the program, which is in no file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, name: str) -> str:
        return self.text


def serve_program(channels: list[Channel]) -> None:
    """Run the program and whatever the tests ask of it, until they are done."""
    solution = types.ModuleType("solution")
    space = solution.__dict__
    sys.modules["solution"] = solution  # dataclasses look their module up
    space["__file__"] = PROGRAM_FILE

    def execute(text: str) -> list[str]:
        space["__loader__"] = Loader(text)
        exec(compile(text, PROGRAM_FILE, "exec"), space)
        return list(space)

    peer = Peer(
        channels,
        trusted=False,
        exec=execute,
        names=lambda: list(space),
        get=space.__getitem__,
        set=space.__setitem__,
        delete=space.__delitem__,
        seed=lambda *arguments: __import__("random").seed(*arguments),
    )
    if channels[1:]:
        import threading

        for channel in channels[1:]:
            threading.Thread(target=serve_quietly, args=(peer, channel), daemon=True).start()
    serve_quietly(peer, channels[0])
    os._exit(0)


def serve_quietly(peer: Peer, channel: Channel) -> None:
    try:
        peer.serve_forever(channel)
    except Gone:  # the tests are done
        return


def main(job_pipe: int, report_pipe: int) -> None:
    setup = read_part(job_pipe)
    sys.argv = [""]
    sys.path += setup["paths"]
    set_limits(setup["limits"])
    theirs, ours = [], []
    for _ in range(setup["channels"]):
        asked, answered = os.pipe(), os.pipe()
        theirs.append(Channel(asked[0], answered[1]))
        ours.append(Channel(answered[0], asked[1]))
    child = os.fork()
    if child == 0:
        close_others(theirs)
        serve_program(theirs)
    close_others(ours, job_pipe, report_pipe)
    # A signal of the program's ends the tests, and raises nothing.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    job = read_part(job_pipe)
    try:
        failure = run_trial(Peer(ours, trusted=True), job["program"], job["tests"], job["as_module"])
    except Gone:
        failure = describe_end(child)
    with contextlib.suppress(Exception):  # the tests may have closed it
        print(end="", flush=True)
    os.write(report_pipe, json.dumps({"passed": not failure, "reason": failure or "passed"}).encode() + b"\n")
    os._exit(0)


def close_others(channels: list[Channel], *more: int) -> None:
    """Leave open the three streams, these channels, and `more`."""
    kept = sorted({2, *more, *(end for one in channels for end in (one.read, one.write)), 1024})
    for low, high in itertools.pairwise(kept):
        os.closerange(low + 1, high)


def describe_end(child: int) -> str:
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
        return "program: stopped answering"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return "CPU limit" if number == signal.SIGXCPU else f"program: ended by {signal.Signals(number).name}"
    return f"program: ended with exit status {os.WEXITSTATUS(status)}"
