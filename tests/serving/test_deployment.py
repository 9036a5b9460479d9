"""The files in deploy/ and their page: options that exist, sources that exist, JSON that parses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from tad.cli import app
from tad.serving import Settings

ROOT = Path(__file__).parents[2]
FILES = {path.name: path.read_text() for path in (ROOT / "deploy").iterdir()}
GUIDE = (ROOT / "docs" / "deployment.md").read_text()


def options() -> set[str]:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in serve.params for name in parameter.opts if name.startswith("--")}


def test_every_option_of_serve_in_the_files_exists() -> None:
    lines = [line for name in ("tad.service", "nginx.conf") for line in FILES[name].splitlines()]
    lines += [line for name in FILES for line in FILES[name].splitlines() if line.startswith("ENTRYPOINT")]
    named = {word for line in lines for word in re.findall(r"--[a-z][a-z-]+", line)}
    assert {"--host", "--port", "--api-key-file", "--allow-host", "--device", "--grace"} <= named
    assert named <= options()


def test_every_option_of_serve_in_the_guide_exists() -> None:
    foreign = {"--rm", "--restart", "--stop-timeout", "--gpus", "--now", "--webroot"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE)) - foreign
    assert named <= options(), named - options()


def test_guide_names_every_file() -> None:
    for name in FILES:
        assert f"deploy/{name}" in GUIDE, name


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_copy_what_exists_and_do_not_run_as_root(name: str) -> None:
    text = FILES[name]
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert {"constraints.txt", "pyproject.toml", "src", "README.md", "LICENSE"} == set(copied)
    assert all((ROOT / word).exists() for word in copied)
    assert text.index("USER tad") < text.index("ENTRYPOINT")
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[0])[:2] == ["tad", "serve"]
    assert json.loads(re.findall(r"^CMD (.*)$", text, re.M)[0]) == ["nano-llada"]


def test_wheel_of_the_image_holds_the_page() -> None:
    patterns = re.findall(r"^tad = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert any('"serving/page/*"' in one for one in patterns)


def test_errors_of_nginx_have_the_shape_of_the_servers() -> None:
    bodies = re.findall(r"return (\d+) '(\{.*\})';", FILES["nginx.conf"])
    assert {int(status) for status, _ in bodies} == {413, 429, 503}
    for _, body in bodies:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}


def test_proxy_waits_longer_than_the_server() -> None:
    settings = Settings()
    waits = int(re.findall(r"proxy_read_timeout (\d+)s", FILES["nginx.conf"])[0])
    assert waits > settings.queue_seconds + settings.seconds
    assert "proxy_buffering off" in FILES["nginx.conf"]
    assert int(re.findall(r"TimeoutStopSec=(\d+)", FILES["tad.service"])[0]) > settings.grace + 5
    assert settings.body_bytes == 2**20
    assert "client_max_body_size 1m" in FILES["nginx.conf"]
