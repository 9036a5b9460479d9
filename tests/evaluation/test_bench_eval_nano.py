"""The bench script that decodes on one machine and grades on another, at its smallest size."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tad.evaluation import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "eval_nano.py"
    spec = importlib.util.spec_from_file_location("bench_eval_nano", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["eval_nano.py", *map(str, words)])
    bench.main()


@pytest.mark.sandbox
def test_what_was_decoded_is_packed_continued_and_graded(
    bench: ModuleType,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dest, model = tmp_path / "dest", world / "llada"
    common = ["--model", model, "--tiny", "--gen-length", 32, "--decoders", "tad", "--thresholds", 0.5]
    call(bench, monkeypatch, "decode", dest, *common, "--work", tmp_path / "one", "--minutes", 0)
    assert "0 runs complete" in capsys.readouterr().out
    call(bench, monkeypatch, "decode", dest, *common, "--work", tmp_path / "one")
    call(bench, monkeypatch, "decode", dest, *common, "--work", tmp_path / "two", "--resume", dest)
    assert "rows in" not in capsys.readouterr().out.partition("packed")[2]  # all of it came with the archive
    assert [path.name for path in dest.iterdir()] == ["eval.tar.gz.00"]
    call(bench, monkeypatch, "grade", dest)
    assert "nano-code" in capsys.readouterr().out
    points = json.loads((dest / "llada-points.json").read_text())
    assert [len(curve["points"]) for curve in points["curves"]] == [2, 2, 2]
    there = Results.open(dest / "graded" / "llada" / "one-by-one").rows()
    here = Results.open(tmp_path / "one" / "llada" / "one-by-one").rows()
    assert [(row.id, row.text, row.steps) for row in there] == [(row.id, row.text, row.steps) for row in here]
    assert {row.correct for row in there} <= {True, False}


def test_adapters_follow_their_bases(bench: ModuleType) -> None:
    assert bench.pairs(["a", "b"], ["a=x/y"]) == [("a", None), ("b", None), ("a", "x/y")]
