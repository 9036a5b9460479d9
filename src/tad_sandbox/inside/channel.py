"""Messages between the two processes: JSON behind its length, on a pair of pipes."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from typing import Any

    Data = Any  # what `json` reads and writes

MESSAGE_BYTES = 64 << 20
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Gone(BaseException):
    """The other process has ended or does not keep to the protocol."""


class Channel:
    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write
        self.buffer = bytearray()

    def send(self, message: Data) -> None:
        text = _ENCODER.encode(message).encode()
        data = len(text).to_bytes(8, "big") + text
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except OSError as error:
            raise Gone from error

    def receive(self) -> Data:
        """A list; what is in it is for the reader to check."""
        length = int.from_bytes(self._read(8), "big")
        if length > MESSAGE_BYTES:
            raise Gone(f"sent more than {MESSAGE_BYTES >> 20} MiB at once")
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError, MemoryError) as error:
            raise Gone from error
        if type(message) is not list:
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
