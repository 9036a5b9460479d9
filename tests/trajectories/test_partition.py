"""States, near and distant against the paper's equations, written out literally."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tad.trajectories.partition import masked, partition, state

MASK = -1


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and a permutation of 1..T as reveal steps."""
    length = draw(st.integers(1, 40))
    reveal = draw(st.permutations(range(1, length + 1)))
    return draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)), list(reveal)


def replay(tokens: list[int], reveal: list[int]) -> list[list[int]]:
    """All states x_0 .. x_T, by revealing one position after the other."""
    states, canvas = [], [MASK] * len(tokens)
    states.append(list(canvas))
    for step in range(1, len(tokens) + 1):
        position = reveal.index(step)
        canvas[position] = tokens[position]
        states.append(list(canvas))
    return states


@given(trajectories(), st.data())
def test_states_are_those_of_revealing_one_token_after_the_other(trajectory, data: st.DataObject) -> None:
    tokens, reveal = trajectory
    states = replay(tokens, reveal)
    step = data.draw(st.integers(0, len(tokens)))
    got = state(torch.tensor(tokens), torch.tensor(reveal), step, MASK)
    assert got.tolist() == states[step]
    assert masked(torch.tensor(reveal), step).tolist() == [token == MASK for token in states[step]]


@given(trajectories(), st.integers(0, 60), st.data())
def test_near_and_distant_are_the_papers_sets(trajectory, window: int, data: st.DataObject) -> None:
    tokens, reveal = trajectory
    states, last = replay(tokens, reveal), len(tokens)
    step = data.draw(st.integers(0, last))
    b_now = [token == MASK for token in states[step]]
    # Beyond the last step nothing is masked.
    b_later = [token == MASK for token in states[step + window]] if step + window <= last else [False] * last
    near, distant = partition(torch.tensor(reveal), step, window)
    assert near.tolist() == [now and not later for now, later in zip(b_now, b_later, strict=True)]
    assert distant.tolist() == [now and later for now, later in zip(b_now, b_later, strict=True)]


@given(trajectories(), st.integers(0, 60), st.integers(0, 40))
def test_near_holds_window_tokens_until_the_end_comes_closer(trajectory, window: int, step: int) -> None:
    _, reveal = trajectory
    left = max(0, len(reveal) - step)
    near, distant = partition(torch.tensor(reveal), step, window)
    assert near.sum() == min(window, left)
    assert distant.sum() == left - min(window, left)


def test_a_batch_takes_a_step_per_row() -> None:
    reveal = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    near, distant = partition(reveal, torch.tensor([[0], [2]]), 1)
    assert near.tolist() == [[True, False, False, False], [False, True, False, False]]
    assert distant.tolist() == [[False, True, True, True], [True, False, False, False]]
