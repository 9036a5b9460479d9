"""Who gets in: keys, hosts, origins, bodies; where the server may listen; what every response carries."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from live_server import Live, live

from tad.errors import TadError
from tad.models import LM
from tad.serving import Settings
from tad.serving.app import PAGE, create_app
from tad.serving.server import check_bind, is_loopback, read_key
from tad.serving.validation import RequestValidator

KEY = "s3cret-key:with-colon"
LIMIT = 20_000


@pytest.fixture(scope="module")
def locked(plain: LM) -> Iterator[Live]:
    with live(plain, Settings(key=KEY, body_bytes=LIMIT, body_seconds=0.5, hosts=("models.example",))) as one:
        yield one


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def routes_of(server: Live) -> list[tuple[str, str]]:
    """Method and path of every route there is."""
    found = []
    for route in server.app.routes:
        path = route.path.replace("{name:path}", server.model)
        found += [(method, path) for method in sorted(route.methods)]
    return found


def test_the_routes_are_these_and_no_others(server: Live) -> None:
    expected = {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{server.model}"),
        ("GET", "/health"),
        ("GET", "/metrics"),
    }
    assert set(routes_of(server)) - {("GET", path) for path in PAGE} == expected
    for path in ("/docs", "/redoc", "/openapi.json", "/admin"):
        assert server.client().get(path).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"bearer{KEY}"},
        {"authorization": KEY},
        {"authorization": basic("any", "wrong")},
        {"authorization": "Basic !!!"},
        {"authorization": "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode()},
        {"authorization": f"Digest {KEY}"},
        {"x-api-key": KEY},
    ],
    ids=lambda headers: " ".join(headers.values())[:12] or "none",
)
def test_without_the_key_every_route_but_health_is_a_401(locked: Live, headers: dict[str, str]) -> None:
    with locked.client(headers=headers) as client:
        for method, path in [
            *routes_of(locked),
            ("GET", "/nowhere"),
            ("POST", "/health/"),
            ("GET", "//health"),
        ]:
            response = client.request(method, path, json=locked.body() if method == "POST" else None)
            if path == "/health":
                assert response.status_code == 200
                continue
            assert response.status_code == 401, (method, path)
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"].startswith("Basic ")
            assert KEY not in response.text


@pytest.mark.parametrize(
    "authorization", [f"Bearer {KEY}", f"bearer  {KEY}", basic("me", KEY), basic("", KEY)]
)
def test_the_key_opens_as_bearer_token_and_as_basic_password(locked: Live, authorization: str) -> None:
    with locked.client(headers={"authorization": authorization}) as client:
        for method, path in routes_of(locked):
            body = locked.body(max_tokens=32) if "chat" in path else {"model": locked.model, "prompt": "x"}
            response = client.request(method, path, json=body if method == "POST" else None)
            assert response.status_code == 200, (method, path, response.text)


def test_a_key_sent_twice_is_refused(locked: Live) -> None:
    twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer wrong")]
    assert locked.client().get("/v1/models", headers=twice).status_code == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "10.0.0.7", "", "[::2]"]
)
def test_an_unknown_host_is_refused(server: Live, host: str) -> None:
    with server.client(headers={"host": host}) as client:
        for method, path in routes_of(server):
            response = client.request(method, path, json=server.body() if method == "POST" else None)
            assert response.status_code == (200 if path == "/health" else 403), (method, path)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.8.8.8:80", "[::1]:8000", "localhost."]
)
def test_this_machine_is_a_known_host(server: Live, host: str) -> None:
    assert server.client(headers={"host": host}).get("/v1/models").status_code == 200


def test_names_on_the_list_are_known_and_addresses_where_others_can_reach_it(plain: LM) -> None:
    def status(settings: Settings, host: str) -> int:
        async def ask() -> int:
            transport = httpx.ASGITransport(create_app(plain, settings))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return (await client.get("/v1/models", headers={"host": host})).status_code

        return anyio.run(ask)

    assert status(Settings(hosts=("Models.Example",)), "models.example:443") == 200
    assert status(Settings(public=True), "192.168.1.5:8000") == 200
    assert status(Settings(public=True), "evil.example") == 403


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("localhost", "http://localhost", 200),
        ("localhost", "https://localhost", 200),  # TLS ends at a proxy
        ("localhost:443", "https://localhost", 200),
        ("localhost:8000", "http://localhost:9000", 403),
        ("localhost:8000", "http://127.0.0.1:8000", 403),
        ("localhost:8000", "https://evil.example", 403),
        ("localhost:8000", "http://localhost:8000.evil.example", 403),
        ("localhost:8000", "http://localhost:bad", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "", 403),
        ("localhost:8000", "file://localhost:8000", 403),
    ],
)
def test_an_origin_is_this_server_or_refused(server: Live, host: str, origin: str, status: int) -> None:
    with server.client(headers={"host": host, "origin": origin}) as client:
        assert client.get("/v1/models").status_code == status
        assert client.post("/v1/chat/completions", json=server.body(max_tokens=8)).status_code == status
        preflight = client.options("/v1/chat/completions", headers={"access-control-request-method": "POST"})
    assert preflight.status_code == (405 if status == 200 else 403)
    assert not any(name.startswith("access-control") for name in preflight.headers)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_a_body_that_a_foreign_form_could_send_is_refused(server: Live, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = json.dumps(server.body()).encode()
    response = server.client().post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "type"


def test_json_with_a_charset_is_json(server: Live) -> None:
    response = server.client().post(
        "/v1/chat/completions",
        content=json.dumps(server.body(max_tokens=8)),
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )
    assert response.status_code == 200


def test_a_large_body_is_refused_whether_it_says_its_size_or_not(locked: Live) -> None:
    key = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        for _ in range(LIMIT // 1000 + 1):
            yield b" " * 1000

    with locked.client(headers=key) as client:
        said = client.post("/v1/chat/completions", content=b" " * (LIMIT + 1))
        unsaid = client.post("/v1/chat/completions", content=pieces())
        fits = client.post("/v1/chat/completions", content=b" " * LIMIT)
    for response in (said, unsaid):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "too_large"
    assert fits.status_code == 400


def test_a_body_that_does_not_arrive_is_given_up(locked: Live) -> None:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", locked.port), timeout=40) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 408")


def test_an_unauthorised_body_is_not_read(locked: Live) -> None:
    """The refusal comes although the body never does."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).decode().startswith("HTTP/1.1 401")


def test_every_response_carries_the_security_headers(server: Live) -> None:
    with server.client() as client:
        responses = [
            client.get("/"),
            client.get("/health"),
            client.get("/v1/models"),
            client.get("/nowhere"),
            client.get("/v1/models", headers={"host": "evil.example"}),
            server.chat(max_tokens=8),
            server.chat(max_tokens=8, stream=True),
        ]
    for response in responses:
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert "*" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


def test_a_failure_inside_shows_nothing_of_it(plain: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RequestValidator, request: object) -> None:
        raise RuntimeError("a secret path /home/me")

    monkeypatch.setattr(RequestValidator, "jobs", broken)
    with live(plain) as server:
        response = server.chat()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert server.client().get("/health").status_code == 200


# Where it may listen, and the key


def test_an_address_that_others_can_reach_needs_a_key() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        assert check_bind(host, None) is False
    for host in ("0.0.0.0", "::", "192.168.1.5", "models.example"):
        with pytest.raises(TadError, match="TAD_API_KEY"):
            check_bind(host, None)
        assert check_bind(host, KEY) is True


def test_the_key_comes_from_argument_file_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAD_API_KEY", raising=False)
    assert read_key(None, None) is None
    monkeypatch.setenv("TAD_API_KEY", "from-environment")
    assert read_key(None, None) == "from-environment"
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_key(None, file) == "from-file"
    assert read_key("from-argument", None) == "from-argument"
    assert KEY not in repr(Settings(key=KEY))
    with pytest.raises(TadError, match=r"--api-key-file .*/none"):
        read_key(None, tmp_path / "none")
    monkeypatch.setenv("TAD_API_KEY", "")  # is not no key
    with pytest.raises(TadError, match="TAD_API_KEY"):
        read_key(None, None)


@pytest.mark.parametrize(
    ("argument", "content", "message"),
    [
        ("", None, "--api-key: "),
        ("two words", None, "--api-key: "),
        ("schlüssel", None, "--api-key: "),
        (None, "\n", "--api-key-file"),
        ("a", "b", "--api-key-file"),
    ],
)
def test_a_key_that_cannot_work_is_refused(
    tmp_path: Path, argument: str | None, content: str | None, message: str
) -> None:
    file = None if content is None else tmp_path / "key"
    if file is not None and content is not None:
        file.write_text(content)
    with pytest.raises(TadError, match=message):
        read_key(argument, file)
