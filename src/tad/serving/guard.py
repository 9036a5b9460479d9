"""The door: who may call, from where, and with what. In front of every route, before anything is parsed.

A browser can be made to call a server on its own machine: by a page of another origin, or by a name that resolves to
this address (DNS rebinding). So the Host must be a known one, an Origin must be this server's, and a body must be JSON,
which a foreign page cannot send unasked. The key, where there is one, is asked for on every route but /health.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tad.serving.errors import ApiError
from tad.serving.settings import Settings

OPEN_PATH = "/health"
_PORTS = {"http": 80, "https": 443}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self._key = None if settings.key is None else _digest(settings.key)
        self._names = {"localhost", *(name.lower().rstrip(".") for name in settings.hosts)}
        if settings.public:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_headers(send)
        try:
            self._admit(scope)
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                receive = await self._read_body(scope, receive)
        except ApiError as error:
            await send_error(send, error)
            return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] == OPEN_PATH:
            return
        host = _only(scope, b"host")
        name, port = _split_host(host or "")
        if not self._knows(name):
            raise ApiError(
                403,
                f"Host '{name[:100]}' is not on the list; start the server with --allow-host",
                code="host",
            )
        for origin in _all(scope, b"origin"):
            if not _same_origin(origin, name, port):
                raise ApiError(403, "requests from pages of another origin are refused", code="origin")
        if self._key is not None and not self._has_key(_only(scope, b"authorization") or ""):
            raise ApiError(
                401,
                "a key is needed: Authorization: Bearer KEY, or the key as Basic password",
                code="invalid_api_key",
                headers={"www-authenticate": 'Basic realm="tad", charset="UTF-8"'},
            )

    def _knows(self, name: str) -> bool:
        """A name is known or refused. An address cannot be rebound; which ones occur depends on where we listen."""
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return self.settings.public or address.is_loopback or name in self._names

    def _has_key(self, header: str) -> bool:
        scheme, _, given = header.strip().partition(" ")
        given = given.strip()
        if scheme.lower() == "basic":
            try:
                _, _, given = base64.b64decode(given, validate=True).decode("utf-8").partition(":")
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        assert self._key is not None
        return hmac.compare_digest(_digest(given), self._key)

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Take in the whole body, within its limits, and hand it on as one message."""
        kind = (_only(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body should be JSON, with Content-Type: application/json", code="type")
        limit = self.settings.body_bytes
        declared = _only(scope, b"content-length") or "0"
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        try:
            body = await asyncio.wait_for(_collect(receive, limit), self.settings.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.settings.body_seconds:g} s") from None
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay


async def _collect(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left before its body was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(413, f"the body is over {limit} bytes", code="too_large", headers={"connection": "close"})


async def send_error(send: Send, error: ApiError) -> None:
    """A whole response that says what was refused."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(key.encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    """Put the security headers on every response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {key.lower() for key, _ in message["headers"]}
            added = [
                (key.encode(), value.encode())
                for key, value in _HEADERS.items()
                if key.encode() not in present
            ]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


def _all(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _only(scope: Scope, name: bytes) -> str | None:
    """A header that may stand there once."""
    found = _all(scope, name)
    if len(found) > 1:
        raise ApiError(400, f"header {name.decode()} stands there {len(found)} times")
    return found[0] if found else None


def _split_host(host: str) -> tuple[str, int | None]:
    """Name or address, in lower case and without brackets, and port."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return "", None


def _same_origin(origin: str, name: str, port: int | None) -> bool:
    """Whether a page of this origin was served under this Host. The scheme may differ: TLS may end before us."""
    try:
        parts = urlsplit(origin)
        default = _PORTS.get(parts.scheme)
        own = (parts.hostname or "").rstrip("."), parts.port or default
    except ValueError:
        return False
    return default is not None and own == (name, port or default)


def _digest(key: str) -> bytes:
    """Of one length whatever the key's, so that comparing takes the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
