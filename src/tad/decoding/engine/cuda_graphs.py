"""A cache of CUDA graphs: a step runs eagerly until it comes a second time, and is replayed from its graph from then on.

A graph replays the same kernels on the same memory without the host's work of launching them one by one. Capturing one costs
several eager steps, so sizes and settings that come once (a client's own temperature) have none. The eager runs do the real
step and warm everything up (compilation, libraries); capturing does not execute anything, so no step is done twice.
Without CUDA a step simply runs, every time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

Launch = Callable[[], None]


class CudaGraphCache:
    """Graphs by key, the least recently used dropped beyond `limit`. All share one memory pool: nothing that a step makes
    on its way outlives it."""

    def __init__(self, capture: bool, limit: int) -> None:
        self.capture, self.limit = capture, limit
        self.graphs: OrderedDict[Hashable, Launch | None] = (
            OrderedDict()
        )  # key -> replay, None after its first run
        self.made = 0  # graphs ever captured (without CUDA, sizes ever run), dropped ones included
        self.seconds = 0.0  # spent on eager runs and capturing
        self.pool: Any = None  # of the graphs that are kept

    def run(self, key: Hashable, launch: Launch) -> None:
        """Do the step of this key. `launch` must be the same computation for the same key."""
        known = self.graphs.get(key)
        if known is not None:
            self.graphs.move_to_end(key)
            known()
            return
        began = time.perf_counter()
        launch()
        if not self.capture:
            self.graphs[key] = launch
        else:
            self.graphs[key] = self._capture(launch) if key in self.graphs else None
        self.made += self.graphs[key] is not None
        self.graphs.move_to_end(key)
        self.seconds += time.perf_counter() - began
        while len(self.graphs) > self.limit:
            self.graphs.popitem(last=False)

    def drop(self, matching: Callable[[Any], bool]) -> None:
        """Drop the graphs whose key matches."""
        for key in [key for key in self.graphs if matching(key)]:
            del self.graphs[key]

    def _capture(self, launch: Launch) -> Launch:
        torch.cuda.synchronize()
        if not any(
            self.graphs.values()
        ):  # a pool dies with the last graph that uses it, and cannot be taken up again
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's) may allocate meanwhile; only this one must not.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            launch()
        replay: Launch = graph.replay
        return replay
