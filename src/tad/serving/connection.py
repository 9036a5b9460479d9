"""A client's connection: how long a request may take to arrive, how long an answer may stay unread, how many there may be.

uvicorn's protocol waits for all of that without an end. Here a connection is closed when the head of a request is not
complete in time, or when its client has stopped reading. Where there are too many, the one that has waited
longest without a request makes room: a flood of silent connections does not keep out a client that asks.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
import time
from typing import Any, NamedTuple, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from tad.serving.settings import Settings

BACKLOG = 32  # connections the kernel holds back and the event loop accepts at a time
_RESERVED = (
    64 + 3 * BACKLOG
)  # descriptors for everything else, and for connections accepted but not yet counted
_PILED_UP = 2**12  # bytes a client's machine holds for a program that does not read them
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


def connection_limit(wanted: int) -> int:
    """As many connections as are wanted and the process has descriptors for."""
    import resource

    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if descriptors == resource.RLIM_INFINITY else max(8, min(wanted, descriptors - _RESERVED))


class Reading(NamedTuple):
    """How far a client's machine is with what was sent to it."""

    acked: int  # bytes it has taken in all
    window: int  # bytes it has room for: falls while its program reads nothing
    waiting: int  # bytes in our kernel that it has not taken


def read_progress(connection: socket.socket) -> Reading | None:
    """From Linux's `struct tcp_info`; None where the system has no such thing."""
    if sys.platform != "linux":
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < 232:
        return None
    (acked,), (window,) = struct.unpack_from("Q", info, 120), struct.unpack_from("I", info, 228)
    (waiting,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return Reading(acked, window, waiting)


class Connection(H11Protocol):
    """`app.state.settings` of the application holds the limits."""

    def __init__(self, config: Any, *rest: Any, **more: Any) -> None:
        super().__init__(config, *rest, **more)
        self.settings: Settings = config.app.state.settings
        self.since: float | None = None  # when it began to wait for a request's head; None while it has one
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._reading: Reading | None = None
        self._widest, self._read_at = (
            0,
            0.0,
        )  # largest window so far, and when the client was last seen to read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        unread = self.settings.unread_bytes
        transport.set_write_buffer_limits(high=unread)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unread)
        self._wait_for_head()
        if len(self.connections) > connection_limit(self.settings.connections):
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        self._note_request(before)

    def on_response_complete(self) -> None:
        # Also covers the rest of a body that was refused, and an answer that is written but not read.
        self._wait_for_head()
        before = self.cycle
        super().on_response_complete()  # may take up a request that was sent ahead
        self._note_request(before)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.settings.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _wait_for_head(self) -> None:
        self.since = time.monotonic()
        self._head_timer = self.loop.call_later(self.settings.head_seconds, self.transport.abort)

    def _note_request(self, before: Any) -> None:
        """Stop the clock where a new request has begun since `before` was the current one."""
        if self.cycle is not before and not self.cycle.response_complete:
            self.since = None
            if self._head_timer is not None:
                self._head_timer.cancel()
            self._read_at = time.monotonic()
            self._watch_reader()

    def _watch_reader(self) -> None:
        """Now and then while an answer is under way: a slow model fills no buffer that would tell of a client that stalls."""
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        before, now = self._reading, read_progress(self.transport.get_extra_info("socket"))
        self._reading = now
        if now is None:
            return
        self._widest = max(self._widest, now.window)
        refuses = before is not None and now.waiting > 0 and now.acked == before.acked
        piles_up = before is not None and self._widest - _PILED_UP >= now.window <= before.window
        if not refuses and not piles_up:
            self._read_at = time.monotonic()
        elif time.monotonic() - self._read_at >= self.settings.stall_seconds:
            self.transport.abort()
            return
        self._reader_timer = self.loop.call_later(self.settings.stall_seconds / 8, self._watch_reader)

    def _make_room(self) -> None:
        others = cast("set[Connection]", self.connections) - {self}
        waiting = [(one.since, one) for one in others if one.since is not None]
        if waiting:
            oldest = min(waiting, key=lambda pair: pair[0])[1]
            self.connections.discard(oldest)  # it is lost only in the loop's next turn, after other newcomers
            oldest.transport.abort()
        else:
            self.transport.write(_BUSY)
            self.transport.close()
