"""Clients that take up room and give nothing: heads that never end, answers nobody reads, more connections than there may be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection

import pytest
from live_server import Live, live, wait_until
from test_leaving import HALF as HEAD
from test_leaving import Slow, open_request

from tad.models import LM
from tad.serving import Settings


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    """Whether the server ends the connection; what it sends before is read."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            continue
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def dribble(connection: socket.socket, byte: bytes = b"x") -> None:
    """A byte every now and then, for as long as the other side takes it."""

    def send() -> None:
        try:
            while True:
                connection.sendall(byte)
                time.sleep(0.05)
        except OSError:
            return

    threading.Thread(target=send, daemon=True).start()


def say_nothing(connection: socket.socket) -> None:
    pass


def send_half(connection: socket.socket) -> None:
    connection.sendall(HEAD)


def send_a_byte_at_a_time(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"X-Slow: ")
    dribble(connection)


def begin_a_second_request(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n" + HEAD + b"X-Slow: ")
    dribble(connection)


def dribble_a_body_after_its_refusal(connection: socket.socket) -> None:
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: evil\r\nContent-Length: 100000\r\n\r\n")
    dribble(connection)


def send_many_and_read_none(connection: socket.socket) -> None:
    connection.sendall((HEAD + b"\r\n") * 100)
    time.sleep(1.0)


@pytest.fixture(scope="module")
def strict(plain: LM) -> Iterator[Live]:
    limits = Settings(head_seconds=0.4, stall_seconds=0.4, connections=8, unread_bytes=2048)
    with live(plain, limits) as server:
        yield server


@pytest.mark.parametrize(
    "behave",
    [
        say_nothing,
        send_half,
        send_a_byte_at_a_time,
        begin_a_second_request,
        dribble_a_body_after_its_refusal,
        send_many_and_read_none,
    ],
)
def test_a_connection_that_asks_nothing_or_reads_nothing_is_closed(
    strict: Live, behave: Callable[[socket.socket], None]
) -> None:
    with connect(strict.port) as connection:
        behave(connection)
        assert is_closed_within(connection, 20)


def test_a_connection_is_kept_for_longer_than_clients_keep_theirs(plain: LM) -> None:
    """Client libraries use a connection again within 5 seconds: where the server has closed it, their request fails."""
    with live(plain, Settings(head_seconds=8)) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
        for pause in (5.5, 0):
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            time.sleep(pause)
        connection.close()


def test_silent_connections_over_the_limit_make_room_for_one_that_asks(plain: LM) -> None:
    with live(plain, Settings(connections=8, head_seconds=60)) as server:
        silent = [connect(server.port) for _ in range(40)]
        began = time.monotonic()
        assert server.client().get("/v1/models").status_code == 200
        assert time.monotonic() - began < 30  # half of head_seconds
        assert sum(is_closed_within(one, 0.01) for one in silent) >= 40 - 8


def test_where_all_connections_are_at_work_another_gets_a_503(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(plain, monkeypatch)
    with live(plain, Settings(connections=8)) as server:
        working = [open_request(server, max_tokens=128, decoder="one-by-one") for _ in range(8)]
        wait_until(lambda: server.engine.running == 8)
        with connect(server.port) as one_more:
            answer = one_more.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in answer
        working.pop().close()
        wait_until(lambda: server.engine.running == 7)
        assert server.client().get("/health").status_code == 200
        for one in working:
            one.close()


@pytest.mark.parametrize(
    ("receive_buffer", "n"),
    [(1024, 1), (2**16, 4)],
    ids=["taken by no kernel", "taken by the client's kernel"],
)
def test_streams_nobody_reads_are_dropped_and_another_client_is_served(
    plain: LM, monkeypatch: pytest.MonkeyPatch, receive_buffer: int, n: int
) -> None:
    Slow(plain, monkeypatch, seconds=0.05)  # 6 s for an answer of 128 forwards
    with live(plain, Settings(batch=16, stall_seconds=0.4)) as server:
        options = {"max_tokens": 128, "decoder": "one-by-one", "stream": True, "reveals": True, "n": n}
        stalled = [open_request(server, receive_buffer, **options) for _ in range(16 // n)]
        wait_until(lambda: server.engine.running == 16)
        assert server.chat(max_tokens=32, decoder="tad").status_code == 200
        wait_until(lambda: server.engine.counts.cancelled == 16)
        assert server.engine.counts.finished == 1
        for one in stalled:
            one.close()


def test_a_client_that_reads_slowly_or_waits_for_a_slow_model_is_not_dropped(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(plain, monkeypatch, seconds=0.05)
    with live(plain, Settings(stall_seconds=1.0)) as server:
        connection = open_request(
            server, 1024, max_tokens=48, decoder="one-by-one", stream=True, reveals=True
        )
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            piece = connection.recv(2000)
            assert piece, answer[-200:]
            answer += piece
            time.sleep(0.02)
        assert b"[DONE]" in answer
        connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n",
    ],
)
def test_health_takes_no_body_and_does_not_wait_for_one(server: Live, head: bytes) -> None:
    with connect(server.port) as connection:
        connection.sendall(head + b"\r\n")
        connection.settimeout(20)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
        assert is_closed_within(connection, 20)
