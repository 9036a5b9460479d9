"""Running the application on a socket: where it may listen, with which key, and how it ends."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tad.errors import TadError
from tad.serving.engine import Engine

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


def serve(
    app: FastAPI,
    host: str,
    port: int,
    grace: float,
    announce: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight then have `grace` seconds. Returns when all is done."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        # The engine ends what is left after the grace; the rest is for handing those errors over.
        timeout_graceful_shutdown=int(grace) + 5,
    )
    server = _Server(config, app.state.engine, grace, announce)
    # uvicorn raises the signal again when it is done; a server that was asked to end has not failed.
    before = {which: signal.signal(which, _take_note) for which in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()
    except SystemExit:
        raise TadError(
            f"--host {host} --port {port}: the server could not start; is the port in use?"
        ) from None
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _take_note(signum: int, frame: FrameType | None) -> None:
    """The signal has been acted on already."""


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, engine: Engine, grace: float, announce: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self.engine, self.grace, self.announce = engine, grace, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                host, port = one.getsockname()[:2]
                self.announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.engine.drain(self.grace)
        super().handle_exit(sig, frame)
