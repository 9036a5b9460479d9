"""`tad push` against a stand-in of the hub's HTTP API: which files are committed where, and how refusals read."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.errors import TadError
from tad.models.push import make_card, push
from tad.models.source import BUNDLED
from tiny_lm import write_checkpoint


class Hub(ThreadingHTTPServer):
    """Creates repositories and takes commits of files that are sent inline; knows one token."""

    token = "hf_test"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(404, {"error": "nothing here"})

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def do_POST(self) -> None:
        hub = self.server
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        if self.headers.get("authorization") != f"Bearer {hub.token}":
            return self.answer(401, {"error": "who are you?"})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            known = name in hub.repos
            hub.repos.setdefault(name, {})
            hub.private.setdefault(name, asked.get("visibility") == "private" or bool(asked.get("private")))
            return self.answer(409 if known else 200, {"url": f"{hub.address}/{name}"})
        if path.startswith("/api/models/") and "/preupload/" in path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]  # fmt: skip
            return self.answer(200, {"files": files})
        if path.startswith("/api/models/") and "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    hub.repos[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self.answer(200, {"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": "1"})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        return self.answer(404, {"error": path})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", server.token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of `tad distill` with an adapter, and things that stay at home."""
    lm = tad.load(write_checkpoint(tmp_path / "base"), device="cpu")
    lm.attach(rank=2).save_pretrained(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "adapter" / "README.md").unlink(missing_ok=True)
    (tmp_path / "run" / "adapter" / "optimizer.pt").write_bytes(b"pickle")
    record = {
        "calls": [{"steps": 7, "trajectories": 3, "device": "cpu", "window": "4, the cap"}],
        "recipe": {
            "model": "owner/base",
            "objective": {"name": "tad", "window": "speed"},
            "batch": {"size": 2},
        },
    }
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    return tmp_path / "run"


def test_an_adapter_goes_up_with_a_card_and_without_pickles(hub: Hub, run: Path) -> None:
    words = ["push", str(run), "me/student", "--private"]
    said = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert f"{hub.address}/me/student" in said
    found = hub.repos["me/student"]
    assert set(found) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert found["adapter_model.safetensors"] == (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert hub.private["me/student"]
    card = found["README.md"].decode()
    for part in (
        "base_model: owner/base",
        'adapter="me/student"',
        "Objective tad (window speed: 4, the cap), 7 steps",
    ):
        assert part in card
    push(run, "me/student")  # again: the repository is there


def test_a_card_of_ones_own_is_kept(hub: Hub, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "README.md").write_text("mine")
    push(folder, "me/model")
    assert hub.repos["me/model"]["README.md"] == b"mine"
    assert "model.safetensors" in hub.repos["me/model"]


def test_what_cannot_be_pushed_is_one_line(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TadError, match=r"adapter_config\.json"):
        push(run / "nothing", "me/student")
    with pytest.raises(TadError, match="owner/name"):
        push(run, "student")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(TadError, match="me/student"):
        push(run, "me/student")


def test_a_card_says_how_it_is_decoded(run: Path) -> None:
    (run / "adapter" / "generation_config.json").write_text('{"tad": {"gen_length": 96, "decoder": "tad"}}')
    assert "gen_length 96, decoder tad" in make_card(run / "adapter", "me/student", {})


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing listens
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    with pytest.raises(TadError, match="cannot be reached"):
        push(BUNDLED / "nano-llada-ltr", "me/x")
