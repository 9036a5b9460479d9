"""The forward benchmark runs end to end on toy shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import forward as bench


@pytest.mark.slow
def test_the_tiny_run_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "forward.json"
    words = ["forward.py", "--tiny", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    assert bench.main() == 0
    results = json.loads(out.read_text())
    assert [row["shape"] for row in results["shapes"]] == ["llada-8b (tiny)", "dream-7b (tiny)"]
    for row in results["shapes"]:
        assert row["eager_ms"] > 0
        assert row["compiled_relative_difference"] < 1e-4
        assert row["flex_relative_difference"] < 1e-4
    assert "| eager_ms |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_full_run_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["forward.py"])
    assert bench.main() == 2
    assert capsys.readouterr().err.strip() == "no CUDA device here; --tiny runs on the CPU"
