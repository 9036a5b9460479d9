"""A real server in a thread, and small ways to talk to it."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from tad.models import LM
from tad.serving import Engine, Settings
from tad.serving.app import create_app
from tad.serving.server import Server


@dataclass(frozen=True)
class Live:
    app: FastAPI
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        return self.app.state.engine

    @property
    def model(self) -> str:
        return self.app.state.validator.name

    def client(self, **options: Any) -> httpx.Client:
        # Without TLS there are no certificates to read, which takes longer than most requests.
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, **options)

    def body(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        """A chat request."""
        return {"model": self.model, "messages": [{"role": "user", "content": text}], **fields}

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/chat/completions", json=self.body(text, **fields))

    def events(self, text: str = "hello", **fields: Any) -> list[tuple[str | None, Any]]:
        """Name and data of every event of a streamed chat."""
        response = self.chat(text, stream=True, **fields)
        assert response.status_code == 200, response.text
        return read_events(response.text)


def read_events(text: str) -> list[tuple[str | None, Any]]:
    found = []
    for block in text.split("\n\n"):
        name, data = None, None
        for line in block.split("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data = value if value == "[DONE]" else json.loads(value)
        if data is not None:
            found.append((name, data))
    return found


@contextmanager
def live(lm: LM, settings: Settings | None = None) -> Iterator[Live]:
    app = create_app(lm, settings)
    server = Server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Live(app, server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        if thread.is_alive():
            raise AssertionError(f"the server does not end:\n{stacks()}")


def stacks() -> str:
    """Where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame, limit=-12))}"
        for ident, frame in sys._current_frames().items()
    )


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
