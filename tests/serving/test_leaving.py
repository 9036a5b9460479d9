"""Clients that go away, and a server that is told to go: on real connections and, for signals, in a real process."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live, live, wait_until

from tad.models import LM
from tad.serving import Settings

KEY = "secret"
HALF = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"  # a head that does not end


class Slow:
    """A model whose forwards take a while, and are counted with the rows in each."""

    def __init__(self, lm: LM, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
        self.rows: list[int] = []
        forward = lm.model.forward

        def slow(ids: Any, **rest: Any) -> Any:
            self.rows.append(len(ids))
            time.sleep(seconds)
            return forward(ids, **rest)

        monkeypatch.setattr(lm.model, "forward", slow)


def open_request(server: Live, receive_buffer: int = 2**16, **fields: Any) -> socket.socket:
    """A chat on a socket of its own."""
    body = json.dumps(server.body(**fields)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "waiting"])
def test_a_client_that_hangs_up_costs_at_most_one_more_forward(
    plain: LM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    slow = Slow(plain, monkeypatch, seconds=0.05)
    with live(plain) as server:
        connection = open_request(server, max_tokens=128, decoder="one-by-one", stream=stream)
        wait_until(lambda: len(slow.rows) >= 3)
        (ticket,) = server.engine._running.values()
        seen = []
        cancel = server.engine.cancel
        monkeypatch.setattr(server.engine, "cancel", lambda gone: seen.append(gone.forwards) or cancel(gone))
        connection.close()
        wait_until(lambda: server.engine.running == 0)
        assert ticket.cancelled
        assert ticket.forwards - seen[0] <= 1
        assert ticket.forwards < 20  # of 128
        forwards = len(slow.rows)
        time.sleep(0.2)
        assert len(slow.rows) == forwards
        assert server.engine.counts.cancelled == 1
        assert server.chat(max_tokens=8).status_code == 200


def test_clients_that_leave_the_queue_make_room(plain: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(plain, monkeypatch)
    with live(plain, Settings(batch=1, queue=2)) as server:
        connections = [open_request(server, max_tokens=128, decoder="one-by-one") for _ in range(3)]
        wait_until(lambda: server.engine.waiting == 2)
        assert server.chat(max_tokens=8).status_code == 429
        for connection in connections[1:]:
            connection.close()
        wait_until(lambda: server.engine.waiting == 0)
        assert server.engine.running == 1
        connections[0].close()
        assert server.chat(max_tokens=8).status_code == 200


def test_a_time_limit_is_a_503_or_an_error_in_the_stream(plain: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(plain, monkeypatch, seconds=0.05)
    with live(plain, Settings(seconds=0.2)) as server:
        whole = server.chat(max_tokens=128, decoder="one-by-one")
        events = server.events(max_tokens=128, decoder="one-by-one")
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "timeout"
    assert "0.2 s" in events[-1][1]["error"]["message"]


def test_while_draining_new_connections_get_a_503_and_what_runs_is_finished(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(plain, monkeypatch)
    with live(plain) as server:
        running = open_request(server, max_tokens=64, decoder="one-by-one")
        wait_until(lambda: len(slow.rows) >= 3)
        server.engine.drain(20)
        with server.client() as client:
            health, card = client.get("/health"), client.get("/v1/models")
        refused = server.chat()
        answer = b"".join(iter(lambda: running.recv(65536), b""))
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    for response in (card, refused):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutdown"
    assert all(int(response.headers["retry-after"]) > 0 for response in (health, card, refused))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"finish_reason"' in answer


# Signals, in a process of its own


class Process:
    """`tad serve` as a user starts it."""

    def __init__(self, checkpoint: Path, *options: str, descriptors: int | None = None) -> None:
        command = [sys.executable, "-m", "tad", "serve", str(checkpoint), "--port", "0", "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("TAD_API_KEY", None)

        def set_limit() -> None:
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        self.process = subprocess.Popen(
            [*command, "--no-request-log", *options],  # nobody reads the pipe
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=set_limit,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving at http://127.0.0.1:"), line + str(self.process.communicate())
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def client(self) -> httpx.Client:
        key = {"authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, headers=key)

    def stop(self) -> tuple[int, str, str]:
        """SIGTERM; exit code and what it printed."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def ask_until(server: Process, number: int, stop: threading.Event, outcomes: list[str]) -> None:
    """Ask again and again, streamed or not, until the server is gone; note what came."""
    streamed = number % 2 == 0
    body = {
        "model": "tiny-llada",
        "messages": [{"role": "user", "content": f"number {number}"}],
        "max_tokens": 64,
        "stream": streamed,
    }
    with server.client() as client:
        while not stop.is_set():
            try:
                response = client.post("/v1/chat/completions", json=body)
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
                # The listening socket or an idle connection was closed; an answer must not have been under way.
                outcomes.append("broken " + str(error) if "incomplete" in str(error) else "closed")
                return
            if response.status_code != 200:
                outcomes.append(f"{response.status_code} {response.json()['error']['code']}")
                return
            text = response.text
            complete = text.endswith("data: [DONE]\n\n") if streamed else response.json()["choices"]
            outcomes.append("complete" if complete or "error" in text else f"broken {text[-200:]}")


def connect_all(port: int, number: int) -> list[socket.socket]:
    """Many connections at once: none waits for the one before it."""
    found = [socket.socket() for _ in range(number)]
    for one in found:
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
    waiting = set(found)
    while waiting:
        _, ready, _ = select.select([], waiting, [], 20)
        assert ready, f"{len(waiting)} connections were not taken"
        waiting -= set(ready)
    return found


@pytest.mark.parametrize(
    "key", [pytest.param((), marks=pytest.mark.slow), ("--api-key", KEY)], ids=["open", "with a key"]
)
def test_400_silent_connections_neither_exhaust_256_descriptors_nor_hold_up_a_sigterm_under_load(
    checkpoint: Path, key: tuple[str, ...]
) -> None:
    server = Process(checkpoint, "--batch", "4", "--grace", "20", *key, descriptors=256)
    silent = connect_all(server.port, 400)
    for number, one in enumerate(silent):
        try:
            one.send((b"", HALF, b"\x00garbage\r\n\r\n")[number % 3])
        except OSError:
            continue  # it had to make room
    began = time.monotonic()
    for _ in range(5):
        with server.client() as client:
            assert client.get("/v1/models").status_code == 200
    assert time.monotonic() - began < 30
    outcomes: list[str] = []
    stop = threading.Event()
    threads = [
        threading.Thread(target=ask_until, args=(server, number, stop, outcomes)) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: outcomes.count("complete") >= 8, seconds=60)
    code, out, err = server.stop()
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    for one in silent:
        one.close()
    assert code == 0, err
    assert out.strip() == "stopped"
    assert "Traceback" not in err
    assert len(err) < 2000
    assert not [one for one in outcomes if one.startswith(("broken", "5")) and "shutdown" not in one]


@pytest.mark.slow
def test_requests_over_the_grace_get_a_clean_error_and_the_exit_code_is_0(checkpoint: Path) -> None:
    server = Process(checkpoint, "--batch", "1", "--grace", "0")
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"model": "tiny-llada", "prompt": "x", "max_tokens": 128, "decoder": "one-by-one"}
        with server.client() as client:
            answers.append(client.post("/v1/completions", json=body))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()

    def waiting() -> float:
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("tad_waiting "))

    wait_until(lambda: waiting() >= 3)
    code, _, err = server.stop()
    for thread in threads:
        thread.join(timeout=60)
    assert code == 0, err
    assert len(answers) == 12
    refused = [answer for answer in answers if answer.status_code == 503]
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert refused
    assert {answer.json()["error"]["code"] for answer in refused} == {"shutdown"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["--decoder", "magic"], "'magic'"),
        (["--decoder", "llada", "--threshold", "1"], "'threshold'"),
        (["--backend", "cloud"], "--backend cloud"),
        (["--replicas", "2"], "--replicas 2"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_before_the_model_is_read(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from tad.cli import app
    from tad.errors import TadError

    monkeypatch.delenv("TAD_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *options])
    assert isinstance(result.exception, TadError)
    assert message in str(result.exception)
