"""Objectives of block diffusion: the layout is what decoding shows, and what is masked, counted and left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_pair import EOS, MASK, adapted, loss_of, make_row, objective_of, tiny_model, views_of
from torch import Tensor

from tad.errors import TadError
from tad.models import AttentionMask, BlockLayout
from tad.training.objectives import LossModule, View, get_objective
from tad.training.objectives.module import mask_of, positions_of

NAMES = ("fast-dllm-v2", "sdar", "llada2")
ROWS = [make_row(seed) for seed in range(5)]
BLOCK = 4


@pytest.mark.parametrize("name", NAMES)
def test_a_noisy_block_gives_what_it_gives_after_the_clean_prefix(name: str) -> None:
    """All blocks in one forward, padded to other rows, are one forward each of clean prefix and noisy block."""
    objective, model = objective_of(name, block=BLOCK), tiny_model("llada")
    views = views_of(objective, ROWS)
    padded = objective.collate(views).student
    assert padded.padded
    with torch.no_grad():
        together = model(padded.ids, position_ids=positions_of(padded), mask=mask_of(model, padded)).logits
        for number, view in enumerate(views):
            noisy, clean = (torch.cat((view.prompt, part)) for part in (view.noisy, view.labels))
            for start in range(0, len(noisy), BLOCK):
                end = min(start + BLOCK, len(noisy))
                ids = torch.cat((clean[:start], noisy[start:end]))[None]
                mask = AttentionMask(blocks=torch.arange(end)[None] // BLOCK)
                alone = model(ids, mask=mask).logits[0, start:]
                assert torch.allclose(together[number, start:end], alone, atol=1e-4)


def test_every_answer_token_is_masked_in_one_of_the_two_copies() -> None:
    objective = objective_of("fast-dllm-v2", block=BLOCK)
    for row in ROWS:
        first, second = objective.views(row, None, np.random.default_rng(1))
        scored = first.terms["hard"] + second.terms["hard"]
        end = int((~row.filler).nonzero().max()) + 1
        assert scored[:end].tolist() == [1.0] * end
        assert not scored[end:].any()
        assert (
            first.noisy[end:] == MASK
        ).all()  # filler that does not count does not show where the answer ends
        assert first.answer_tokens + second.answer_tokens == end


class FirstDraws:
    """A generator whose first numbers are given."""

    def __init__(self, *first: float) -> None:
        self.first = np.array(first)

    def random(self, size: int) -> np.ndarray:
        found, self.first = self.first, np.full(64, 0.5)
        return found if len(found) == size else np.full(size, 0.5)


@pytest.mark.parametrize("filler", [False, "block", True])
def test_rows_of_pretraining_have_the_loss_of_their_views(filler: bool | str) -> None:
    """The views are read off the batch: rows, masks and scored positions; both copies of every row."""
    objective, model = objective_of("fast-dllm-v2", "dream", block=BLOCK, filler=filler), tiny_model("dream")
    rows = [make_row(seed, length=20, prompt=prompt, n_real=11) for seed, prompt in enumerate((3, 6, 9))]
    width = 22
    whole = [torch.cat((row.plain_ids, row.tokens))[:width] for row in rows]
    # The text comes first, then filler, as in the stream.
    for row, ids in zip(rows, whole, strict=True):
        ids[len(row.plain_ids) : len(row.plain_ids) + 11] = 5 + torch.arange(11)
        ids[len(row.plain_ids) + 11 :] = EOS
    ids, prompts = torch.stack(whole), torch.tensor([len(row.plain_ids) for row in rows])
    batch = objective.noise_rows(ids, prompts, EOS, torch.Generator().manual_seed(2))
    views = []
    scored = torch.zeros(3, width)
    for number in range(6):
        row, prompt = ids[number % 3], int(prompts[number % 3])
        noisy = batch.student.ids[number, :width]
        assert torch.equal(batch.student.ids[number, width:], row)
        assert torch.equal(noisy[:prompt], row[:prompt])
        last = prompt + 11
        end = {False: last, "block": min(width, -(-last // BLOCK) * BLOCK), True: width}[filler]
        weights = ((noisy == MASK) & (torch.arange(width) < end)).float()
        scored[number % 3, prompt:] += weights[prompt:]
        assert (noisy[end:] == MASK).all()
        views.append(
            View(
                "row",
                row[:prompt],
                noisy[prompt:],
                row[prompt:],
                {"hard": weights[prompt:]},
                None,
                BLOCK,
                True,
            )
        )
        assert scored[number % 3, :prompt].sum() == 0
        assert number < 3 or (scored[number % 3, prompt:end] == 1).all()
    together, alone = (
        LossModule(model, objective)(one, objective.counts(one)).total
        for one in (batch, objective.collate(views))
    )
    assert float(together.detach()) == pytest.approx(float(alone.detach()), rel=1e-5)
    mine = objective.noise_rows(ids, prompts, EOS, torch.Generator().manual_seed(2), slice(1, None, 2))
    assert torch.equal(mine.student.ids, batch.student.ids[[1, 4]])


def test_ratios_are_drawn_for_blocks_that_start_with_the_prompt() -> None:
    """Six tokens of prompt: the first answer block has two positions."""
    objective = objective_of("fast-dllm-v2", block=BLOCK)
    masked, weights = objective.noise(torch.arange(6, 17), FirstDraws(1.0, 0.0, 1.0, 0.0))
    assert masked.tolist() == [True] * 2 + [False] * 4 + [True] * 4 + [False]
    assert (weights == 1).all()


def test_sdar_weighs_by_the_ratio_and_counts_the_last_block_whole() -> None:
    objective = objective_of("sdar", block=BLOCK)
    for row in ROWS:
        (view,) = objective.views(row, None, np.random.default_rng(3))
        total = len(view.prompt) + len(view.labels)
        real = len(view.prompt) + int((~row.filler).nonzero().max()) + 1
        assert total == min(-(-real // BLOCK) * BLOCK, len(row.plain_ids) + len(row.tokens))
        weights = view.terms["hard"]
        assert len(set(weights[weights > 0].tolist())) == 1
        assert (weights > 0).any()
        assert view.answer_tokens == len(view.labels)


def test_llada2_masks_the_filler_too() -> None:
    (view,) = objective_of("llada2", block=BLOCK).views(ROWS[0], None, np.random.default_rng(0))
    assert len(view.labels) == len(ROWS[0].tokens)
    with pytest.raises(TadError, match="least"):
        objective_of("llada2", block=BLOCK, least=0.9)


def test_blocks_of_filler_that_do_not_count_are_not_fed() -> None:
    objective, model = objective_of("sdar", block=BLOCK), adapted()
    row = ROWS[0]
    longer = replace(
        row,
        tokens=torch.cat((row.tokens, row.tokens[-1:].expand(12))),
        reveal=torch.cat((row.reveal, row.reveal.max() + 1 + torch.arange(12))),
    )

    def loss(of: object) -> Tensor:
        return loss_of(model, objective, objective.views(of, None, np.random.default_rng(0))).total

    end = len(row.plain_ids) + len(row.tokens)
    if end % BLOCK == 0 or row.filler.sum() >= BLOCK:
        assert torch.equal(loss(row), loss(longer))
    views = objective.views(longer, None, np.random.default_rng(0))
    assert len(views[0].labels) < len(longer.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_block_size_is_the_models_unless_set(name: str) -> None:
    layout = BlockLayout(8, "absolute")
    assert get_objective(name, mask_token=1, family="sdar", layout=layout).block == 8
    assert get_objective(name, mask_token=1, family="sdar", layout=layout, block=4).block == 4
    with pytest.raises(TadError, match=r"objective\.block"):
        get_objective(name, mask_token=1, family="llada")
    with pytest.raises(TadError, match=r"objective\.block"):
        get_objective(name, mask_token=1, family="sdar", block=0)
