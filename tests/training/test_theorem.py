"""The paper's theorem, on worlds small enough to enumerate, and what distillation does to the factorization gap.

The theorem: for a student that factorizes, the joint KL from the teacher's token-by-token distribution equals the expected
token-wise cross-entropy along its decoding path, up to a constant in the student. What follows, and is tested too: no such
student gets below the teacher's own factorization gap, the KL from its joint to the product of its marginals. A student
closes a gap by becoming sure of one path, which is what trajectories with the reference in the teacher's prompt show it.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tad.models import LLADA, LLaDAConfig, MaskedDiffusionModel
from tad.models.lora import attach
from tad.training.objectives import LossModule, Tad, adapters_off
from tad.training.states import TrajectoryArrays

PLACES, VOCAB = 3, 4


class TableTeacher:
    """Any conditional distributions: a random table for every set of revealed tokens. Reveals by highest confidence."""

    def __init__(self, seed: int) -> None:
        self.draws = np.random.default_rng(seed)
        self.tables: dict[tuple[int | None, ...], Tensor] = {}

    def __call__(self, canvas: tuple[int | None, ...]) -> Tensor:
        """[places, vocab] probabilities in a state."""
        if canvas not in self.tables:
            logits = torch.from_numpy(self.draws.normal(0, 2, (PLACES, VOCAB)))
            self.tables[canvas] = logits.softmax(-1)
        return self.tables[canvas]


def paths(teacher: TableTeacher, canvas: tuple[int | None, ...] = (None,) * PLACES) -> list[list[tuple]]:
    """Every rollout from a state, as steps (position, its distribution there, token, probability so far)."""
    hidden = [i for i, token in enumerate(canvas) if token is None]
    if not hidden:
        return [[]]
    said = teacher(canvas)
    place = max(hidden, key=lambda i: float(said[i].max()))
    found = []
    for token in range(VOCAB):
        after = (*canvas[:place], token, *canvas[place + 1 :])
        found += [[(place, said[place], token), *rest] for rest in paths(teacher, after)]
    return found


def joint(teacher: TableTeacher) -> Tensor:
    """[vocab, vocab, vocab]: the teacher's token-by-token distribution."""
    table = torch.zeros((VOCAB,) * PLACES, dtype=torch.float64)
    for path in paths(teacher):
        tokens = {place: token for place, _, token in path}
        table[tuple(tokens[i] for i in range(PLACES))] = math.prod(
            float(said[token]) for _, said, token in path
        )
    return table


def log_product(logs: Tensor) -> Tensor:
    """Joint log-probabilities of a factorized student with log-marginals [places, vocab]."""
    return logs[0][:, None, None] + logs[1][None, :, None] + logs[2][None, None, :]


def joint_kl(table: Tensor, logs: Tensor) -> Tensor:
    return (table * (table.log() - log_product(logs))).sum()


def token_wise(teacher: TableTeacher, logs: Tensor) -> Tensor:
    """The right-hand side of the theorem: over steps, in expectation over what was revealed before."""
    total = torch.zeros((), dtype=torch.float64)
    seen = set()
    for path in paths(teacher):
        reach, before = 1.0, ()
        for place, said, token in path:
            if before not in seen:  # each prefix once
                seen.add(before)
                total = total - reach * (said * logs[place]).sum()
            reach *= float(said[token])
            before = (*before, (place, token))
    return total


def marginals(table: Tensor) -> Tensor:
    return torch.stack([table.sum([j for j in range(PLACES) if j != i]) for i in range(PLACES)])


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_joint_kl_is_expected_cross_entropy_up_to_a_constant(seed: int) -> None:
    teacher = TableTeacher(seed)
    table = joint(teacher)
    assert float(table.sum()) == pytest.approx(1, abs=1e-12)
    entropy = float(-(table * table.log()).sum())
    draws = np.random.default_rng(seed + 1)
    for _ in range(3):
        student = torch.from_numpy(draws.normal(0, 2, (PLACES, VOCAB))).requires_grad_()
        left, right = joint_kl(table, student.log_softmax(-1)), token_wise(teacher, student.log_softmax(-1))
        assert float((right - left).detach()) == pytest.approx(entropy, abs=1e-10)
        (by_left,) = torch.autograd.grad(left, student)
        (by_right,) = torch.autograd.grad(right, student)
        assert torch.allclose(by_left, by_right, atol=1e-10)


def test_hard_labels_of_sampled_paths_estimate_the_same_objective() -> None:
    """What training uses: cross-entropy on the tokens of rollouts, which are samples of the inner expectation."""
    teacher = TableTeacher(4)
    logs = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (PLACES, VOCAB))).log_softmax(-1)
    table = joint(teacher).flatten()
    picks = torch.multinomial(table, 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
    estimate = -log_product(logs).flatten()[picks].mean()
    assert float(estimate) == pytest.approx(float(token_wise(teacher, logs)), rel=0.02)


def test_distillation_on_all_paths_stops_at_the_factorization_gap() -> None:
    """Before: above the gap. After: at the gap, with the teacher's marginals; no factorized student is lower."""
    teacher = TableTeacher(0)
    table = joint(teacher)
    gap = float(joint_kl(table, marginals(table).log()))
    assert gap > 0.1
    student = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (PLACES, VOCAB))).requires_grad_()
    before = float(joint_kl(table, student.log_softmax(-1)).detach())
    assert before > gap + 0.1
    optimizer = torch.optim.LBFGS([student], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = token_wise(teacher, student.log_softmax(-1))
        loss.backward()
        return loss

    optimizer.step(closure)
    after = float(joint_kl(table, student.log_softmax(-1)).detach())
    assert after == pytest.approx(gap, abs=1e-6)
    assert torch.allclose(student.softmax(-1).detach(), marginals(table), atol=1e-3)


# --- the same with a network: the answers to a question are "aaa" or "bbb", each as likely; a reference tells which

A, B, ASK, HINT_A, HINT_B, MASK = 0, 1, 2, 3, 4, 5
PLAIN, TOLD_A, TOLD_B = (ASK, ASK), (ASK, HINT_A), (ASK, HINT_B)


@cache
def two_mode_model() -> MaskedDiffusionModel:
    """A base model that learned the world by masked diffusion. Shared: do not train it."""
    config = LLaDAConfig(
        d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, mlp_hidden_size=32, vocab_size=6, embedding_size=6,
        max_sequence_length=16, mask_token_id=MASK, eos_token_id=A, pad_token_id=A,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LLADA.model_class(config)
    cases = [(PLAIN, A), (PLAIN, B), (TOLD_A, A), (TOLD_B, B)]
    patterns = [p for p in product([False, True], repeat=PLACES) if any(p)]
    hidden = torch.tensor([p for _ in cases for p in patterns])
    ids = torch.tensor([[*prompt, *[answer] * PLACES] for prompt, answer in cases for _ in patterns])
    noisy = ids.clone()
    noisy[:, 2:][hidden] = MASK
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        logits = model(noisy).logits[:, 2:][hidden]
        loss = F.cross_entropy(logits, ids[:, 2:][hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def own_gap(model: MaskedDiffusionModel, prompt: tuple[int, ...]) -> float:
    """KL from the model's token-by-token joint to the product of its one-forward marginals, over {a, b} answers."""

    def said(canvas: tuple[int, ...]) -> Tensor:
        logits = model(torch.tensor([[*prompt, *canvas]])).logits[0, len(prompt) :].double()
        return logits[:, :2].softmax(-1)

    def walk(canvas: tuple[int, ...], reach: float, found: dict[tuple[int, ...], float]) -> None:
        hidden = [i for i, token in enumerate(canvas) if token == MASK]
        if not hidden:
            found[canvas] = found.get(canvas, 0.0) + reach
            return
        now = said(canvas)
        place = max(hidden, key=lambda i: float(now[i].max()))
        for token in (A, B):
            walk((*canvas[:place], token, *canvas[place + 1 :]), reach * float(now[place, token]), found)

    found: dict[tuple[int, ...], float] = {}
    walk((MASK,) * PLACES, 1.0, found)
    logs = said((MASK,) * PLACES).log()
    return sum(
        p * (math.log(p) - sum(float(logs[i, token]) for i, token in enumerate(answer)))
        for answer, p in found.items()
        if p > 0
    )


def distill(
    base: MaskedDiffusionModel, answer: int, told: tuple[int, ...], **choices: object
) -> MaskedDiffusionModel:
    """TAD on the one trajectory that the teacher makes with the reference before its eyes."""
    model = copy.deepcopy(base)
    torch.manual_seed(1)
    handle = attach(model, rank=4).train()
    objective = Tad(mask_token=MASK, **choices)
    row = TrajectoryArrays(
        "0",
        torch.tensor(PLAIN),
        torch.tensor(told),
        torch.full((PLACES,), answer),
        torch.arange(PLACES) + 1,
        PLACES,
    )
    views = [view for step in range(PLACES) for view in objective.views(row, step, None)]
    batch = objective.collate(views)
    totals, module = objective.counts(batch), LossModule(handle, objective)
    optimizer = torch.optim.Adam([p for p in handle.parameters() if p.requires_grad], lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        module(batch, totals).total.backward()
        optimizer.step()
    return model.eval()


def test_distillation_on_a_privileged_trajectory_closes_the_students_own_gap() -> None:
    """Before: two modes, marginals of one half each, a gap of log 4. After: one mode, next to none; the base unchanged."""
    base = two_mode_model()
    before = own_gap(base, PLAIN)
    assert before == pytest.approx(math.log(4), rel=0.1)
    assert own_gap(base, TOLD_A) < 0.05  # the reference already decides
    student = distill(base, A, TOLD_A, window=2)
    after = own_gap(student, PLAIN)
    assert after < 0.1 * before
    with adapters_off(student):
        assert own_gap(student, PLAIN) == pytest.approx(before, rel=1e-6)


def test_a_teacher_without_the_reference_leaves_the_gap_open() -> None:
    """KL everywhere to the same prompt's marginals has nothing to teach: the base is already its own best student."""
    base = two_mode_model()
    student = distill(base, A, PLAIN, window=2, near="kl", teacher="plain")
    assert own_gap(student, PLAIN) == pytest.approx(own_gap(base, PLAIN), rel=1e-3)
