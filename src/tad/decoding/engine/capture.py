"""Recording: a step runs as it is the first time, and from a CUDA graph from then on.

A graph replays the same kernels on the same memory without the host's work of launching them one by one. The first
run does the real step and warms everything up (compilation, libraries); recording does not execute anything, so the
step is not done twice. Without CUDA a step simply runs, every time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

Step = Callable[[], None]


class Recorder:
    """Steps by key, the least recently used forgotten beyond `limit`. All graphs share one pool of memory: nothing that
    a step makes on its way outlives it."""

    def __init__(self, capture: bool, limit: int) -> None:
        self.capture, self.limit = capture, limit
        self.steps: OrderedDict[Hashable, Any] = OrderedDict()  # key -> graph, or the step itself
        self.made = 0  # steps ever recorded, forgotten ones included
        self.seconds = 0.0  # spent on first runs and recording
        self.pool: Any = None  # of the graphs that are kept

    def run(self, key: Hashable, step: Step) -> None:
        """Do the step of this key. `step` must be the same computation for the same key."""
        known = self.steps.get(key)
        if known is not None:
            self.steps.move_to_end(key)
            known()
            return
        began = time.perf_counter()
        step()
        self.steps[key] = self._record(step) if self.capture else step
        self.made += 1
        self.seconds += time.perf_counter() - began
        while len(self.steps) > self.limit:
            self.steps.popitem(last=False)

    def forget(self, matching: Callable[[Any], bool]) -> None:
        """Drop the steps whose key matches."""
        for key in [key for key in self.steps if matching(key)]:
            del self.steps[key]

    def _record(self, step: Step) -> Step:
        torch.cuda.synchronize()
        if not self.steps:  # a pool dies with the last graph that uses it, and cannot be taken up again
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's) may allocate meanwhile; only this one must not.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay
