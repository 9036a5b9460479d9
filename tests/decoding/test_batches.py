"""A row's result does not depend on its batch: every named decoder, greedy and sampled, both families."""

from __future__ import annotations

import pytest

from tad.decoding import decode, decoders_for
from tad.models import LM

SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def outcome(results: list) -> list[tuple[list[int], list[int], int]]:
    return [(result.tokens, result.steps, result.forwards) for result in results]


@pytest.mark.parametrize("length", [24, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", decoders_for(None))
def test_row_is_the_same_alone_in_a_batch_and_in_another_order(
    lm: LM, prompts: list[list[int]], name: str, sampling: dict, length: int
) -> None:
    call = {"decoder": name, "gen_length": length, **sampling}
    if name != "dream":
        call["block"] = 8
    some, seeds = prompts[2:6], [0, 11, 22, 33]
    together = outcome(decode(lm, some, seed=seeds, **call))
    backwards = outcome(decode(lm, some[::-1], seed=seeds[::-1], **call))[::-1]
    alone = [outcome(decode(lm, [p], seed=[s], **call))[0] for p, s in zip(some, seeds, strict=True)]
    assert together == alone
    assert backwards == alone


def test_batch_size_changes_nothing_but_the_batches(lm: LM, prompts: list[list[int]]) -> None:
    whole = outcome(decode(lm, prompts, gen_length=64))
    assert outcome(decode(lm, prompts, gen_length=64, batch_size=3)) == whole


def test_rows_with_the_same_seed_and_prompt_agree_and_other_seeds_differ(
    lm: LM, prompts: list[list[int]]
) -> None:
    call = {"decoder": "one-by-one", "gen_length": 32, "temperature": 1.0, "stop": "off"}
    first, again, other = decode(lm, [prompts[2]] * 3, seed=[5, 5, 6], **call)
    assert first.tokens == again.tokens
    assert first.tokens != other.tokens


def test_finished_rows_leave_the_batch(
    lm: LM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    forward = lm.model.forward
    monkeypatch.setattr(
        lm.model, "forward", lambda ids, **rest: sizes.append(len(ids)) or forward(ids, **rest)
    )
    results = decode(lm, prompts, gen_length=64)
    living = [sum(result.forwards > step for result in results) for step in range(len(sizes))]
    assert sizes == living
    assert len(set(sizes)) > 1
