"""Whether two LaTeX answers mean the same, decided by math-verify in worker processes.

A worker that hangs or dies costs one verdict and is replaced. Knows nothing of problems or prompts.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tad.errors import TadError
from tad.tasks.task import Progress

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 120.0
SECONDS = 10.0
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Pair:
    """What to compare. `whole`: the string is an answer and nothing else; otherwise a text to find one in."""

    gold: str
    target: str
    gold_whole: bool = True
    target_whole: bool = True


@dataclass(frozen=True)
class Comparison:
    """`read` is what the target was understood as."""

    equal: bool
    reason: str
    read: str | None = None


class Worker:
    """One process; used by one thread at a time. It starts on first use and again after a failure."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def compare(self, pair: Pair, seconds: float) -> Comparison:
        process = self._process or self._start()
        request = {**asdict(pair), "seconds": seconds}
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            reply = self._read_line(process, seconds + GRACE_SECONDS)
        except BrokenPipeError:
            reply = None
        if reply is None:
            reason = "comparison took too long" if process.poll() is None else "comparison crashed"
            self.close()
            return Comparison(False, reason)
        values = json.loads(reply)
        return Comparison(values["equal"], values["reason"], values.get("read"))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:  # unbuffered: nothing is flushed into a dead process
                    stream.close()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # -I: neither the current directory nor PYTHON* variables decide what the worker imports.
        process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._process, self._buffer = process, b""
        if self._read_line(process, START_SECONDS) is None:
            self.close()
            raise TadError(
                "the math grader did not start; install it with: pip install 'math-verify[antlr4_13_2]'"
            )
        return process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """The next line, or None when the time is over or the process has closed its output."""
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


_IDLE: list[Worker] = []  # those that wait for their next comparison
_LOCK = threading.Lock()


def compare_many(
    pairs: Sequence[Pair],
    workers: int | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> list[Comparison]:
    """All comparisons in order, on `workers` processes (default: one per core), each within `seconds`. Equal pairs are
    compared once."""
    weights = Counter(pairs)

    def run(pair: Pair) -> Comparison:
        with _LOCK:
            worker = _IDLE.pop() if _IDLE else Worker()
        try:
            comparison = worker.compare(pair, seconds)
        finally:
            with _LOCK:
                _IDLE.append(worker)
        if progress is not None:
            with _LOCK:
                progress(weights[pair])
        return comparison

    with ThreadPoolExecutor(workers or os.cpu_count()) as threads:
        results = dict(zip(weights, threads.map(run, weights), strict=True))
    return [results[pair] for pair in pairs]


@atexit.register
def _close_workers() -> None:
    for worker in _IDLE:
        worker.close()
