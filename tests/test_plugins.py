"""Other packages add tasks, recipes and commands by an entry point; the laboratory is one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tad.config
import tad.plugins
from tad.tasks import get_task, task_names

PLUGIN = """
from pathlib import Path

TASKS = {"mine": "mine:Mine", "gsm8k": "mine:Mine"}
RECIPES = Path(__file__).parent / "recipes"
COMMANDS = {"hello": "mine:hello", "report": "mine:hello"}
RECIPE_KEYS = {"hello": {"greeting", "name"}}
"""
PACKAGE = """
from tad.tasks.gsm8k import Gsm8k

class Mine(Gsm8k):
    name = "mine"

def hello(name: str) -> None:
    "Say hello."
    print(f"hello {name}")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package as an installation leaves it, with its entry point."""
    (tmp_path / "mine" / "recipes").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "mine" / "plugin.py").write_text(PLUGIN)
    (tmp_path / "mine" / "recipes" / "greet.yaml").write_text("# A greeting. More.\ngreeting: hi\nname: x\n")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tad.plugins]\nmine = mine.plugin\n")
    return tmp_path


def call(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "tad", *words],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
    )


def test_a_package_adds_a_command_and_recipes(package: Path) -> None:
    assert call(package, "hello", "world").stdout == "hello world\n"
    assert "tad hello NAME\n  greet " in call(package, "recipes").stdout
    assert "Say hello" not in call(package, "report", "--help").stdout  # the command of that name stays tad's


def test_a_plugin_that_cannot_be_imported_is_named_in_one_line(package: Path) -> None:
    (package / "mine" / "plugin.py").write_text("import nothing_of_this_name\n")
    done = call(package, "recipes")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "plugin 'mine' (mine.plugin)" in done.stderr


def test_a_package_adds_a_task_and_replaces_none(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(tad.plugins, "plugins", tad.plugins.plugins.__wrapped__)  # read anew
    assert any(entry.value == "mine.plugin" for entry in entry_points(group=tad.plugins.GROUP))
    assert "mine" in task_names()
    assert get_task("mine").name == "mine"
    assert get_task("gsm8k").name == "gsm8k"


def test_the_nano_world_and_the_laboratory_come_as_plugins() -> None:
    assert tad.plugins.additions("TASKS")["nano-word"].startswith("tad.tasks.nano")
    assert "study-nano-llada" in (found := tad.config.bundled_recipes())
    assert found["study-nano-llada"].parent.parent.name == "tad_lab"
