"""Whether two LaTeX answers mean the same, decided by math-verify in worker processes.

A worker that hangs or dies costs one verdict and is replaced. Knows nothing of problems or prompts.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tad.errors import TadError
from tad.tasks.task import Progress

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 120.0
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
                if stream is not None:
                    _close_quietly(stream.fileno())
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


class Comparer:
    """A pool of workers. `seconds` bounds one comparison."""

    def __init__(self, workers: int | None = None, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.size = workers or os.cpu_count() or 1
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers = [Worker() for _ in range(self.size)]
        for worker in self._workers:
            self._idle.put(worker)
        _POOLS.add(self)

    def compare(self, pair: Pair) -> Comparison:
        """One comparison; safe to call from several threads."""
        worker = self._idle.get()
        try:
            return worker.compare(pair, self.seconds)
        finally:
            self._idle.put(worker)

    def compare_many(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[Comparison]:
        """All comparisons in order. Equal pairs are compared once."""
        weights = Counter(pairs)
        distinct = list(weights)
        lock = threading.Lock()

        def run(pair: Pair) -> Comparison:
            comparison = self.compare(pair)
            if progress is not None:
                with lock:
                    progress(weights[pair])
            return comparison

        with ThreadPoolExecutor(self.size) as threads:
            results = dict(zip(distinct, threads.map(run, distinct), strict=True))
        return [results[pair] for pair in pairs]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


_POOLS: weakref.WeakSet[Comparer] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_POOLS):
        pool.close()


def _close_quietly(descriptor: int) -> None:
    # Closing through the file object would flush into a dead process and raise.
    os.close(descriptor)
