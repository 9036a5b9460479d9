"""Blocks on a grid that begins with the prompt: what the table says of them, and a decode by a model that attends so."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from parity_models import tiny, tiny_prompts

from tad.decoding import Step, decode
from tad.decoding.table import BlockTable
from tad.models import BlockLayout

CPU = torch.device("cpu")


def test_an_offset_of_nothing_is_no_offset() -> None:
    masked = torch.rand(3, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    plain = BlockTable.start(3, 16, 4, CPU)
    moved = BlockTable.start(3, 16, 4, CPU, offset=torch.zeros(3, dtype=torch.int64))
    for table in (plain, moved):
        table.observe(masked)
    assert moved.blocks == plain.blocks + 1  # for rows whose last block is cut off
    assert torch.equal(moved.masks[:, :-1], plain.masks)
    assert torch.equal(moved.current, plain.current)
    assert torch.equal(moved.spread(moved.masks, 16), plain.spread(plain.masks, 16))
    assert torch.equal(moved.progress[:, :-1], plain.progress)


def test_the_first_block_is_shorter_by_its_part_of_the_prompt() -> None:
    table = BlockTable.start(2, 8, 4, CPU, offset=torch.tensor([3, 0]))
    table.observe(torch.ones(2, 8, dtype=torch.bool))
    assert table.masks.tolist() == [[1, 4, 3], [4, 4, 0]]
    assert table.start_of(torch.tensor([1, 1])).tolist() == [1, 4]
    assert table.blocks_in(torch.tensor([8, 8])).tolist() == [3, 2]


@pytest.mark.parametrize("rule", ["entropy", "best", "confidence"])
def test_a_model_on_an_absolute_grid_decodes_block_by_block(rule: str) -> None:
    lm, size = copy.deepcopy(tiny("llada")), 8
    lm.model.shape = replace(lm.model.shape, blocks=BlockLayout(size, "absolute"))
    prompts, steps = tiny_prompts("llada")[2:6], list[Step]()
    assert len({len(prompt) % size for prompt in prompts}) > 1
    settings = {"rule": rule, "store": False, "stop": "off"}
    rows = decode(lm, prompts, "sdar", 32, on_step=steps.append, **settings)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        blocks = [(len(prompt) + position) // size for position in range(32)]
        order = [row.steps[position] for position in range(32)]
        for early, late in pairwise(blocks):
            first = [step for step, block in zip(order, blocks, strict=True) if block == early]
            then = [step for step, block in zip(order, blocks, strict=True) if block == late]
            assert early == late or max(first) < min(then)
        alone = decode(lm, [prompt], "sdar", 32, **settings)[0]
        assert (row.tokens, row.steps) == (alone.tokens, alone.steps)
        assert {step.row for step in steps} >= {number}
