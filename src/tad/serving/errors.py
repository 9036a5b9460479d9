"""Errors as OpenAI's clients read them: one JSON shape for every refusal and failure."""

from __future__ import annotations

from collections.abc import Sequence
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


def explain(problems: Sequence[Any]) -> tuple[str, str | None]:
    """One line on what is wrong with the first bad field of a body, and its name, from pydantic's list of errors."""
    # A field of several possible types has a problem with each of them; the deepest is with the one that was meant.
    same = [one for one in problems if one["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(same, key=lambda one: len(one["loc"]))
    *place, last = problem["loc"]
    kind, said = problem["type"], str(problem["msg"])
    if kind == "json_invalid":
        return f"the body is not JSON: {problem.get('ctx', {}).get('error', said)}", None
    if not place:
        return f"the body should be a JSON object with the fields of a request: {said}", None
    known = [part for part in place[1:] if _is_field(part)]
    if kind == "extra_forbidden" or _is_field(last):
        known.append(str(last)[:100])
    param = ".".join(map(str, known))
    if kind == "extra_forbidden":
        return f"field '{param}' is not supported", param
    if kind == "missing":
        return f"field '{param}' is missing", param
    return f"field '{param}': {said}", param


def _is_field(part: Any) -> bool:
    """Whether a part of an error's place is a field or an index, rather than pydantic's name of an alternative."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool"))
