"""Verbs that only decode merge a student's adapter, which is faster and what the engine serves; who the student is does not
change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.decoding.engine.weights import why_unfit
from tad.evaluation.run import Identity
from tad.models import LM


def test_a_merged_student_is_known_by_its_base_and_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tad.load("nano-llada", adapter="nano-llada-speed", device="cpu")
    assert "merge it first" in str(why_unfit(lm.model))
    identity, merge, merged = Identity.of(lm), LM.merge, []

    def watched(lm: LM) -> None:
        merge(lm)
        merged.append(why_unfit(lm.model))

    monkeypatch.setattr(LM, "merge", watched)
    words = ["eval", "nano-llada", "--adapter", "nano-llada-speed", "--tasks", "nano-word", "--limit", "2"]
    words += ["--gen-length", "32", "--device", "cpu", "--no-grade", "--out", str(tmp_path / "run")]
    torch.set_num_threads(1)
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert merged == [None]
    meta = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert (meta["model"], meta["adapter"]) == (identity.model, identity.adapter)
