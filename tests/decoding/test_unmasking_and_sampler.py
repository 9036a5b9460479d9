"""Unmasking strategies, the sampler and its noise on hand-made numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tad.decoding.noise import uniform
from tad.decoding.sampler import Samples, Sampling, filter_logits, sample
from tad.decoding.unmasking import (
    Candidates,
    ConfidenceThreshold,
    ContiguousPrefix,
    Credit,
    EntropyThreshold,
    Factor,
    Hierarchy,
    OwnCanvas,
    Strategy,
    Top1,
    TopKPerStep,
    first_best_of,
    force_progress,
)


def sure(*confidence: float, entropy: list[float] | None = None) -> Samples:
    p = torch.tensor([confidence])
    h = torch.tensor([entropy]) if entropy else 1 - p
    return Samples(torch.zeros_like(p).long(), p, p / (1 - p), h, p)


def at(
    *positions: int, spent: int = 0, forced: list[int] | None = None, valid: list[bool] | None = None
) -> Candidates:
    position = torch.tensor([positions])
    return Candidates(
        position,
        torch.ones_like(position).bool() if valid is None else torch.tensor([valid]),
        torch.ones_like(position) if forced is None else torch.tensor([forced]),
        torch.tensor([spent]),
        torch.tensor([0]),
        torch.tensor([1]),
        16,
        [OwnCanvas(20, spent)],
    )


def chosen(reveal: torch.Tensor) -> list[int]:
    return reveal[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("vocab", [48, 50, 16])
def test_the_token_is_the_first_of_the_largest_that_is_no_mask(vocab: int) -> None:
    logits = torch.randint(
        0, 5, (200, vocab), generator=torch.Generator().manual_seed(0)
    ).float()  # many ties
    mask, place = 3, torch.arange(200)
    found = sample(logits, Sampling(), mask, (1,), *3 * [torch.zeros_like(place)])
    allowed = logits.clone()
    allowed[:, mask] = -torch.inf
    assert found.token.tolist() == [row.tolist().index(row.max()) for row in allowed]


PREFIX = sure(0.2, 0.9, 0.6, 0.95, 0.99, entropy=[0.8, 0.1, 0.5, 0.05, 0.01])
ENTROPIES = sure(0.9, 0.9, 0.9, entropy=[0.5, 0.25, 0.75])
FIVE = at(3, 4, 6, 7, 8, valid=[True] * 4 + [False])
TWO_THEN_ONE = TopKPerStep(per_block=(3, 2))
CASES: dict[str, tuple[Strategy, Samples, Candidates, list[int]]] = {
    "the lowest position of a tie": (Top1(), sure(0.5, 0.9, 0.9), at(3, 4, 5), [1]),
    "padding is no candidate": (Top1(), sure(0.5, 0.9), at(3, 4, valid=[True, False]), [0]),
    "a prefix": (ContiguousPrefix(), PREFIX, FIVE, [0, 1]),
    "a prefix to the last candidate": (ContiguousPrefix(0.6), PREFIX, FIVE, [0, 1, 2, 3]),
    "a prefix of the leftmost, however unsure": (ContiguousPrefix(0.0), PREFIX, FIVE, [0]),
    "a prefix by confidence": (ContiguousPrefix(0.7, "confidence"), PREFIX, FIVE, [0, 1]),
    "a confidence that equals": (ConfidenceThreshold(0.5), sure(0.5, 0.75, 0.25), at(1, 2, 3), [0, 1]),
    "and strictly": (ConfidenceThreshold(0.5, strict=True), sure(0.5, 0.75, 0.25), at(1, 2, 3), [1]),
    "the best is kept": (ConfidenceThreshold(0.9), sure(0.2, 0.3), at(1, 2), [1]),
    "the leftmost is kept beside the sure": (
        EntropyThreshold(0.5, keep="leftmost"), sure(0.4, 0.9, 0.5, entropy=[2.0, 0.1, 0.9]), at(1, 2, 3), [0, 1],
    ),
    "the leftmost candidate, not padding": (
        ConfidenceThreshold(0.9, keep="leftmost"), sure(0.2, 0.3, 0.1), at(1, 2, 3, valid=[False, True, True]), [1],
    ),
    "nothing is kept": (ConfidenceThreshold(0.9, keep=None), sure(0.2, 0.3), at(1, 2), []),
    "an entropy that equals": (EntropyThreshold(0.5, strict=False), ENTROPIES, at(1, 2, 3), [0, 1]),
    "an entropy strictly": (EntropyThreshold(0.5, strict=True), ENTROPIES, at(1, 2, 3), [1]),
    # factor 1: rank 2 needs 1 - 1/3, rank 3 needs 3/4, rank 4 needs 4/5. Rank 3 fails, so rank 4 is not looked at.
    "factor ends at a rank": (Factor(1.0), sure(0.9, 0.7, 0.74, 0.95), at(1, 2, 3, 4), [0, 3]),
    "factor to the last": (Factor(1.0), sure(0.8, 0.81, 0.82, 0.83), at(1, 2, 3, 4), [0, 1, 2, 3]),
    "factor nothing": (Factor(0.0), sure(0.3, 0.2), at(1, 2), [0]),
    # runs: 2-3-4 and 8-9; 12 alone is below low
    "hierarchy": (Hierarchy(0.95, 0.6), sure(0.7, 0.8, 0.65, 0.61, 0.5, 0.55), at(2, 3, 4, 8, 9, 12), [1, 3]),
    "top-k at first": (TWO_THEN_ONE, sure(0.1, 0.9, 0.5), at(1, 2, 3, spent=0), [1, 2]),
    "top-k then": (TWO_THEN_ONE, sure(0.1, 0.9, 0.5), at(1, 2, 3, spent=1), [1]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_strategy_chooses_as_it_is_defined(case: str) -> None:
    strategy, samples, candidates, wanted = CASES[case]
    assert chosen(strategy.choose(samples, candidates)) == wanted


def test_credit_lets_a_steady_token_overtake() -> None:
    rule = Credit(alpha=1.0, beta=1.0, gamma=0.2)
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    credit = torch.tensor([[0.0, 5.0, 0.0]])
    after, fused = rule.accumulate(credit, logits)
    assert fused.argmax() == 1
    assert after[0, 0] > 0
    assert after[0, 1] == 5.0


def test_top_k_per_step_counts_are_the_published_schedules() -> None:
    assert TopKPerStep(per_block=(32, 32)).counts == [1] * 32
    assert TopKPerStep(per_block=(32, 12)).counts == [3] * 8 + [2] * 4
    dream = TopKPerStep(timesteps=True, per_block=(256, 256)).counts
    assert dream[0] == 0
    assert dream[-1] == 2
    assert set(dream[1:-1]) == {1}
    assert TopKPerStep(timesteps=True, per_block=(256, 128)).counts == [1, *[2] * 126, 3]
    for length in (32, 64, 128):
        assert sum(TopKPerStep(timesteps=True, per_block=(length, 16)).counts) == length


def test_the_first_best_of_are_the_best_and_ties_go_to_the_lowest_position() -> None:
    score = torch.tensor([[1.0, 5.0, 5.0, 3.0], [2.0, 2.0, 2.0, 9.0]])
    valid = torch.tensor([[True, True, True, True], [True, True, True, False]])
    chosen = first_best_of(score, valid, torch.tensor([3, 2]))
    assert chosen.tolist() == [[False, True, True, True], [True, True, False, False]]
    assert not first_best_of(score, valid, torch.tensor([0, 0])).any()


def test_every_forced_group_gets_its_best() -> None:
    score = torch.tensor([[0.1, 0.2, 0.9, 0.3, 0.3]])
    candidates = at(1, 2, 3, 4, 5, forced=[1, 1, 2, 3, 3])
    reveal = torch.tensor([[False, False, True, False, False]])
    assert chosen(force_progress(reveal, score, candidates, groups=4)) == [1, 2, 3]
    candidates.forced.zero_()
    assert chosen(force_progress(reveal, score, candidates, groups=4)) == [2]


def call_sampler(logits: torch.Tensor, **sampling: object) -> Samples:
    index = torch.arange(len(logits))
    return sample(logits, Sampling(**sampling), 0, (1, 2), index * 0 + 7, index * 0 + 1, index)


@given(seed=st.integers(0, 2**31), scale=st.floats(0.1, 40))
def test_scores_are_those_of_the_softmax_in_double_precision(seed: int, scale: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)) * scale
    got = call_sampler(logits)
    p = logits.double().softmax(-1)
    own = p.gather(-1, got.token[:, None])[:, 0]
    first, second = p.topk(2, -1).values.unbind(-1)
    assert torch.allclose(got.confidence.double(), own, atol=1e-6)
    assert torch.allclose(got.entropy.double(), torch.special.entr(p).sum(-1), rtol=1e-4, atol=1e-6)
    assert torch.allclose(got.margin.double(), first - second, atol=1e-6)


def test_odds_tell_apart_what_a_probability_in_fp32_cannot() -> None:
    logits = torch.tensor([[0.0, 30.0, 0.0], [0.0, 31.0, 0.0]])
    got = call_sampler(logits)
    assert got.confidence[0] == got.confidence[1] == 1
    assert got.odds[1] > got.odds[0]
    assert got.entropy[0] > got.entropy[1] > 0


def test_filters_keep_the_token_that_crosses_top_p_and_at_least_one() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.isfinite(filter_logits(logits, 0.7, None)).tolist() == [[True, True, False, False]]
    assert torch.isfinite(filter_logits(logits, 0.01, None)).tolist() == [[True, False, False, False]]
    assert torch.isfinite(filter_logits(logits, None, 3)).tolist() == [[True, True, True, False]]


def test_filtered_scores_are_of_the_filtered_distribution() -> None:
    logits = torch.tensor([[-9.0, 2.0, 1.0, 0.0]])
    plain = call_sampler(logits, top_k=1)
    filtered = call_sampler(logits, top_k=1, filtered_scores=True)
    assert plain.confidence < 0.8
    assert filtered.confidence == 1
    assert filtered.entropy == 0


def test_noise_depends_on_seed_step_position_and_token_alone() -> None:
    seed, step, position = torch.tensor([1, 1, 2]), torch.tensor([3, 3, 3]), torch.tensor([5, 6, 5])
    whole = uniform(seed, step, position, 100)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(uniform(seed[one], step[one], position[one], 100)[0], whole[row])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], whole[2])
    assert whole.min() > 0
    assert whole.max() < 1


def test_noise_is_uniform_and_uncorrelated_between_neighbours() -> None:
    position = torch.arange(1000)
    u = uniform(position * 0 + 3, position * 0 + 1, position, 500).double()
    assert abs(u.mean() - 0.5) < 2e-3  # 5 standard errors of the mean of half a million
    assert abs(u.var() - 1 / 12) < 1e-3
    centred = u - u.mean()
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * other).mean() * 12) < 7e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampling_follows_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([-50.0, 1.0, 0.0, -1.0])
    draws = 20_000
    index = torch.arange(draws)
    got = sample(
        logits.expand(draws, 4), Sampling(temperature=temperature), 0, (1,), index, index * 0, index * 0
    )
    share = torch.bincount(got.token, minlength=4) / draws
    assert torch.allclose(share, (logits / temperature).softmax(-1), atol=0.015)


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=1), Sampling(top_p=0.5), Sampling(top_p=0.5, temperature=0.1)]
)
def test_a_filter_that_leaves_the_mask_alone_does_not_decide_the_token(sampling: Sampling) -> None:
    logits = torch.zeros(1, 16)
    logits[0, 7], logits[0, 3] = 9.0, 5.0
    zero = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, sampling, 7, (1,), zero, zero, zero).token.tolist() == [3]


@pytest.mark.parametrize("filtered", [False, True])
def test_a_temperature_near_nothing_is_greedy(filtered: bool) -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0, 4.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    sampling = Sampling(temperature=5e-324, filtered_scores=filtered)
    found = sample(logits, sampling, 0, (1,), zero, zero, zero)
    assert found.token.tolist() == [2]
    assert found.confidence.isfinite().all()
    assert found.entropy.isfinite().all()
