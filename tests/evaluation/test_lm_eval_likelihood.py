"""The Monte Carlo likelihood against its definition, enumerated."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval_setup import tiny_lm
from tests.tiny_autoregressive import hf_model, write_autoregressive

from tad.decoding import decode
from tad.errors import TadError
from tad.evaluation.lm_eval.likelihood import decodes_greedily, draw_masks, estimate_loglikelihood
from tad.models import DREAM, LLADA, LM, load

CONTEXT, TARGET = "What is 2 + 2?", "four"


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=lambda family: family.name)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LM:
    return tiny_lm(tmp_path_factory.mktemp("likelihood"), request.param, scale=2.0)


def enumerate_draws(lm: LM, context: list[int], target: list[int]) -> tuple[list[float], list[float]]:
    """Probability and weighted cross-entropy of every possible mask, straight from the definition."""
    length = len(target)
    probabilities, values = [], []
    for mask in itertools.product([False, True], repeat=length):
        count = sum(mask)
        if count == 0:
            continue
        noisy = [lm.tokens.mask if hide else token for token, hide in zip(target, mask, strict=True)]
        with torch.no_grad():
            logits = lm.model(torch.tensor([context + noisy])).logits[0].double().log_softmax(-1)
        loss = sum(
            -float(logits[len(context) + i - lm.family.logit_shift, target[i]])
            for i in range(length)
            if mask[i]
        )
        probabilities.append(1 / length / math.comb(length, count))
        values.append(loss * length / count)
    assert sum(probabilities) == pytest.approx(1)
    return probabilities, values


def test_the_estimate_meets_the_enumerated_expectation(lm: LM) -> None:
    context, target = lm.encode_text(CONTEXT), lm.encode_text(TARGET)
    probabilities, values = enumerate_draws(lm, context, target)
    mean = sum(p * v for p, v in zip(probabilities, values, strict=True))
    spread = math.sqrt(sum(p * (v - mean) ** 2 for p, v in zip(probabilities, values, strict=True)))
    assert spread > 0.1  # masks matter, so that a wrong weight would show
    draws = 4096
    estimate = estimate_loglikelihood(lm, context, target, draws, batch=256, seed=5)
    assert abs(estimate + mean) < 4 * spread / math.sqrt(draws)


def test_the_estimate_does_not_hang_on_the_batch(lm: LM) -> None:
    context, target = lm.encode_text(CONTEXT), lm.encode_text(TARGET)
    values = [estimate_loglikelihood(lm, context, target, 24, batch) for batch in (1, 7, 24)]
    assert values == pytest.approx([values[0]] * 3, abs=1e-5)
    assert values[0] != estimate_loglikelihood(lm, context, target, 24, seed=1)


def test_a_single_token_is_exact_in_one_forward(lm: LM) -> None:
    context, target = lm.encode_text(CONTEXT), lm.encode_text("4")
    (probability,), (value,) = enumerate_draws(lm, context, target)
    fed: list[int] = []
    handle = lm.model.register_forward_hook(lambda *parts: fed.append(1))
    estimate = estimate_loglikelihood(lm, context, target)
    handle.remove()
    assert len(fed) == 1
    assert probability == 1
    assert estimate == pytest.approx(-value, abs=1e-4)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31))
def test_counts_are_spread_evenly_over_the_draws(length: int, times: int, seed: int) -> None:
    masks = draw_masks(length, length * times, torch.Generator().manual_seed(seed))
    counts = masks.sum(1).tolist()
    assert sorted(counts) == sorted(list(range(1, length + 1)) * times)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**31))
def test_every_draw_masks_between_one_and_all_tokens(length: int, draws: int, seed: int) -> None:
    masks = draw_masks(length, draws, torch.Generator().manual_seed(seed))
    assert masks.shape == (draws, length)
    assert bool(masks.any(1).all())


def test_each_count_and_each_place_is_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack(
        [draw_masks(5, 4, generator) for _ in range(8000)]
    )  # 4 draws of 5: not a whole spread
    for draw in range(4):
        counts = masks[:, draw].sum(1).bincount(minlength=6)[1:]
        assert ((counts - 1600).abs() < 5 * math.sqrt(1600)).all()
        places = masks[:, draw].sum(0)  # each place is masked with probability (1 + 5) / 2 / 5
        assert ((places - 4800).abs() < 5 * math.sqrt(8000 * 0.6 * 0.4)).all()


def test_a_continuation_is_greedy_if_decoding_one_by_one_gives_it(lm: LM) -> None:
    context = lm.encode_text(CONTEXT)
    own = decode(lm, [context], "one-by-one", 5, block=None, stop="off")[0].tokens
    other = [*own[:-1], (own[-1] + 1) % 200]
    assert decodes_greedily(lm, context, own)
    assert not decodes_greedily(lm, context, other)


def test_what_has_no_likelihood_is_refused(lm: LM) -> None:
    with pytest.raises(TadError, match="the continuation has no tokens"):
        estimate_loglikelihood(lm, [1], [])
    with pytest.raises(TadError, match="the context is empty"):
        estimate_loglikelihood(lm, [], [1])
    with pytest.raises(TadError, match="the continuation contains the mask token"):
        estimate_loglikelihood(lm, [1], [lm.tokens.mask])
    with pytest.raises(TadError, match="over the context of 8192"):
        estimate_loglikelihood(lm, [1] * 8190, [1, 2, 3])


def test_a_token_causal_model_has_the_likelihood_of_transformers(tmp_path: Path) -> None:
    lm = load(write_autoregressive(tmp_path / "model", "llama3", 1, tokenizer=False), device="cpu")
    context, target = [5, 6, 7], [8, 9, 10, 11]
    with torch.no_grad():
        logits = hf_model("llama3", 1)(torch.tensor([[*context, *target]])).logits[0].double()
    wanted = logits[2:-1].log_softmax(-1).gather(1, torch.tensor(target)[:, None]).sum()
    assert estimate_loglikelihood(lm, context, target) == pytest.approx(float(wanted), abs=1e-4)
    assert not decodes_greedily(lm, context, target)
    said = decode(lm, [context], "autoregressive", 6)[0].content
    assert decodes_greedily(lm, context, said)
