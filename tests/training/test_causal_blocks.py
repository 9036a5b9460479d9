"""Blocks behind a token-causal context: rows with many blocks against one plain forward per block, and what is learned where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_autoregressive import FREE, write_autoregressive
from torch import Tensor

import tad
from tad.errors import TadError
from tad.models import AttentionMask, BlockLayout
from tad.models.attention import open_block
from tad.models.gated import gate
from tad.training.objectives import CausalBlocks, LossModule, View, get_objective
from tad.training.states import TrajectoryArrays

BLOCK = 4


def make_row(seed: int, prompt: int, length: int, filler: int = 0) -> TrajectoryArrays:
    draws = np.random.default_rng(seed)
    ids = torch.from_numpy(draws.integers(0, 200, prompt))
    tokens = torch.from_numpy(draws.integers(0, 200, length + filler))
    return TrajectoryArrays(str(seed), ids, ids, tokens, torch.arange(length + filler) + 1, length)


def objective_of(**changes: Any) -> CausalBlocks:
    layout = BlockLayout(BLOCK, "absolute", causal=True)
    found = get_objective("causal-blocks", mask_token=FREE, family="qwen2", layout=layout, **changes)
    assert isinstance(found, CausalBlocks)
    return found


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> tad.LM:
    """A gated adapter that does something."""
    found = tad.load(write_autoregressive(tmp_path_factory.mktemp("m") / "m", scale=4.0))
    found.attach(4)
    gate(found.model, FREE)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in found.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    return found


def draw(objective: CausalBlocks, rows: list[TrajectoryArrays]) -> list[View]:
    return [
        view for row in rows for view in objective.views(row, None, np.random.default_rng(int(row.id)), 0.0)
    ]


def plain_loss(lm: tad.LM, objective: CausalBlocks, views: list[View]) -> Tensor:
    """One forward for every block: the prefix, then the block, of which only the masked tokens are looked at."""
    near: list[Tensor] = []
    distant: list[Tensor] = []
    text: list[Tensor] = []
    window = BLOCK if objective.window == "all" else objective.window
    for view in views:
        answer, prompt = view.labels, view.prompt
        clean = torch.cat((prompt, answer))
        logits = lm.model(clean[None]).logits[0]
        text += F.cross_entropy(logits[len(prompt) - 1 : -1], answer, reduction="none")
        for begin in range(0, len(view.noisy), BLOCK):
            start = len(prompt) + view.start + begin
            block = view.noisy[begin : begin + BLOCK]
            ids = torch.cat((clean[:start], block))
            mask = AttentionMask(None, open_block(torch.arange(len(ids)), torch.tensor([[start, len(ids)]])))
            found = lm.model(ids[None], mask=mask).logits[0, start:]
            for place in range(BLOCK):
                token = start + place + 1
                last = place == BLOCK - 1
                if token >= len(clean) or (block[place] != FREE if last else block[place + 1] != FREE):
                    continue
                if place + 1 <= window:
                    near.append(F.cross_entropy(found[place], clean[token]))
                else:
                    wanted = (logits[token - 1].detach() / objective.tau).log_softmax(-1)
                    given = (found[place] / objective.tau).log_softmax(-1)
                    distant.append((wanted.exp() * (wanted - given)).sum() * objective.tau**2)

    def mean(values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean() if values else torch.zeros(())

    return mean(near) + objective.lambda_ * mean(distant) + objective.next_token * mean(text)


@settings(max_examples=12)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 6), st.integers(2, 13), st.integers(0, 3)), min_size=1, max_size=3
    ),
    window=st.sampled_from(["all", 1, 2]),
    least=st.sampled_from([0.1, 1.0]),
    next_token=st.sampled_from([0.0, 0.5]),
    tau=st.sampled_from([1.0, 2.0]),
)
def test_a_row_of_blocks_has_the_loss_of_one_block_at_a_time(
    lm: tad.LM, lengths: list[tuple[int, int, int]], window: Any, least: float, next_token: float, tau: float
) -> None:
    objective = objective_of(window=window, least=least, next_token=next_token, tau=tau, **{"lambda": 0.7})
    views = draw(objective, [make_row(seed, *sizes) for seed, sizes in enumerate(lengths)])
    batch = objective.collate(views)
    learned = [weight for weight in lm.model.parameters() if weight.requires_grad]
    found = LossModule(lm.model, objective)(batch, objective.counts(batch)).total
    wanted = plain_loss(lm, objective, views)
    assert torch.allclose(found, wanted, atol=1e-4)
    if wanted.requires_grad and len(batch.terms["near"]):
        pairs = zip(
            torch.autograd.grad(found, learned, allow_unused=True),
            torch.autograd.grad(wanted, learned, allow_unused=True),
            strict=True,
        )
        for one, other in pairs:
            if one is not None and other is not None:
                assert torch.allclose(one, other, atol=1e-3, rtol=1e-3)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 40),
    filler=st.integers(0, 9),
    least=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_blocks_are_whole_and_begin_anywhere_and_nothing_behind_the_answer_counts(
    seed: int, length: int, filler: int, least: float
) -> None:
    objective = objective_of(least=least)
    (view,) = draw(objective, [make_row(seed, 3, length, filler)])
    assert len(view.labels) == length
    assert len(view.noisy) % BLOCK == 0
    assert view.start < max(BLOCK, 1)
    assert view.start + len(view.noisy) >= length
    for place, token in enumerate(view.noisy.tolist()):
        at = view.start + place
        assert token == FREE or (at < length and token == view.labels[at])
    for begin in range(0, len(view.noisy), BLOCK):
        block = view.noisy[begin : begin + BLOCK]
        assert (block == FREE).any()
        if least == 1.0:
            assert (block == FREE).all()
    counted = view.terms["near"].nonzero()[:, 0]
    assert (counted > view.start).all()  # the text itself predicts the first token of the first block


def test_over_many_draws_blocks_begin_at_every_position() -> None:
    objective, row = objective_of(), make_row(0, 2, 20)
    starts = {objective.views(row, None, np.random.default_rng(seed))[0].start for seed in range(100)}
    assert starts == set(range(BLOCK))


def test_the_shares_of_masks_are_spread_evenly() -> None:
    objective, row = objective_of(least=0.1), make_row(0, 2, 400)
    share = [
        float((objective.views(row, None, np.random.default_rng(seed))[0].noisy == FREE).float().mean())
        for seed in range(40)
    ]
    # 100 blocks of 4: the shares average 0.55, and one mask at least raises that by a little.
    assert 0.55 < np.mean(share) < 0.62
    assert np.std(share) < 0.04


def test_a_frozen_parent_gets_no_gradient_from_the_text(lm: tad.LM) -> None:
    objective = objective_of(next_token=1.0)
    batch = objective.collate(draw(objective, [make_row(1, 3, 9)]))
    outputs = LossModule(lm.model, objective)(batch, objective.counts(batch))
    outputs.total.backward()
    frozen = [p for n, p in lm.model.named_parameters() if "lora_" not in n and n != "mask_embedding"]
    assert all(weight.grad is None for weight in frozen)
    lm.model.zero_grad()


def test_other_models_and_other_objectives_are_refused_in_one_line() -> None:
    causal, parent = (
        BlockLayout(BLOCK, "absolute", causal=True),
        BlockLayout(1, "absolute", causal=True),
    )
    for layout, family in ((None, "llada"), (BlockLayout(4, "absolute"), "sdar"), (parent, "qwen2")):
        with pytest.raises(TadError, match="needs a converted autoregressive model"):
            get_objective("causal-blocks", mask_token=FREE, family=family, layout=layout)
    for name in ("tad", "sdar", "fast-dllm-v2", "sft"):
        with pytest.raises(TadError, match="this one is autoregressive"):
            get_objective(name, mask_token=FREE, family="qwen2", layout=causal)


def test_an_empty_prompt_is_refused_by_name() -> None:
    objective = objective_of()
    with pytest.raises(TadError, match="prompt is empty"):
        objective.collate(draw(objective, [make_row(7, 0, 9)]))


def test_the_text_is_fed_once_and_the_prompt_is_not_fed_twice(tmp_path: Path) -> None:
    objective = objective_of()
    views = draw(objective, [make_row(3, 10, 9)])
    batch = objective.collate(views)
    assert batch.student.ids.shape[1] == len(views[0].noisy) + 10 + 9
