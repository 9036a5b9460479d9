"""Masked diffusion, the objective `sft`: the published sum, and rows of pretraining noised as trajectories are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_pair import (
    EOS,
    MASK,
    both_families,
    make_row,
    objective_of,
    tiny_model,
)
from torch import Tensor

from tad.training.objectives import LossModule


@both_families
@pytest.mark.parametrize("floor", [1e-3, 0.5])
def test_sft_is_the_published_sum(family: str, floor: float) -> None:
    """Over masked positions, cross-entropy / ratio / answer length; over rows, the mean. A floor caps 1 / ratio alone."""
    objective, model = objective_of("sft", family, floor=floor), tiny_model(family)
    ids = torch.randint(0, MASK, (3, 12), generator=torch.Generator().manual_seed(0))
    prompts = torch.tensor([2, 5, 1])
    batch = noised(objective, ids, prompts)
    draw = torch.Generator().manual_seed(3)
    ratio = 0.999 * ((torch.rand(1, generator=draw) + torch.arange(3) / 3) % 1) + 1e-3
    noisy, wanted = batch.student.ids, 0.0
    inside = torch.arange(12) < prompts[:, None]
    assert torch.equal(noisy[inside], ids[inside])  # prompts are never masked
    logs = model(noisy).logits.log_softmax(-1)
    for row in range(3):
        for place in range(int(prompts[row]), 12):
            if noisy[row, place] == MASK:
                own = logs[row, place - objective.logit_shift, ids[row, place]]
                wanted += float(-own.detach() / max(ratio[row], floor) / (12 - prompts[row])) / 3
    found = LossModule(model, objective)(batch, objective.counts(batch)).total
    assert float(found.detach()) == pytest.approx(wanted, rel=1e-5)
    assert wanted > 0


def noised(objective: Any, ids: Tensor, prompts: Tensor, seed: int = 3, **more: Any) -> Any:
    return objective.noise_rows(ids, prompts, EOS, torch.Generator().manual_seed(seed), **more)


@pytest.mark.parametrize("settings", [{}, {"block_states": 0.6, "block": 4}, {"floor": 0.3}], ids=str)
def test_a_row_of_pretraining_is_masked_and_weighed_as_a_trajectory_s_text(settings: dict[str, Any]) -> None:
    objective = objective_of("sft", **settings)
    for seed in range(12):
        row = make_row(seed, n_real=9)
        view = objective.views(row, None, np.random.default_rng(seed))[0]
        drawn = int(np.random.default_rng(seed).integers(2**63))
        batch = noised(objective, row.tokens[None], torch.tensor([0]), drawn)
        assert torch.equal(batch.student.ids[0], view.noisy)
        targets = batch.terms["hard"]
        assert torch.equal(targets.student_index, view.terms["hard"].nonzero()[:, 0])
        assert torch.equal(targets.labels, row.tokens[targets.student_index])
        torch.testing.assert_close(targets.weights, view.terms["hard"][targets.student_index])


def test_ratios_cover_the_range_and_each_is_uniform() -> None:
    ids, prompts = torch.zeros(100, 2000, dtype=torch.long), torch.zeros(100, dtype=torch.long)
    objective = objective_of("sft")
    shares = (noised(objective, ids, prompts).student.ids == MASK).float().mean(1).sort().values
    assert torch.allclose(shares, torch.linspace(0, 1, 100), atol=0.05)
    firsts = [
        float((noised(objective, ids[:4, :400], prompts[:4], seed).student.ids[0] == MASK).float().mean())
        for seed in range(300)
    ]
    assert torch.tensor(firsts).sort().values.sub(torch.linspace(0, 1, 300)).abs().max() < 0.12


def test_processes_share_the_rows_of_a_batch_under_one_noise() -> None:
    objective = objective_of("sft", block_states=0.5, block=4)
    draws = torch.Generator().manual_seed(0)
    ids, prompts = (
        torch.randint(0, MASK, (9, 20), generator=draws),
        torch.randint(1, 9, (9,), generator=draws),
    )
    whole = noised(objective, ids, prompts)
    parts = [noised(objective, ids, prompts, mine=slice(rank, None, 2)) for rank in range(2)]
    for rank, part in enumerate(parts):
        assert torch.equal(part.student.ids, whole.student.ids[rank::2])
    model = tiny_model()
    module = LossModule(model, objective)
    together, shares = (
        [float(module(batch, objective.counts(whole)).total.detach()) for batch in batches]
        for batches in ([whole], parts)
    )
    assert sum(shares) == pytest.approx(together[0], rel=1e-5)


def test_block_states_show_whole_blocks_before_the_current_one_and_only_masks_after_it() -> None:
    ids = torch.zeros(64, 80, dtype=torch.long)
    ids[:, 60:] = EOS  # filler from the 50th answer token on
    objective = objective_of("sft", block_states=1.0, block=16)
    hidden = noised(objective, ids, torch.full((64,), 10)).student.ids[:, 10:] == MASK
    seen = set()
    for row in hidden:
        fits = [block for block in range(4) if not row[: 16 * block].any() and row[16 * (block + 1) :].all()]
        assert fits, "neither whole blocks first nor masks last"
        seen.update(fits)
    assert seen == {0, 1, 2, 3}
    mixed = objective_of("sft", block_states=0.5, block=16)
    ends = (
        (noised(mixed, ids.repeat(6, 1), torch.full((384,), 10)).student.ids[:, 26:] == MASK)
        .all(1)
        .float()
        .mean()
    )
    assert 0.15 < float(ends) < 0.75


def test_sft_leaves_out_the_filler_where_asked() -> None:
    objective, row = objective_of("sft", filler=False), make_row(3, n_real=7)
    weights = torch.stack(
        [objective.views(row, None, np.random.default_rng(seed))[0].terms["hard"] for seed in range(20)]
    )
    assert not weights[:, row.filler].any()
    assert weights[:, ~row.filler].any(0).all()
