"""Throughput: what is counted, what is left out, and whole batches only."""

from __future__ import annotations

from typing import Any

import pytest

from tad.decoding import decode
from tad.errors import TadError
from tad.evaluation import measure_speed
from tad.evaluation import throughput as module
from tad.models import LM


@pytest.fixture
def prompts(lm: LM) -> list[list[int]]:
    return [lm.encode("why " * (1 + i % 3)) for i in range(6)]


def test_both_token_counts_are_of_the_decoded_rows(lm: LM, prompts: list[list[int]]) -> None:
    (speed,) = measure_speed(lm, prompts, "tad", 16, block=8)
    rows = decode(lm, prompts, "tad", 16, block=8)
    assert speed.tokens == sum(len(row.content) for row in rows)
    assert speed.tokens_all == 6 * 16
    assert speed.forwards == speed.calls == sum(row.forwards for row in rows)
    assert speed.tokens_per_second == speed.tokens / speed.seconds
    assert speed.spread[0] <= speed.spread[1]


def test_larger_batches_share_their_calls(lm: LM, prompts: list[list[int]]) -> None:
    one, three = measure_speed(lm, prompts, "tad", 16, [1, 3], block=8)
    assert (one.batch, one.batches, three.batch, three.batches) == (1, 6, 3, 2)
    assert one.tokens == three.tokens
    assert three.calls < one.calls


def test_the_warm_up_and_broken_batches_are_left_out(
    lm: LM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(lm: LM, batch: list[list[int]], *rest: Any) -> Any:
        sizes.append(len(batch))
        return decode(lm, batch, *rest)

    monkeypatch.setattr(module, "decode", counted)
    (speed,) = measure_speed(lm, prompts, "tad", 16, [4], warmup=2, block=8)
    assert sizes == [4, 4, 4]
    assert (speed.rows, speed.batches) == (4, 1)


def test_a_batch_larger_than_the_prompts_is_refused(lm: LM, prompts: list[list[int]]) -> None:
    with pytest.raises(TadError, match="batch size 7 with 6 prompts"):
        list(measure_speed(lm, prompts, "tad", 16, [7], block=8))
