"""The files in deploy/ and their page name options of `tad serve` that exist, and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from tad.cli import app

ROOT = Path(__file__).parents[2]
FILES = {path.name: path.read_text() for path in (ROOT / "deploy").iterdir()}
GUIDE = (ROOT / "docs" / "guide" / "deployment.md").read_text()
FOREIGN = {
    "--rm",
    "--restart",
    "--stop-timeout",
    "--gpus",
    "--now",
    "--webroot",
}  # of docker, systemctl, certbot


def options() -> set[str]:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in serve.params for name in parameter.opts if name.startswith("--")}


def named(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_every_option_of_serve_exists() -> None:
    lines = [line for name in ("tad.service", "nginx.conf") for line in FILES[name].splitlines()]
    lines += [line for text in FILES.values() for line in text.splitlines() if line.startswith("ENTRYPOINT")]
    assert named("\n".join(lines)) <= options()
    assert named(GUIDE) - FOREIGN <= options()


def test_guide_names_every_file_and_images_copy_what_exists() -> None:
    for name, text in FILES.items():
        assert f"deploy/{name}" in GUIDE
        copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
        assert all((ROOT / word).exists() for word in copied)
