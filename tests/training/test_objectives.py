"""Objectives: what counts, what it costs, and that no split, padding or chunk changes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny_pair import (
    EOS,
    MASK,
    ROWS,
    adapted,
    both_families,
    gradients,
    logits_of,
    loss_of,
    make_row,
    objective_of,
    tiny_model,
    views_of,
)

from tad.errors import TadError
from tad.models import BlockLayout
from tad.training.objectives import (
    LossModule,
    Objective,
    averages,
)
from tad.training.objectives.module import adapters_off, checkpoint_layers, head_of, plain_model
from tad.training.states import TrajectoryArrays

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tad": ("tad", {"window": 3}),
    "tad-sum": ("tad", {"window": 3, "reduction": "sum", "lambda": 0.5, "tau": 2.0}),
    "tad-plain-teacher": ("tad", {"window": 3, "teacher": "plain"}),
    "tad-kl-everywhere": ("tad", {"window": 3, "near": "kl"}),
    "tad-ce-everywhere": ("tad", {"window": 3, "distant": "ce"}),
    "tad-near-only": ("tad", {"window": 3, "distant": "none"}),
    "tad-all": ("tad", {"window": "all"}),
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


def made(kind: str, family: str = "llada") -> Objective:
    name, chosen = KINDS[kind]
    return objective_of(name, family, **chosen)


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
    for name, value in together.stats.items():
        found = sum(float(s.stats[name]) for s in shares if name in s.stats)
        assert found == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
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


# Adapters under autocast


def adapted_in_bf16() -> Any:
    """The frozen weights in bf16, the adapters in fp32, as they are trained."""
    model = adapted(rank=4).to(torch.bfloat16)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_under_autocast_adapters_take_bf16_and_nothing_else_changes(recompute: bool) -> None:
    """Held to PEFT's own way, which casts to fp32 before the GEMM casts back."""
    objective = objective_of("tad", window=3)
    batch = objective.collate(views_of(objective, ROWS))
    found = {}
    for own in (True, False):
        model = adapted_in_bf16()
        module, seen = LossModule(model, objective), set()
        for name, part in module.named_modules():
            if isinstance(part, BaseTunerLayer) and not own:
                part._cast_input_dtype = partial(BaseTunerLayer._cast_input_dtype, part)
            elif name.endswith("lora_A.default"):
                part.register_forward_hook(lambda _, inputs, __, seen=seen: seen.add(inputs[0].dtype))
        if recompute:
            checkpoint_layers(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(batch, objective.counts(batch)).total
        loss.backward()
        found[own] = (
            loss.detach(),
            torch.cat([w.grad.flatten() for w in model.parameters() if w.requires_grad]),
        )
        assert seen == {torch.bfloat16 if own else torch.float32}
    assert found[True][1].abs().sum() > 0
    assert all(torch.equal(one, other) for one, other in zip(found[True], found[False], strict=True))


def test_outside_autocast_adapters_cast_as_peft_does() -> None:
    model = adapted_in_bf16()
    plain, ids = plain_model(model), ROWS[0].tokens[None]
    with torch.no_grad():
        before = plain(ids).logits
        LossModule(model, objective_of("tad", window=3))
        assert torch.equal(plain(ids).logits, before)
