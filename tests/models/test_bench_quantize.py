"""bench/quantize.py: blocks are rounded by their own scale, and every kind of weights is held to bf16 problem by problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import quantize as bench
from tad.models.quantize import to_fp8


def test_a_block_is_rounded_by_its_own_scale() -> None:
    weight = torch.randn(200, 300)
    weight[150, 290] = 1e9  # spoils its own block and no other
    found = bench.round_blocks(weight)
    small, scale = to_fp8(weight[:128, 128:256].reshape(1, -1))
    assert torch.equal(found[:128, 128:256], (small.float() * scale).view(128, 128))
    assert (found[:128] - weight[:128]).abs().max() < 0.2
    assert not found[128:150, 256:].any()


def test_every_kind_of_weights_is_paired_with_bf16(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    words = [
        "nano-llada",
        "--size",
        "1",
        "--device",
        "cpu",
        "--decoders",
        "tad",
        "--weights",
        "fp8-block",
        "int4",
    ]
    rows = bench.main([*words, "--out", str(out)])
    assert [row["weights"] for row in rows] == ["bf16", "fp8-block", "int4"]
    assert (rows[0]["difference"], rows[0]["tpf_ratio"], rows[0]["same_answers"]) == (0, 1, 1)
    for row in rows:
        assert row["difference"] == row["accuracy"] - rows[0]["accuracy"]
        assert row["tpf"] > 1.5
    assert json.loads(out.read_text())["rows"] == rows


@pytest.mark.parametrize("model", ["nano-llada", "nano-dream"])
def test_predictions_at_masks_are_held_to_the_unrounded_ones(model: str) -> None:
    words = [model, "--predictions", "--size", "2", "--device", "cpu", "--weights", "int8", "int4"]
    plain, int8, int4 = bench.main(words)
    assert (plain["difference"], plain["same_best"], plain["kl"]) == (0, 1, 0)
    assert plain["right"] > 0.8  # the right positions are asked, shifted logits or not
    assert 0 < int8["kl"] < int4["kl"] < 0.1
