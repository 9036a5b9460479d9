"""Who is told how a chain or a study goes on, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from tad.evaluation.run import OnProgress
from tad.evaluation.sweep import Setting
from tad.trajectories.store import ShardStats


class Listener(Protocol):
    def say(self, line: str) -> None: ...

    def stage(self, title: str) -> AbstractContextManager[None]: ...

    def shard(self, shard: int, stats: ShardStats) -> None: ...

    def decoding(self, setting: Setting) -> OnProgress | None:
        """Asked for a run's own reporter when the run begins."""

    def step(self, step: int, steps: int | None) -> None: ...

    def stopping(self) -> bool: ...


class Silent:
    """Nobody."""

    def say(self, line: str) -> None:
        pass

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        yield

    def shard(self, shard: int, stats: ShardStats) -> None:
        pass

    def decoding(self, setting: Setting) -> OnProgress | None:
        return None

    def step(self, step: int, steps: int | None) -> None:
        pass

    def stopping(self) -> bool:
        return False


class Stopped(Exception):  # noqa: N818 - a request that was followed, not an error
    """The listener asked for it; what is there is kept."""
