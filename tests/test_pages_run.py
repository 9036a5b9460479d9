"""The shell blocks of README and of the guides, run in order from a fresh directory, at small sizes.

Every line is run, or falls under one of the reasons below: a line that does neither fails. Commands run in this process, which
spares the seconds of importing torch; what the shell does to a line (comments, quotes, continuation) is done here as well.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tad.cli import app
from tad.errors import TadError

ROOT = Path(__file__).parents[1]
# Why a line is not run here.
_SETUP = re.compile(
    r"(git clone|make|source|pip|apt|export|docker|curl|systemctl|sudo|ray|torchrun|accelerate|cd|python|TAD_|HF_)\b"
)
_PLACEHOLDER = re.compile(r"\b(MODEL|ADAPTER|NAME|DIR|FILE|RECIPE|KEY|CONVERTED|REPOSITORY|ID)\b")
_REMOTE = re.compile(
    r"\b[\w.-]+/[\w.-]+-(?:\d+B|0\.5B)[\w.-]*|run-(?:llada|dream|sdar)|(?:collect|study)-llada|llada-speed-lean|gsm8k|/models/"
)
_TOY = re.compile(r"\btoy/")  # which a script of the bench writes
_LONG = re.compile(r"^tad (demo|chat|serve|study)\b")
# What is said on a page, and what is run in its place.
SMALLER = (
    ("--limit 32", "--limit 2"),
    ("--limit 50", "--limit 2"),
    ("limit: 128", "limit: 4"),
    ("learning.steps=20 batch.size=32 batch.micro=32", "learning.steps=1 batch.size=2 batch.micro=2"),
    (
        "tad run my.yaml",
        "tad run my.yaml distill.learning.epochs=1 collect.gen_length=32 'evaluate.thresholds={entropy: [0.5], confidence: [0.9]}'",
    ),
)
QUICK = [
    "README.md",
    "docs/index.md",
    "docs/guide/install.md",
    "docs/guide/tutorial.md",
    "docs/guide/llada-8b.md",
]
SLOW = ["docs/guide/your-data.md"]


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of blocks without a language, joined where they are continued, without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"^!!! .*\n(?:    .*\n)+", "", text, flags=re.MULTILINE)  # notes are indented, too
    language: str | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            language = line.strip("` ") or "shell" if language is None else None
            continue
        indented = line.startswith("    ") and line[4:5] not in ("", " ")
        command = re.split(r"\s#\s", line.strip())[0].strip()
        if command and (language == "shell" or (language is None and indented)):
            yield command


def is_run(line: str) -> bool:
    listed = line.startswith("tad run ") and "--list" in line  # estimates need neither weights nor data
    return (
        line.startswith("tad ")
        and not _PLACEHOLDER.search(line)
        and not _LONG.match(line)
        and not _TOY.search(line)
        and (listed or not _REMOTE.search(line))
    )


def choose_lines(page: Path) -> Iterator[tuple[str, bool]]:
    """The lines of a page and whether each is run: not where it needs what a line that is not run would have made."""
    missing: set[str] = set()
    for line in shell_lines(page):
        chosen = is_run(line) and not any(made in line for made in missing)
        if not chosen:
            missing |= set(re.findall(r"--out (\S+)", line))
        yield line, chosen


def run_lines(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    done = 0
    for line, chosen in choose_lines(ROOT / page):
        if not chosen:
            known = _SETUP.match(line) or line.startswith("tad ") or line.startswith("#")
            assert known, f"{page}: neither run nor known: {line}"
            continue
        for said, run in SMALLER:
            line = line.replace(said, run)
        answer = CliRunner().invoke(app, shlex.split(line)[1:])
        assert answer.exit_code == 0, f"{page}: {line}\n{answer.output}\n{answer.exception}"
        done += 1
    return done


@pytest.mark.parametrize("page", QUICK)
def test_the_blocks_of_a_page_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_lines(page, tmp_path, monkeypatch) > 0


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_the_blocks_of_a_long_page_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_questions(tmp_path / "train.jsonl", 10)
    assert run_lines(page, tmp_path, monkeypatch) > 5


def test_the_recipe_of_your_data_is_written_and_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick half of that page."""
    monkeypatch.chdir(tmp_path)
    write_questions(tmp_path / "train.jsonl", 10)
    lines = [line for line in shell_lines(ROOT / SLOW[0]) if line.startswith("tad init") or "--list" in line]
    assert len(lines) == 2
    for line in lines:
        assert CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False).exit_code == 0


def test_a_line_that_fails_is_found(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["generate", "nano-lada", "hello"])
    assert isinstance(answer.exception, TadError)
    assert is_run("tad generate nano-lada hello")
    assert not is_run("tad run run-llada")
    assert is_run("tad run run-llada --list")


def test_every_guide_is_looked_at() -> None:
    """A page with a block that could be run is in one of the lists above."""
    for page in [ROOT / "README.md", ROOT / "docs/index.md", *ROOT.glob("docs/guide/*.md")]:
        name = str(page.relative_to(ROOT))
        assert name in (*QUICK, *SLOW) or not any(run for _, run in choose_lines(page)), name


def write_questions(path: Path, count: int) -> None:
    """Sums in words that the bundled models know."""
    lines = [
        {
            "question": f"Ana has {n} apples and buys {n + 2} more. How many apples does Ana have?",
            "answer": str(2 * n + 2),
            "reference": f"Ana has {n} apples at first. Adding {n + 2} makes {n} + {n + 2} = {2 * n + 2} apples. #### {2 * n + 2}",
        }
        for n in range(3, 3 + count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
