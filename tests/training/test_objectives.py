"""Objectives: what counts, what it costs, and that no split, padding or chunk changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pair import (
    EOS,
    MASK,
    adapted,
    gradients,
    loss_of,
    make_row,
    objective_of,
    tiny_model,
    views_of,
)
from torch import Tensor

from tad.errors import TadError
from tad.models import BlockLayout
from tad.training.objectives import (
    LossModule,
    Objective,
    add_stats,
    averages,
)
from tad.training.objectives.module import adapters_off, head_of, plain_model
from tad.training.states import TrajectoryArrays
from tad.trajectories.partition import masked, partition

ROWS = [make_row(seed) for seed in range(5)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tad": ("tad", {"window": 3}),
    "tad-sum": ("tad", {"window": 3, "reduction": "sum", "lambda": 0.5, "tau": 2.0}),
    "tad-plain-teacher": ("tad", {"window": 3, "teacher": "plain"}),
    "tad-kl-everywhere": ("tad", {"window": 3, "near": "kl"}),
    "tad-ce-everywhere": ("tad", {"window": 3, "distant": "ce"}),
    "tad-near-only": ("tad", {"window": 3, "distant": "none"}),
    "tad-all": ("tad", {"window": "all"}),
    "tad-adaptive": ("tad", {"window": 5, "partition": "adaptive", "floor": 0.02}),
    "tad-adaptive-plain": (
        "tad",
        {"window": 5, "partition": "adaptive", "floor": 0.02, "teacher": "plain", "reduction": "sum"},
    ),
    "tad-smooth": ("tad", {"window": 3, "partition": "smooth"}),
    "tad-smooth-exponential": ("tad", {"window": 3, "partition": "smooth", "curve": "exponential"}),
    "dparallel": ("dparallel", {"block": 4}),
    "d3llm": ("d3llm", {"windows": (4, 8)}),
    "d2f": ("d2f", {"block": 4}),
    "d2f-hard": ("d2f", {"block": 4, "soft": False}),
    "sft": ("sft", {}),
    "fast-dllm-v2": ("fast-dllm-v2", {"block": 4}),
    "sdar": ("sdar", {"block": 4}),
    "llada2": ("llada2", {"block": 4}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both_families = pytest.mark.parametrize("family", ["llada", "dream"])


def made(kind: str, family: str = "llada") -> Objective:
    name, chosen = KINDS[kind]
    return objective_of(name, family, **chosen)


def logits_of(module: LossModule, ids: Tensor, teacher: bool = False) -> Tensor:
    """Whole logits of one unpadded row, moved so that entry i predicts token i."""
    model = plain_model(module.student)
    if teacher:
        with adapters_off(model), torch.no_grad():
            logits = model(ids[None]).logits[0]
    else:
        logits = model(ids[None]).logits[0]
    shift = module.objective.logit_shift
    return torch.cat((logits[:shift], logits[: len(ids) - shift]))


# --- the contract every objective keeps


@both_families
@every_kind
def test_any_split_of_a_global_batch_gives_its_loss_and_gradient(kind: str, family: str) -> None:
    objective, model = made(kind, family), adapted(family)
    module = LossModule(model, objective, chunk=5)
    views = views_of(objective, ROWS)
    whole = objective.collate(views)
    together = module(whole, objective.counts(whole))
    wanted = gradients(model, together.total)
    parts = [objective.collate(part) for part in (views[:1], views[1:4], views[4:])]
    totals: dict[str, float] = {}
    for part in parts:
        for name, count in objective.counts(part).items():
            totals[name] = totals.get(name, 0.0) + count
    shares = [module(part, totals) for part in parts]
    assert float(sum(s.total.detach() for s in shares)) == pytest.approx(
        float(together.total.detach()), rel=1e-5
    )
    for name, value in together.terms.items():
        found = sum(float(s.terms[name]) for s in shares if name in s.terms)
        assert found == pytest.approx(float(value), rel=1e-5, abs=1e-7), name
    for name, value in add_stats(*(s.stats for s in shares)).items():
        assert float(value) == pytest.approx(float(together.stats[name]), rel=1e-5, abs=1e-6), name
    slope = sum(gradients(model, s.total) for s in shares)
    assert (slope - wanted).norm() <= 1e-5 * wanted.norm()


@every_kind
def test_views_are_seeded_count_only_masks_and_bring_a_teacher_only_where_a_term_needs_it(kind: str) -> None:
    objective = made(kind)
    views = views_of(objective, ROWS)
    for view, again in zip(views, views_of(objective, ROWS), strict=True):
        assert torch.equal(view.noisy, again.noisy)
        for name, weights in view.terms.items():
            assert torch.equal(weights, again.terms[name])
            assert (view.noisy[weights > 0] == MASK).all()
            assert (weights >= 0).all()
        seen = view.noisy != MASK
        assert torch.equal(view.noisy[seen], view.labels[seen])
    batch = objective.collate(views)
    assert (batch.teacher is not None) == objective.needs_teacher
    student, teacher = batch.student.tokens, batch.teacher.tokens if batch.teacher else 0
    assert objective.tokens_fed(batch) == student * (2 if objective.needs_base else 1) + teacher


@every_kind
def test_a_position_without_a_near_or_distant_mask_gives_zero_and_not_nan(kind: str) -> None:
    """A text whose every position is filler that does not count: all sets are empty."""
    name, chosen = KINDS[kind]
    objective, model = objective_of(name, **chosen, filler=False), adapted()
    row = make_row(0)
    empty = TrajectoryArrays(row.id, row.plain_ids, row.privileged_ids, row.tokens, row.reveal, n_real=0)
    parts = loss_of(model, objective, views_of(objective, [empty]))
    assert float(parts.total.detach()) == 0.0
    assert not gradients(model, parts.total).any()
    assert not any(key.endswith("/confidence") for key in averages(parts.stats))


@every_kind
def test_what_fills_the_padding_does_not_matter(kind: str) -> None:
    objective, model = made(kind), adapted()
    batch = objective.collate(views_of(objective, ROWS))
    assert batch.student.padded
    module = LossModule(model, objective)
    before = float(module(batch, objective.counts(batch)).total.detach())
    for canvas in (batch.student, batch.teacher):
        if canvas is not None:
            column = torch.arange(canvas.ids.shape[1])
            canvas.ids[column >= canvas.lengths[:, None]] = 7
    assert float(module(batch, objective.counts(batch)).total.detach()) == before


def test_real_end_tokens_are_seen() -> None:
    """The published mask hides every id that equals the padding's: here an end token in the answer changes the loss."""
    objective, model = made("tad"), adapted()
    row = make_row(1)
    last = int(row.reveal.argmin())  # revealed first, so visible in state 4
    tokens = row.tokens.clone()
    tokens[last] = EOS
    ended = TrajectoryArrays(row.id, row.plain_ids, row.privileged_ids, tokens, row.reveal, row.n_real)
    before, after = (loss_of(model, objective, objective.views(r, 4, None)) for r in (row, ended))
    assert float(before.total.detach()) != pytest.approx(float(after.total.detach()), rel=1e-4)


# --- TAD


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
    objective, model = made("tad"), adapted()
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
    objective, model = made("tad-near-only"), adapted()
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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    step=st.integers(0, 11),
    window=st.integers(1, 14),
    softness=st.floats(0.05, 5),
    curve=st.sampled_from(["logistic", "exponential"]),
)
def test_smooth_weights_share_each_mask_and_fall_with_the_steps(
    seed: int, step: int, window: int, softness: float, curve: str
) -> None:
    objective = objective_of("tad", window=window, partition="smooth", softness=softness, curve=curve)
    reveal = make_row(seed).reveal
    near, distant = objective.weigh(reveal, step)
    assert torch.allclose(near + distant, masked(reveal, step).float())
    assert (near >= 0).all()
    assert (distant >= 0).all()
    order = reveal.argsort()
    soon = near[order][masked(reveal, step)[order]]
    assert (soon.diff() <= 1e-6).all()


@pytest.mark.parametrize(
    "limit", [{"partition": "smooth", "softness": 0.01}, {"partition": "adaptive", "floor": 0.0}], ids=str
)
def test_other_partitions_are_the_fixed_one_in_their_limit(limit: dict[str, Any]) -> None:
    model = adapted()
    objectives = [objective_of("tad", window=3, reduction="sum", **changes) for changes in ({}, limit)]
    fixed, other = (float(loss_of(model, o, views_of(o, ROWS)).total.detach()) for o in objectives)
    assert other == pytest.approx(fixed, rel=1e-6)


@pytest.mark.parametrize(("kind", "costs"), [("tad-adaptive", True), ("tad-adaptive-plain", False)])
def test_adaptive_keeps_near_what_the_base_model_already_believes(kind: str, costs: bool) -> None:
    """It costs a forward only where the teacher has another prompt."""
    objective, model = made(kind), adapted()
    assert objective.needs_base == costs
    module = LossModule(model, objective)
    view = objective.views(ROWS[2], 1, None)[0]
    start, candidates = len(view.prompt), view.terms["near"] > 0
    believed = logits_of(module, view.student_ids, teacher=True)[start:].softmax(-1)
    own = believed.gather(1, view.labels[:, None])[:, 0]
    near = candidates & (own >= objective.floor)
    assert 0 < int(near.sum()) < int(candidates.sum())  # the floor matters here
    parts = loss_of(model, objective, [view])
    assert float(parts.stats["near/tokens"]) == int(near.sum())
    assert float(parts.stats["distant/tokens"]) == int((view.noisy == MASK).sum()) - int(near.sum())
    student = logits_of(module, view.student_ids)[start:]
    wanted = F.cross_entropy(
        student[near], view.labels[near], reduction="sum" if objective.reduction == "sum" else "mean"
    )
    assert float(parts.terms["near"]) == pytest.approx(float(wanted.detach()), rel=1e-5)


# --- the peers


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["dparallel", "d3llm"]),
    family=st.sampled_from(["llada", "dream"]),
    seed=st.integers(0, 999),
    length=st.integers(5, 70),
    progress=st.floats(0, 1),
)
def test_mask_and_complement_share_one_window_and_nothing_after_it_is_seen(
    name: str, family: str, seed: int, length: int, progress: float
) -> None:
    objective = objective_of(name, family)
    row = make_row(seed, length)
    first, second = objective.views(row, None, np.random.default_rng(seed), progress)
    one, two = first.terms["hard"] > 0, second.terms["hard_complement"] > 0
    assert not (one & two).any()
    window = (one | two).nonzero()[:, 0]
    start, end = int(window[0]), int(window[-1]) + 1
    assert len(window) == end - start  # no holes: together they are the window
    for view in (first, second):
        assert (view.noisy[end:] == MASK).all()
        assert (view.noisy[:start] != MASK).all()


def test_dparallel_masks_half_of_the_window() -> None:
    objective = objective_of("dparallel", "dream")
    rng = np.random.default_rng(0)
    row = make_row(0, 4000, prompt=3)
    view = objective.views(row, None, rng)[0]
    assert float(view.terms["hard"].mean()) == pytest.approx(0.5, abs=0.03)
    assert objective_of("dparallel", "llada").block == 32


def test_the_entropy_term_counts_only_right_guesses() -> None:
    objective, model = made("dparallel"), adapted()
    view = objective.views(ROWS[0], None, np.random.default_rng(0))[0]
    student = logits_of(LossModule(model, objective), view.student_ids)[len(view.prompt) :]
    at = view.terms["hard"] > 0
    best = student.argmax(-1)
    # As drawn nothing is right; with the model's own guesses as labels everything is.
    flattering = type(view)(view.row, view.prompt, view.noisy, best, view.terms)
    logs = (student[at] / 0.5).log_softmax(-1)
    wanted = -(logs.exp() * logs).sum(-1).mean()
    parts = loss_of(model, objective, [flattering])
    assert float(parts.terms["entropy"]) == pytest.approx(float(wanted.detach()), rel=1e-5)
    wrong = type(view)(view.row, view.prompt, view.noisy, (best + 1) % 40, view.terms)
    assert float(loss_of(model, objective, [wrong]).terms["entropy"]) == 0.0


def test_the_window_of_d3llm_grows_over_the_run() -> None:
    objective = objective_of("d3llm", "dream")
    sizes = [objective.window(progress) for progress in np.linspace(0, 1, 50)]
    assert sizes[0] == 16
    assert sizes[-1] == 32
    assert sizes == sorted(sizes)
    assert objective.window(1 / 6) == 20  # half of the first of three parts: between 16 and 24
    assert objective_of("d3llm", "llada").window(0.1) == 16


def test_the_noise_of_d3llm_rises_to_its_most() -> None:
    objective = objective_of("d3llm", "llada", windows=(32,))
    ordered = TrajectoryArrays(
        "0", torch.arange(3), torch.arange(3), torch.arange(320) % 40, torch.arange(320) + 1, 320
    )

    def shares(progress: float) -> list[float]:
        found = []
        for seed in range(60):
            first, second = objective.views(ordered, None, np.random.default_rng(seed), progress)
            hard = int((first.terms["hard"] > 0).sum())
            found.append(hard / (hard + int((second.terms["hard_complement"] > 0).sum())))
        return found

    early, late = shares(0.0), shares(1.0)
    assert min(early) < 0.2
    assert max(early) <= 0.8 + 1 / 32
    assert min(late) >= 0.8 - 1e-9
    assert max(late) <= 0.8 + 1 / 32


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), length=st.integers(1, 100))
def test_d2f_blocks_get_noisier_from_left_to_right(seed: int, length: int) -> None:
    objective = objective_of("d2f")
    ratios = objective.ratios(length, np.random.default_rng(seed))
    assert len(ratios) == length
    assert (ratios.diff() >= 0).all()
    assert ratios.min() >= 0.2
    assert ratios.max() <= 0.7 + 1e-9
    blocks = torch.arange(length) // 16
    for block in blocks.unique():
        assert ratios[blocks == block].unique().numel() == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("d2f", {"block": 4, "soft": False}),
        ("tad", {"window": "all", "block_causal": 4}),
        ("dparallel", {"block": "all", "complement": False, "block_causal": 4}),
        ("sft", {"block_causal": 4}),
    ],
)
def test_a_block_causal_student_does_not_see_later_blocks(name: str, settings: dict[str, Any]) -> None:
    objective, model = objective_of(name, **settings), adapted()
    view = objective.views(ROWS[0], 2, np.random.default_rng(5))[0]
    assert view.block == 4
    ((term, weights),) = ((term, weights) for term, weights in view.terms.items() if weights.any())
    first = torch.zeros(12)
    first[:4] = weights[:4]
    assert first.any()
    later = view.noisy.clone()
    later[4:] = 9
    losses = []
    for noisy, block in ((view.noisy, 4), (later, 4), (later, None)):
        terms = {**view.terms, term: first}
        losses.append(loss_of(model, objective, [replace(view, noisy=noisy, terms=terms, block=block)]).total)
    slopes = [gradients(model, loss) for loss in losses]
    assert torch.allclose(slopes[0], slopes[1], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(slopes[0], slopes[2], rtol=1e-2)


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


# --- the module


def test_passing_adapters_over_gives_the_base_model_and_touches_no_parameter() -> None:
    model = adapted()
    plain, ids = tiny_model(), torch.arange(10)[None]
    trainable = [p.requires_grad for p in model.parameters()]
    with adapters_off(model), torch.no_grad():
        assert [p.requires_grad for p in model.parameters()] == trainable
        assert torch.equal(plain_model(model)(ids).logits, plain(ids).logits)
    assert not torch.allclose(plain_model(model)(ids).logits, plain(ids).logits)
    with pytest.raises(ValueError, match="stop"), adapters_off(model):
        raise ValueError("stop")
    assert not torch.allclose(plain_model(model)(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trained_whole_learns_its_head_from_a_frozen_teacher_and_needs_one(tied: bool) -> None:
    objective, model = made("tad"), tiny_model(weight_tying=tied)
    with pytest.raises(TadError, match="'tad'"):
        LossModule(model, objective)
    module = LossModule(model, objective, tiny_model(seed=1, weight_tying=tied)).train()
    assert module.student.training
    assert not module.teacher.training
    batch = objective.collate(views_of(objective, ROWS))
    module(batch, objective.counts(batch)).total.backward()
    assert head_of(model).weight.grad.any()
    assert all(p.grad is None for p in module.teacher.parameters())


def test_compiled_layers_keep_teacher_and_student_apart() -> None:
    objective, model = made("tad"), adapted()
    views = views_of(objective, ROWS)
    parts = loss_of(model, objective, views)
    wanted = gradients(model, parts.total)
    for layer in plain_model(model).layers():
        layer.compile(dynamic=False, backend="aot_eager")
    again = loss_of(model, objective, views)
    assert float(again.total.detach()) == pytest.approx(float(parts.total.detach()), rel=1e-5)
    found = gradients(model, again.total)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    torch._dynamo.reset()


def test_a_batch_moves_as_a_whole() -> None:
    objective = made("tad")
    batch = objective.collate(views_of(objective, ROWS))
    moved = batch.to("meta")
    assert moved.student.ids.is_meta
    assert moved.terms["near"].weights.is_meta
    assert len(moved) == len(batch) == len(ROWS)
    assert batch.rows == tuple(row.id for row in ROWS)


def test_an_empty_prompt_is_refused_where_the_output_before_it_is_needed() -> None:
    """Of the student, or of the teacher alone."""
    none, some, text = torch.zeros(0, dtype=torch.long), torch.tensor([4, 5]), torch.tensor([1, 2, 3])
    for plain in (none, some):
        row = TrajectoryArrays("bare", plain, none, text, text, 3)
        views = objective_of("tad", "llada").views(row, 1, None)
        objective_of("tad", "llada").collate(views)
        with pytest.raises(TadError, match="trajectory bare"):
            objective_of("tad", "dream").collate(views)


# --- by name


def test_published_settings_differ_by_family() -> None:
    assert objective_of("tad", "llada").window == 8
    assert objective_of("tad", "dream").window == 6
    assert objective_of("d3llm", "dream").complement_entropy
    assert not objective_of("d3llm", "llada").complement_entropy
    assert objective_of("tad", "dream", window=12).window == 12


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("tda", {}, "'tda'"),
        ("tad", {"windw": 3}, "'windw'.*'window'"),
        ("tad", {"window": 0}, "objective.window"),
        ("tad", {"window": "some"}, "objective.window"),
        ("tad", {"near": "mse"}, "objective.near"),
        ("tad", {"lambda": "much"}, "objective.lambda"),
        ("tad", {"floor": 2.0}, "objective.floor"),
        ("tad", {"partition": "smooth", "window": "all"}, "objective.partition"),
        ("dparallel", {"temperature": 0}, "objective.temperature"),
        ("d3llm", {"windows": ()}, "objective.windows"),
        ("d2f", {"most": 0.1}, "objective.least"),
        ("tad", {"block_causal": 0}, "objective.block_causal"),
        ("sft", {"block_causal": 8, "layout": BlockLayout(4, "absolute")}, "objective.block_causal"),
        ("next-token", {}, "token-causal"),
        ("next-token", {"layout": BlockLayout(1, "absolute")}, "'next-token' needs a family"),
    ],
)
def test_bad_settings_are_one_line_that_names_them(name: str, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(TadError, match=message):
        objective_of(name, **chosen)
