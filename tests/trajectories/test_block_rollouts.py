"""Rollouts of block-diffusion models: one token per step, block by block on the grid of the prompt that is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tad.decoding import decode
from tad.models import LM, SpecialTokens, family_of
from tad.trajectories.rollout import RolloutConfig, roll_out

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
LENGTH = 32


def load(folder: str) -> tuple[LM, list[list[int]]]:
    path = GOLDEN / folder / "checkpoint"
    family = family_of(json.loads((path / "config.json").read_text())["model_type"])
    model = family.model_class.from_pretrained(path, dtype="float32", attn_implementation="sdpa").eval()
    meta = json.loads((GOLDEN / folder / "meta.json").read_text())
    ids = (meta[f"{name}_token_id"] for name in ("mask", "eos", "pad", "bos", "eot"))
    return LM(model, family, SpecialTokens(*ids), source=folder), meta["prompts"]


@pytest.mark.parametrize("order", ["teacher", "student", "left-to-right", "random"])
@pytest.mark.parametrize("folder", ["fastdllm_v2", "sdar", "llada2"])
def test_positions_are_revealed_one_by_one_in_the_models_blocks(folder: str, order: str) -> None:
    lm, prompts = load(folder)
    size = int(lm.model.shape.blocks.size)
    privileged = [[7, *prompt, 9, 11] for prompt in prompts]
    rows = roll_out(lm, privileged, prompts, LENGTH, RolloutConfig(order=order))
    for prompt, row in zip(privileged, rows, strict=True):
        assert sorted(row.reveal) == list(range(1, LENGTH + 1))
        blocks = [(len(prompt) + row.reveal.index(step)) // size for step in range(1, row.n_real + 1)]
        assert blocks == sorted(blocks)
        assert lm.tokens.mask not in row.tokens


def test_the_teachers_order_is_the_surest_token_first() -> None:
    lm, prompts = load("llada2")
    rows = roll_out(lm, prompts, prompts, LENGTH, RolloutConfig())
    wanted = decode(lm, prompts, "llada2", LENGTH, rule="best", stop="end", cache="none")
    assert [row.tokens for row in rows] == [row.tokens for row in wanted]
    assert [row.n_real for row in rows] == [sum(step > 0 for step in row.steps) for row in wanted]
