"""How far a command is: a bar on a terminal, a line now and then in a log, and a Ctrl-C that lets work in flight finish.

Everything goes to standard error except what is said, which is part of the command's output. Commands say what is
counted and the facts beside it; time left and drawing are here.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tad.errors import printable

if TYPE_CHECKING:
    from typing_extensions import Self

_REDRAW = 0.1  # seconds between two drawings on a terminal
_SELDOM = 5.0  # seconds between two lines in a log
_BAR = 20  # characters
T = TypeVar("T")


class Progress:
    """Used in a `with` block, which restores Ctrl-C. `in_flight` names what a first Ctrl-C lets finish; None: it stops at once."""

    def __init__(self, in_flight: str | None = None) -> None:
        self.in_flight, self.interrupted = in_flight, False
        self._label, self._began, self._drawn, self._open = "", time.monotonic(), 0.0, False
        self._handler: Any = None

    def __enter__(self) -> Self:
        if self.in_flight is not None:
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def _interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        typer.echo(f"\nfinishing {self.in_flight}; press Ctrl-C again to drop it", err=True)

    def stopping(self) -> bool:
        """Whether Ctrl-C was pressed; work asks this between its pieces."""
        return self.interrupted

    def say(self, line: str) -> None:
        """A line of the command's output."""
        self._end_line()
        typer.echo(line)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A heading, and the seconds under it."""
        self.say(f"\n== {title}")
        self.begin()
        began = time.monotonic()
        yield
        self.say(f"   ({time.monotonic() - began:.0f} s)")

    def begin(self, label: str = "") -> None:
        """A new count: its name, and its clock."""
        self._label, self._began = label, time.monotonic()

    def update(self, done: int, total: int, facts: str = "", made: int | None = None) -> None:
        """`made` of what is done was done since `begin`; the rest was there before and says nothing about the speed."""
        passed, made = time.monotonic() - self._began, done if made is None else made
        last = done >= total
        time_text = (
            f"{passed:.0f} s" if last else f"{(total - done) * passed / made:.0f} s left" if made else ""
        )
        bar = ""
        if sys.stderr.isatty():
            filled = _BAR * done // max(1, total)
            bar = f"{'━' * filled}{'─' * (_BAR - filled)} "
        label = f"{self._label}: " if self._label else ""
        self.draw("  ".join(part for part in (f"{label}{bar}{done}/{total}", facts, time_text) if part), last)

    def draw(self, line: str, last: bool = False) -> None:
        """A line of progress: over the one before on a terminal, else now and then. The last one always stands."""
        live, now = sys.stderr.isatty(), time.monotonic()
        if not last and now - self._drawn < (_REDRAW if live else _SELDOM):
            return
        self._drawn, line = now, printable(line)
        typer.echo(f"\r\x1b[K{line}" if live else line, err=True, nl=last or not live)
        self._open = live and not last

    def over(self, items: Iterable[T], total: int) -> Iterator[T]:
        """The items, counted as they come."""
        for done, item in enumerate(items, start=1):
            self._clear()
            yield item
            self.update(done, total)

    def _clear(self) -> None:
        """Take an unfinished line off the terminal, so that output can stand there."""
        if self._open:
            typer.echo("\r\x1b[K", err=True, nl=False)
            self._open = False

    def _end_line(self) -> None:
        if self._open:
            typer.echo("", err=True)
            self._open = False
