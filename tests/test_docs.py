"""README and the pages name commands, options, recipes, their fields and files that exist. Anchors and the site are checked by `make docs`."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from tad.cli import app
from tad.config import Recipe, load_recipe
from tad.pipeline.recipe import RunRecipe
from tad.training.recipe import DistillRecipe
from tad.trajectories.recipe import CollectRecipe
from tad_lab.pretraining.recipe import PretrainRecipe
from tad_lab.study.recipe import StudyRecipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
SCHEMAS: dict[str, type[Recipe]] = {
    "collect": CollectRecipe,
    "distill": DistillRecipe,
    "pretrain": PretrainRecipe,
    "run": RunRecipe,
    "study": StudyRecipe,
}


def read_code(page: Path) -> Iterator[str]:
    """The lines of fenced and indented code, continued lines joined, and what stands between backticks."""
    text = page.read_text().replace("\\\n", " ")
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.split(" #")[0]
        else:
            yield from re.findall(r"`([^`]+)`", line)


def find_calls(page: Path) -> Iterator[tuple[str, str]]:
    """Every `tad COMMAND ...` of a page: the command and what follows it."""
    for code in read_code(page):
        for call in () if code.lstrip().startswith("docker") else re.split(r"&&|\|(?!\w)|;", code):
            found = re.search(r"(?:^|(?<!from)(?<!import)\s|-m )tad ([a-z][a-z-]*)\b(.*)", call)
            if found:
                yield found[1], found[2]


@functools.cache
def load(command: str, recipe: str, *overrides: str) -> Recipe:
    return load_recipe(SCHEMAS[command], recipe, overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_options_recipes_and_fields_exist(page: Path) -> None:
    for command, rest in find_calls(page):
        assert command in COMMANDS, f"tad {command}"
        known = {
            name for option in COMMANDS[command].params for name in (*option.opts, *option.secondary_opts)
        }
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest):
            assert option in known | {"--help"}, f"tad {command} {option}"
        words = [word for word in shlex.split(rest) if word not in ("...", "RECIPE")]
        if command in SCHEMAS and words and re.fullmatch(r"[a-z][a-z0-9-]+", words[0]):
            overrides = [word for word in words[1:] if re.match(r"[a-z][a-z0-9_.]*=", word)]
            load(command, words[0], *overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def read_python(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_python_parses_and_imports_what_exists() -> None:
    for code in (code for page in PAGES for code in read_python(page)):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tad"):
                home = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(home, name.name), f"from {node.module} import {name.name}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/reference/nano.md"])
def test_python_runs(page: str) -> None:
    for code in read_python(ROOT / page):
        subprocess.run([sys.executable, "-c", code], check=True)


def test_the_map_of_the_code_names_what_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = list((ROOT / "src").rglob("*.py"))
    defined = {path.stem for path in paths} | {path.parent.name for path in paths}
    for path in paths:
        defined |= set(re.findall(r"^(?:\s*(?:def|class) )?(\w+)", path.read_text(), re.MULTILINE))
    assert not {name for name in re.findall(r"`(\w+)\.py`", page) if name not in defined}
    for line in re.findall(
        r"^\|[^|]+\|([^|]+)\|", page.split("## One question")[1].split("## Rooms")[0], re.MULTILINE
    ):
        for name in re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", line))):
            assert name in defined, name


def test_pages_named_in_the_source_exist() -> None:
    sources = [
        path for room in ("src", "tests", "bench") for path in (ROOT / room).rglob("*") if path.is_file()
    ]
    for path in sources:
        if path.suffix in (".py", ".yaml", ".md"):
            for name in re.findall(r"\bdocs/[a-z/-]+\.md", path.read_text()):
                assert (ROOT / name).exists(), f"{path}: {name}"


def test_the_page_of_installation_names_the_extras_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/guide/install.md").read_text()
    named = [
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(named) == sorted(extras)
