"""bench/distill_nano.py at tiny size: it runs, and a second call has nothing left to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import distill_nano
import tad
from tad.config import load_recipe
from tad.nano.pretrain import pretrain
from tad.nano.recipe import PretrainRecipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = ["optimization.steps=2", "data.chunk=64", "data.examples=64", "optimization.tokens_per_step=1024"]
    out = tmp_path_factory.mktemp("base")
    return pretrain(load_recipe(PretrainRecipe, "pretrain-tiny", small), out, quiet=True)


def test_variants_and_seeds_are_trained_once(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        str(base),
        str(tmp_path),
        "--tiny",
        "--device",
        "cpu",
        "--seeds",
        "0",
        "1",
        "--only",
        "tad-quality",
        "sft",
    ]
    distill_nano.main(words)
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert runs == ["sft-s0", "sft-s1", "tad-quality-s0", "tad-quality-s1"]
    for run in runs:
        assert tad.load(base, adapter=tmp_path / "runs" / run / "adapter", device="cpu").peft is not None
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["steps"] for row in table["runs"]] == [2] * 4
    assert "4 of 4 runs are there" in capsys.readouterr().out
    stamps = {run: (tmp_path / "runs" / run / "run.json").stat().st_mtime_ns for run in runs}
    distill_nano.main(words)
    assert stamps == {run: (tmp_path / "runs" / run / "run.json").stat().st_mtime_ns for run in runs}


@pytest.mark.slow
def test_every_variant_of_the_default_plan_runs(base: Path, tmp_path: Path) -> None:
    distill_nano.main([str(base), str(tmp_path), "--tiny", "--device", "cpu"])
    assert len(json.loads((tmp_path / "table.json").read_text())["runs"]) == len(distill_nano.VARIANTS)
