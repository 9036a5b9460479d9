"""The objective `tad`: near and distant are the paper's equations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_pair import (
    MASK,
    ROWS,
    adapted,
    both_families,
    logits_of,
    loss_of,
    make_row,
    objective_of,
    views_of,
)

from tad.training.objectives import LossModule, averages
from tad.trajectories.partition import masked, partition


@both_families
def test_tad_is_the_two_equations(family: str) -> None:
    objective, model = objective_of("tad", family, window=4, tau=1.5, **{"lambda": 0.7}), adapted(family)
    module = LossModule(model, objective)
    near_sum = distant_sum = torch.zeros(())
    near_count = distant_count = 0
    views = []
    for step, row in enumerate(ROWS):
        views += objective.views(row, step, None)
        hidden = row.tokens.masked_fill(masked(row.reveal, step), MASK)
        start, taught = len(row.plain_ids), len(row.privileged_ids)
        student = logits_of(module, torch.cat((row.plain_ids, hidden)))[start:]
        teacher = logits_of(module, torch.cat((row.privileged_ids, hidden)), teacher=True)[taught:]
        near, distant = partition(row.reveal, step, 4)
        near_sum = near_sum + F.cross_entropy(student[near], row.tokens[near], reduction="sum")
        given, wanted = (student[distant] / 1.5).log_softmax(-1), (teacher[distant] / 1.5).softmax(-1)
        distant_sum = distant_sum + 1.5**2 * F.kl_div(given, wanted, reduction="sum")
        near_count, distant_count = near_count + int(near.sum()), distant_count + int(distant.sum())
    wanted = near_sum / near_count + 0.7 * distant_sum / distant_count
    parts = loss_of(model, objective, views)
    assert float(parts.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert float(parts.stats["near/tokens"]) == near_count
    summed = objective_of("tad", family, window=4, tau=1.5, reduction="sum", **{"lambda": 0.7})
    paper = (near_sum + 0.7 * distant_sum) / len(ROWS)
    assert float(loss_of(model, summed, views).total.detach()) == pytest.approx(
        float(paper.detach()), rel=1e-5
    )


def test_confidence_and_entropy_are_those_of_the_student() -> None:
    objective, model = objective_of("tad", window=3), adapted()
    view = objective.views(ROWS[0], 3, None)[0]
    parts = loss_of(model, objective, [view])
    logs = logits_of(LossModule(model, objective), view.student_ids)[len(view.prompt) :].log_softmax(-1)
    means = averages(parts.stats)
    for term in ("near", "distant"):
        at = view.terms[term] > 0
        own = logs[at].gather(1, view.labels[at][:, None]).exp().mean().detach()
        assert means[f"{term}/confidence"] == pytest.approx(float(own), rel=1e-5)
        entropy = -(logs[at].exp() * logs[at]).sum(-1).mean().detach()
        assert means[f"{term}/entropy"] == pytest.approx(float(entropy), rel=1e-5)
        assert means[f"{term}/tokens"] == int(at.sum())


def test_near_only_still_reports_the_distant_positions() -> None:
    objective, model = objective_of("tad", window=3, distant="none"), adapted()
    parts = loss_of(model, objective, views_of(objective, ROWS))
    assert float(parts.terms["distant"]) == 0.0
    assert float(parts.stats["distant/tokens"]) > 0
    assert float(parts.total.detach()) == float(parts.terms["near"])


def test_end_filler_counts_only_when_asked_and_a_plain_teacher_sees_what_the_student_sees() -> None:
    row = make_row(3, n_real=7)
    whole, short, plain = (
        objective_of("tad", window=4, **changes).views(row, 2, None)[0]
        for changes in ({}, {"filler": False}, {"teacher": "plain"})
    )
    for term in ("near", "distant"):
        assert torch.equal(short.terms[term] > 0, (whole.terms[term] > 0) & (row.reveal <= 7))
    assert torch.equal(short.noisy, whole.noisy)
    assert whole.terms["distant"].sum() > short.terms["distant"].sum()
    assert torch.equal(plain.teacher_ids, plain.student_ids)
    assert torch.equal(whole.teacher_ids[: len(row.privileged_ids)], row.privileged_ids)
