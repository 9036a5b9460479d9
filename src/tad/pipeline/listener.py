"""Who is told how a chain or a study goes on, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from tad.evaluation.run import OnProgress
from tad.evaluation.sweep import Setting
from tad.trajectories.listener import CollectListener, NullListener


class Listener(CollectListener, Protocol):
    def stage(self, title: str) -> AbstractContextManager[None]: ...

    def decoding(self, setting: Setting) -> OnProgress | None:
        """Asked for a run's own reporter when the run begins."""

    def step(self, step: int, steps: int | None) -> None: ...


class Silent(NullListener):
    """Hears nothing and asks for nothing."""

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        yield

    def decoding(self, setting: Setting) -> OnProgress | None:
        return None

    def step(self, step: int, steps: int | None) -> None:
        pass


class Stopped(Exception):  # noqa: N818 - a request that was followed, not an error
    """The listener asked for it; what is there is kept."""
