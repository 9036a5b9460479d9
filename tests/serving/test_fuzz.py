"""Nothing a client can send brings a 5xx or the server down: requests from the schema, and bodies that are broken."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from live_server import Live, live, wait_until

from tad.models import LM
from tad.serving import Settings

REFUSALS = {400, 401, 403, 404, 405, 408, 413, 415, 429, 503}


@pytest.fixture(scope="module")
def target(plain: LM) -> Iterator[Live]:
    with live(plain, Settings(batch=4, max_tokens=32, body_bytes=50_000, body_seconds=1.0)) as server:
        yield server


def assert_alive(server: Live) -> None:
    assert server.engine.alive
    assert server.client().get("/health").json() == {"status": "ok"}
    assert server.chat(max_tokens=8, decoder="tad").status_code == 200
    wait_until(lambda: server.engine.running + server.engine.waiting == 0)


def check_response(response: Any, path: str) -> None:
    """An answer that OpenAI's client reads, or a refusal in its shape."""
    types = pytest.importorskip("openai.types", reason="OpenAI's client is not installed")
    if response.status_code != 200:
        assert response.status_code in REFUSALS, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif "text/event-stream" in str(response.headers["content-type"]):
        assert response.text.endswith("data: [DONE]\n\n"), response.text[-300:]
    elif path.endswith("completions"):
        kind = types.chat.ChatCompletion if "chat" in path else types.Completion
        kind.model_validate(response.json(), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("negative", [False, True], ids=["fits", "does not fit"])
def test_requests_made_from_the_schema(target: Live, negative: bool) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    mode = schemathesis.GenerationMode.NEGATIVE if negative else schemathesis.GenerationMode.POSITIVE
    schema = schemathesis.openapi.from_dict(target.app.openapi())
    seen: dict[int, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if negative and operation.method == "get":
            continue  # without parameters there is nothing to get wrong

        @given(case=operation.as_strategy(mode))
        @settings(
            max_examples=300,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body and len(case.body) > 1:
                case.body["model"] = target.model  # else every request ends at the model's name
            response = case.call(base_url=target.url)
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            check_response(response, case.path)

        check()
    assert_alive(target)
    assert seen.get(400, 0) > 0
    assert seen.get(200, 0) > 0 or negative


def broken_bodies(server: Live, number: int) -> Iterator[bytes]:
    """Valid requests, damaged: bytes, structure, types, sizes, encodings."""
    dice = random.Random(4)
    values: list[Any] = [
        None, True, -1, 0, 1e308, 2**63, -(2**70), "", "x", "\x00", "\ud800", "�", [], {}, [[]], {"a": 1}, [None],
        "a" * 5000, 0.1, 1e-320, ["<|mdm_mask|>"], "<|eot_id|>",
    ]  # fmt: skip
    fields = [
        "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "seed", "temperature", "top_p",
        "stream", "stream_options", "n", "decoder", "threshold", "adapter", "reveals", "logprobs", "__proto__", "",
    ]  # fmt: skip
    nested = [b"[" * 20_000, b'{"a":' * 8000, b'{"messages":' + b"[" * 5000, b"[" * 20_000 + b"]" * 20_000]
    raw = [
        b"", b"null", b"[]", b"1", b'"x"', b"{", b"}", b"{}{}", b"\xff\xfe\x00", b"\xef\xbb\xbf{}", b"NaN", b"{'a': 1}",
        b'{"temperature": NaN}', b'{"seed": ' + b"9" * 6000 + b"}", b'{"max_tokens": 1e400}', b'{"a":1,"a":2}',
        b"\x00" * 100, b'{"model": "\\ud800"}', b'{"\\ud800": 1}', b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', b'{"max_tokens": 1E2}',
    ]  # fmt: skip
    yield from [*nested, *raw][:number]
    for _ in range(number - len(nested) - len(raw)):
        body: Any = server.body(max_tokens=8)
        kind = dice.randrange(5)
        if kind == 0:
            for field in dice.sample(fields, dice.randint(1, 4)):
                body[field] = dice.choice(values)
        elif kind == 1:
            message = {
                "role": dice.choice(["user", "system", "assistant", "x", None]),
                "content": dice.choice(values),
            }
            if dice.random() < 0.3:
                message[dice.choice(fields)] = dice.choice(values)
            body["messages"] = [message] * dice.choice((1, 1, 2, 40))
        elif kind == 2:
            for field in dice.sample(sorted(body), dice.randint(1, len(body))):
                del body[field]
        text = json.dumps(body).encode()
        if kind == 3:
            damaged = bytearray(text)
            for _ in range(dice.randint(1, 8)):
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
            text = bytes(damaged)
        elif kind == 4:
            low, high = sorted(dice.sample(range(len(text) + 1), 2))
            text = dice.choice((text[:high], text[low:], text[:low] + text[high:], text + text[low:high]))
        yield text


@pytest.mark.parametrize("number", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_malformed_bodies(target: Live, number: int) -> None:
    statuses: dict[int, int] = {}
    with target.client(headers={"content-type": "application/json"}) as client:
        for i, body in enumerate(broken_bodies(target, number)):
            path = "/v1/completions" if i % 4 == 0 else "/v1/chat/completions"
            response = client.post(path, content=body)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code < 500, (body[:300], response.text)
            check_response(response, path)
    assert sum(statuses.values()) == number
    assert statuses[400] > number // 2
    assert_alive(target)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models/../../x HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[::1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: [bad\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_requests_that_are_not_http(target: Live, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", target.port), timeout=10) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert not answer or answer.split()[1][:1] == b"4", answer
    assert target.client().get("/health").status_code == 200
