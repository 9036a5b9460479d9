"""Rollouts of block-diffusion models: one token per step, block by block on the grid of the prompt that is read."""

from __future__ import annotations

import pytest

from golden_lm import golden_lm, golden_meta
from tad.decoding import decode
from tad.decoding.unmasking import EntropyThreshold
from tad.trajectories.rollout import RolloutConfig, roll_out

LENGTH = 32


@pytest.mark.parametrize("order", ["teacher", "student", "left-to-right", "random"])
@pytest.mark.parametrize("folder", ["fastdllm_v2", "sdar", "llada2"])
def test_positions_are_revealed_one_by_one_in_the_models_blocks(folder: str, order: str) -> None:
    lm, prompts = golden_lm(folder), golden_meta(folder)["prompts"]
    size = int(lm.model.shape.blocks.size)
    privileged = [[7, *prompt, 9, 11] for prompt in prompts]
    rows = roll_out(lm, privileged, prompts, LENGTH, RolloutConfig(order=order))
    for prompt, row in zip(privileged, rows, strict=True):
        assert sorted(row.reveal) == list(range(1, LENGTH + 1))
        blocks = [(len(prompt) + row.reveal.index(step)) // size for step in range(1, row.n_real + 1)]
        assert blocks == sorted(blocks)
        assert lm.tokens.mask not in row.tokens
        assert (row.reveal == sorted(row.reveal)) == (order == "left-to-right")


def test_the_parallel_order_is_the_same_rule_block_by_block() -> None:
    lm, prompts = golden_lm("sdar"), golden_meta("sdar")["prompts"]
    config = RolloutConfig(order="parallel", threshold=3.0, stop_at_end=False)
    rows = roll_out(lm, prompts, prompts, LENGTH, config)
    wanted = decode(
        lm, prompts, "sdar", LENGTH, rule=EntropyThreshold(3.0, keep="leftmost"), store=False, stop="off"
    )
    assert [row.tokens for row in rows] == [row.tokens for row in wanted]
    assert [row.n_real for row in rows] == [len({*row.steps}) for row in wanted]
    assert any(row.n_real < LENGTH for row in rows)


def test_the_teachers_order_is_the_surest_token_first() -> None:
    lm, prompts = golden_lm("llada2"), golden_meta("llada2")["prompts"]
    rows = roll_out(lm, prompts, prompts, LENGTH, RolloutConfig())
    wanted = decode(lm, prompts, "llada2", LENGTH, rule="best", stop="end", cache="none")
    assert [row.tokens for row in rows] == [row.tokens for row in wanted]
    assert [row.n_real for row in rows] == [sum(step > 0 for step in row.steps) for row in wanted]


def test_a_smaller_block_is_a_part_of_the_models_from_left_to_right() -> None:
    lm, prompts = golden_lm("fastdllm_v2"), golden_meta("fastdllm_v2")["prompts"]
    size = int(lm.model.shape.blocks.size) // 2
    rows = roll_out(lm, prompts, prompts, LENGTH, RolloutConfig(block=size, stop_at_end=False))
    wanted = decode(lm, prompts, "fast-dllm-v2", LENGTH, rule="best", sub_block=size, store=False, stop="off")
    assert [row.tokens for row in rows] == [row.tokens for row in wanted]
    for row, other in zip(
        rows, wanted, strict=True
    ):  # what its last block reveals behind the canvas is cut off
        assert row.reveal == [sorted(other.steps).index(step) + 1 for step in other.steps]
    whole = roll_out(lm, prompts, prompts, LENGTH, RolloutConfig(stop_at_end=False))
    assert [row.reveal for row in whole] != [row.reveal for row in rows]
