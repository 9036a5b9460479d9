"""Who is told how a collection goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tad.trajectories.store import ShardStats


@dataclass(frozen=True)
class CollectProgress:
    """How far a call is: rollouts made of those it has to make, and how many of the graded ones were right."""

    done: int
    total: int
    right: int
    graded: int


class CollectListener(Protocol):
    """Who is told how a collection goes on, and may ask it to stop after the shard in flight."""

    def say(self, line: str) -> None: ...

    def rollouts(self, progress: CollectProgress) -> None: ...

    def shard(self, shard: int, stats: ShardStats) -> None: ...

    def stopping(self) -> bool: ...


class NullListener:
    """Hears nothing and asks for nothing."""

    def say(self, line: str) -> None:
        pass

    def rollouts(self, progress: CollectProgress) -> None:
        pass

    def shard(self, shard: int, stats: ShardStats) -> None:
        pass

    def stopping(self) -> bool:
        return False
