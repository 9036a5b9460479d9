"""The distillation benchmark runs end to end on a toy shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import distill as bench

pytestmark = pytest.mark.slow


def test_all_ways_of_a_step_have_the_same_loss_and_stand_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["chunked", "fast + recompute", "released"]
    words = ["distill.py", "--tiny", "--repeats", "1", "--warmup", "1", "--out", str(tmp_path / "deep")]
    monkeypatch.setattr("sys.argv", [*words, "--only", *names])
    assert bench.main() == 0
    rows = json.loads((tmp_path / "deep" / "distill.json").read_text())["variants"]
    assert [row["variant"] for row in rows] == names
    for row in rows:
        assert row["first_loss"] == pytest.approx(rows[-1]["first_loss"], rel=1e-5)
        assert row["s_per_step"] > 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| released |")


def test_fp8_says_how_far_it_is_from_plain_and_a_profile_names_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["distill.py", "--tiny", "--repeats", "1", "--warmup", "1", "--profile", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*words, "--only", "chunked", "fast + fp8", "released"])
    assert bench.main() == 0
    chunked, fp8, released = json.loads((tmp_path / "distill.json").read_text())["variants"]
    assert 0.99 < fp8["gradient_cosine"] < 0.99999
    moved = fp8["first_loss"] - chunked["first_loss"]
    assert fp8["loss_difference"] == pytest.approx(moved, abs=1e-5)
    assert moved != 0
    assert released["first_loss"] == pytest.approx(
        chunked["first_loss"], rel=1e-5
    )  # nothing of fp8 is left behind
    assert "gradient_cosine" not in chunked
    for row in (chunked, fp8, released):
        assert 0 < len(row["kernels"]) <= 25
        assert row["device_ms"] >= sum(kernel["ms"] for kernel in row["kernels"]) > 0
    assert "fast + fp8: " in capsys.readouterr().out


def test_a_variant_that_fails_has_its_error_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*unused: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr(bench, "released_loss", fail)
    words = ["distill.py", "--tiny", "--repeats", "1", "--warmup", "1", "--only", "chunked", "released"]
    monkeypatch.setattr("sys.argv", words)
    assert bench.main() == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("| chunked |")
    assert last[1].startswith("| released | RuntimeError: out of something |")
