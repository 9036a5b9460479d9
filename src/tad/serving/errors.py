"""Errors as OpenAI's clients read them: one JSON shape for every refusal and failure."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """A refusal that the client is told: `param` names the field of the request, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error")
    text = " ".join(_sendable(message).split())
    named = None if param is None else _sendable(param)
    return {"error": {"message": text, "type": kind, "param": named, "code": code}}


def _sendable(text: str) -> str:
    """Without the lone surrogates that JSON's escapes can smuggle into a string and UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
