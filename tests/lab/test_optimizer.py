"""Muon, Adam and the rate plan."""

from __future__ import annotations

import pytest
import torch

from tad_lab.pretraining.optimizer import MuonAdam, RatePlan, orthogonalize


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonalize_moves_singular_values_near_one_and_keeps_the_directions(
    shape: tuple[int, int, int],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    y = orthogonalize(x)
    values = torch.linalg.svdvals(y)
    assert values.max() < 1.3
    assert values.min() > 0.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    core = u.mT @ y @ v.mT
    off_diagonal = core - torch.diag_embed(core.diagonal(dim1=1, dim2=2))
    assert off_diagonal.abs().max() < 1e-4


def test_the_part_that_is_not_muon_is_adam() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.randn(7)), torch.nn.Parameter(torch.zeros(7))
    theirs.data.copy_(ours.data)
    mine = MuonAdam([], [ours], 0.02, 0.01, 0.0)
    reference = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.98), eps=1e-8)
    for step in range(20):
        for p in (ours, theirs):
            p.grad = torch.sin(p.detach() * (step + 1))
        mine.step()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_low_precision_weights_move_by_less_than_their_resolution() -> None:
    """The fp32 copy collects steps that bf16 could not hold."""
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MuonAdam([], [p], 0.02, 1e-4, 0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(0.99, abs=0.003)


def test_a_loaded_state_is_bit_equal_also_for_low_precision_weights() -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = MuonAdam([p], [], 0.02, 0.01, 0.01)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
    q = torch.nn.Parameter(p.detach().clone())
    other = MuonAdam([q], [], 0.02, 0.01, 0.01)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[q]["master"].dtype == torch.float32
    grad = torch.randn_like(p)
    p.grad, q.grad = grad.clone(), grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(optimizer.state[p]["master"], other.state[q]["master"])


def test_the_plan_warms_up_holds_and_falls_to_zero() -> None:
    plan = RatePlan(100, warmup=4, decay=0.4)
    assert [plan(step) for step in (0, 1, 4)] == pytest.approx([0.2, 0.4, 1.0])
    assert plan(59) == plan(30) == 1.0
    assert plan(80) == pytest.approx(0.5)
    assert plan(100) == 0.0


def test_a_decided_plan_falls_over_the_steps_that_remain() -> None:
    plan = RatePlan(10_000, warmup=0, decay=0.5, open_end=True)
    plan.decide(300, remaining=100)
    assert (plan.total, plan.decay_from, plan.open_end) == (400, 300, False)
    assert plan(350) == pytest.approx(0.5)


def test_the_plan_travels_with_the_scheduler() -> None:
    def scheduler(plan: RatePlan) -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, plan)

    decided = RatePlan(1000, 0, 0.5, open_end=True)
    first = scheduler(decided)
    decided.decide(10, 5)
    fresh = RatePlan(1000, 0, 0.5, open_end=True)
    scheduler(fresh).load_state_dict(first.state_dict())
    assert (fresh.total, fresh.decay_from, fresh.open_end) == (15, 10, False)
