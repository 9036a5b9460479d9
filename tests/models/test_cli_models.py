"""The commands `info` and `export`, and what a user sees when the input is bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import write_checkpoint
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.errors import TadError


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_info_of_a_shape() -> None:
    text = run("info", "--shape", "llada-8b")
    assert "8,015,581,184" in text
    assert "attn_out, ff_proj, up_proj, ff_out" in text
    assert "15 GB of weights per forward" in text


def test_info_as_json(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "dream", tokenizer=True)
    facts = json.loads(run("info", folder, "--json", "--length", 64))
    assert facts["family"] == "dream"
    assert facts["cost"]["length"] == 64
    assert facts["tokens"]["mask"] == tad.load(folder).tokens.mask


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info"], "--shape"),
        (["info", "nano-llada", "--shape", "llada-8b"], "--shape"),
        (["info", "--shape", "llada-8b", "--adapter", "nano-llada-speed"], "--adapter"),
        (["info", "./nowhere"], "nowhere: "),
    ],
)
def test_bad_questions(words: list[str], message: str) -> None:
    with pytest.raises(TadError, match=message):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_export_writes_a_checkpoint(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    lm = tad.load(source)
    lm.attach(rank=2)
    lm.peft.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "out"
    text = run("export", source, "--adapter", tmp_path / "adapter", "--out", out, "--dtype", "bf16")
    assert f"wrote {out}" in text
    assert str(tad.load(out).dtype) == "torch.bfloat16"


def test_version() -> None:
    assert run("--version").strip() == f"tad {tad.__version__}"
