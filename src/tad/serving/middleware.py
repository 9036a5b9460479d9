"""What stands before every route: counting, draining, who may call, and the body. Plain ASGI, outermost first.

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
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tad.serving.engine import Engine
from tad.serving.errors import ApiError
from tad.serving.settings import Settings

OPEN_PATH = "/health"  # asks for no key
_PORTS = {"http": 80, "https": 443}
_SECURITY_HEADERS = {
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


class RequestMiddleware:
    """Security headers on every response, and refusals: while draining, by Host, Origin and key, and of bodies."""

    def __init__(self, app: ASGIApp, settings: Settings, engine: Engine) -> None:
        self.app, self.settings, self.engine = app, settings, engine
        self.access = Access(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check_draining(scope["path"])
            if scope["path"] != OPEN_PATH:
                self.access.check(Headers(scope=scope))
            receive = await self._take_body(scope, receive)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, error.headers)
            await response(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)

    def _check_draining(self, path: str) -> None:
        if self.engine.draining and path not in (OPEN_PATH, "/metrics"):
            headers = {**retry_later(self.settings), "connection": "close"}
            raise ApiError(503, "the server is shutting down", code="shutdown", headers=headers)

    async def _take_body(self, scope: Scope, receive: Receive) -> Receive:
        """Take in the whole body, within its limits, and hand it on as one message."""
        headers = Headers(scope=scope)
        if scope["path"] == OPEN_PATH or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            # A body that nobody reads would be a way to hold a connection, and on /health one without a key.
            if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
                raise ApiError(
                    400, "a body is not expected here", code="body", headers={"connection": "close"}
                )
            return receive
        kind = (only(headers, "content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body should be JSON, with Content-Type: application/json", code="type")
        declared = only(headers, "content-length") or "0"
        if declared.isdigit() and int(declared) > self.settings.body_bytes:
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._collect(receive), self.settings.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.settings.body_seconds:g} s") from None
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay

    async def _collect(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client left before its body was complete")
            body += message.get("body", b"")
            if len(body) > self.settings.body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be used again.
        message = f"the body is over {self.settings.body_bytes} bytes"
        return ApiError(413, message, code="too_large", headers={"connection": "close"})


class Access:
    """Who may call: Host, Origin and key of a request's headers."""

    def __init__(self, settings: Settings) -> None:
        self.public = settings.public
        self._key = None if settings.key is None else _digest(settings.key)
        self._names = {"localhost", *(name.lower().rstrip(".") for name in settings.hosts)}
        if settings.public:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def check(self, headers: Headers) -> None:
        name, port = _split_host(only(headers, "host") or "")
        if not self._knows(name):
            message = f"Host '{name[:100]}' is not on the list; start the server with --allow-host"
            raise ApiError(403, message, code="host")
        if not all(_same_origin(origin, name, port) for origin in headers.getlist("origin")):
            raise ApiError(403, "requests from pages of another origin are refused", code="origin")
        if self._key is not None and not self._has_key(only(headers, "authorization") or ""):
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
        return self.public or address.is_loopback or name in self._names

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


def retry_later(settings: Settings) -> dict[str, str]:
    """When a server that is being replaced should be there again."""
    return {"retry-after": str(max(1, round(settings.grace)))}


def only(headers: Headers, name: str) -> str | None:
    """A header that may stand there once."""
    found = headers.getlist(name)
    if len(found) > 1:
        raise ApiError(400, f"header {name} stands there {len(found)} times")
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
