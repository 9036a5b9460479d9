"""Running the application on a socket: where it may listen, with which key, and how it ends."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI

from tad.errors import TadError
from tad.serving.connection import BACKLOG, Connection
from tad.serving.engine import Engine
from tad.serving.metrics import Seldom
from tad.serving.settings import Settings

KEY_VARIABLE = "TAD_API_KEY"


def read_key(argument: str | None, file: Path | None) -> str | None:
    """The key from the command line, a file or the environment, in this order; None where there is none."""
    if argument is not None and file is not None:
        raise TadError("--api-key and --api-key-file: give one")
    if argument is not None:
        return _check_key(argument, "--api-key")
    if file is not None:
        try:
            return _check_key(file.read_text(encoding="utf-8"), f"--api-key-file {file}")
        except OSError as error:
            raise TadError(f"--api-key-file {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TadError(f"--api-key-file {file}: not text") from None
    given = os.environ.get(KEY_VARIABLE)
    return None if given is None else _check_key(given, KEY_VARIABLE)


def _check_key(key: str, where: str) -> str:
    key = key.strip()
    if not key:
        raise TadError(f"{where}: the key is empty")
    if not all("!" <= character <= "~" for character in key):
        raise TadError(
            f"{where}: a key consists of ASCII characters without spaces, so that a header can carry it"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost counts as public."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_bind(host: str, key: str | None) -> bool:
    """Whether the address is public; refused without a key."""
    public = not is_loopback(host)
    if public and key is None:
        raise TadError(
            f"--host {host}: others can reach this address, so a key is needed; set {KEY_VARIABLE} or --api-key-file"
        )
    return public


def serve(app: FastAPI, host: str, port: int, announce: Callable[[str], None] = lambda address: None) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight then have `Settings.grace` seconds. Returns when all is done."""
    try:
        Server(app, host, port, announce).run()
    except SystemExit:
        raise TadError(
            f"--host {host} --port {port}: the server could not start; is the port in use?"
        ) from None


class Server(uvicorn.Server):
    """uvicorn with our connections. Told to end, it answers new requests with 503 until those in flight are done."""

    def __init__(
        self, app: FastAPI, host: str, port: int, announce: Callable[[str], None] = lambda address: None
    ) -> None:
        self.settings: Settings = app.state.settings
        self.engine: Engine = app.state.engine
        self.announce = announce
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=Connection,
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=math.ceil(self.settings.head_seconds),
                # The engine is done by then: this is for clients to take their last bytes.
                timeout_graceful_shutdown=int(self.settings.stall_seconds) + 1,
            )
        )
        for name in ("uvicorn.error", "tad.serving", "asyncio"):
            logging.getLogger(name).addFilter(_Seldom())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                host, port = one.getsockname()[:2]
                self.announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.engine.draining:  # asked twice: do not wait
            self.should_exit = True
        self.engine.drain(self.settings.grace)

    async def on_tick(self, counter: int) -> bool:
        busy = self.engine.alive and self.engine.running + self.engine.waiting > 0
        if self.engine.draining and not busy:
            self.should_exit = True
        return await super().on_tick(counter)


class _Seldom(logging.Filter):
    """Messages that clients can cause, seldom; none where an answer comes too late for a connection that h11 has closed."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], h11.LocalProtocolError):
            return False
        return self._seldom.allows(str(record.msg))
