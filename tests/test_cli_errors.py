"""What the machine refuses is one line and exit code 2, whichever command meets it; a fault of the program is not hidden."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

import tad.cli
import tad.errors
from tad.cli import explain_machine
from tad.errors import MissingExtraError, TadError


def refusal(number: int, path: str | None = "runs/x") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST])
def test_a_path_that_cannot_be_used_is_named(number: int) -> None:
    assert (
        explain_machine(refusal(number))
        == f"runs/x: cannot be used ({os.strerror(number)}); give another path"
    )


@pytest.mark.parametrize(
    "error",
    [
        refusal(errno.ENOSPC, None),
        refusal(errno.EDQUOT),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_in_words(error: Exception) -> None:
    assert explain_machine(error) == "the disk is full; free some space and run the same command again"


@pytest.mark.parametrize("error", [ValueError("x"), refusal(errno.ENOENT, None), ConnectionResetError("x")])
def test_other_errors_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(tad.cli, "app", fail)
    with pytest.raises(type(error)):
        tad.cli.main()


def test_an_out_that_is_a_file_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    monkeypatch.setattr(sys, "argv", ["tad", "pretrain", "pretrain-tiny", "--out", str(taken)])
    with pytest.raises(SystemExit) as ended:
        tad.cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {taken}: ")


def test_a_missing_store_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    words = ["distill", "nano-llada-quality", "model=/no/model", "--trajectories", str(tmp_path)]
    refused = CliRunner().invoke(tad.cli.app, words).exception
    assert isinstance(refused, TadError)
    assert str(refused).startswith(f"{tmp_path}: no trajectory store here")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generat"], "generate"),
        (["generate"], "model"),
        (["generate", "nano-llada", "--bath-size", "3"], "--batch-size"),
        (["generate", "nano-llada", "--gen-length", "many", "hi"], "--gen-length"),
        (["generate", "nano-llada", ""], "prompt: is empty"),
        (["compare", "."], "two runs"),
    ],
)
def test_wrong_options_and_values_are_one_line_as_every_error(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tad", *words])
    with pytest.raises(SystemExit) as ended:
        tad.cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named in line


def test_a_missing_extra_is_installed_from_the_clone_with_the_interpreter_at_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = str(MissingExtraError("fastapi", "serve"))
    assert sys.executable in said
    assert f"{Path(tad.__file__).parents[2]}[serve]" in said or '".[serve]"' in said
    monkeypatch.setattr(tad.errors, "__file__", str(tmp_path / "site-packages" / "tad" / "errors.py"))
    assert "pip" not in str(MissingExtraError("fastapi", "serve"))  # nothing there to install from


def test_a_mistyped_section_is_named_before_the_one_that_is_missing(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("name: x\nmodel: nano-llada\ncolect: {}\nstudents: {a: {}}\nevaluate: {tasks: []}\n")
    refused = CliRunner().invoke(tad.cli.app, ["run", str(recipe)]).exception
    assert "unknown key 'colect'; did you mean 'collect'?" in str(refused)
