"""Messages between two processes: JSON behind its length, on a pair of pipes."""

from __future__ import annotations

import _thread
import json
import os

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from typing import Any

    Data = Any  # what `json` reads and writes

MESSAGE_BYTES = 1 << 30
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Gone(BaseException):
    """The other process has ended or no longer keeps to the protocol."""


class Channel:
    """One conversation: a request, possibly requests the other way, a reply."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write
        self.buffer = bytearray()
        self.lock = _thread.RLock()

    def send(self, message: Data) -> None:
        text = _ENCODER.encode(message).encode()
        data = len(text).to_bytes(8, "big") + text
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except OSError as error:
            raise Gone from error

    def receive(self) -> Data:
        length = int.from_bytes(self._read(8), "big")
        if length > MESSAGE_BYTES:
            raise Gone
        text = self._read(length)
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Gone from error
        if not isinstance(message, list) or not message or message[0] not in ("call", "ok", "error"):
            raise Gone
        return message

    def _read(self, count: int) -> bytes:
        while len(self.buffer) < count:
            try:
                part = os.read(self.read, max(1 << 16, min(count, 1 << 20)))
            except OSError as error:
                raise Gone from error
            if not part:
                raise Gone
            self.buffer += part
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data
