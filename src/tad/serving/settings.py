"""What a server is started with: defaults of requests, limits, and who may call it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Times are in seconds, sizes in bytes."""

    decoder: str | None = None  # of requests that name none; None is the model's own
    threshold: float | None = None  # of that decoder; None is its own default
    name: str | None = None  # the id of the model; None is the name it was loaded by
    batch: int = 16  # rows decoded at once
    queue: int = 256  # requests that may wait; more are refused
    queue_seconds: float = 60.0  # longest wait
    seconds: float = 300.0  # longest decoding
    max_tokens: int | None = None  # None is half the context, at most 2048
    connections: int = 512  # at once; fewer where the process may open fewer files
    head_seconds: float = 10.0  # for the head of a request to arrive, and between two requests
    body_bytes: int = 2**20
    body_seconds: float = 30.0  # for a body to arrive
    stall_seconds: float = 10.0  # longest time a client may read nothing of its answer
    unread_bytes: int = 2**13  # of an answer that are kept for such a client, here and again in the kernel
    grace: float = 30.0  # for requests in flight when the server is told to stop
    key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()  # names in the Host header that are accepted besides this machine's own
    public: bool = False  # others can reach the address: any address may then stand in the Host header
    strict: bool = False  # refuse fields that would be ignored
    request_log: bool = False  # a line per request on standard error
