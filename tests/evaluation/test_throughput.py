"""Throughput: what is counted, what is left out, whose turn it is, and whole batches only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tad.decoding import decode, get_decoder
from tad.errors import TadError
from tad.evaluation import Speed, TimedMethod, list_tasks, measure_speeds
from tad.evaluation import throughput as module
from tad.evaluation.questions import Item, Questions
from tad.evaluation.throughput import show_speeds
from tad.models import LM
from tad.trajectories.privileged import plain_ids


@pytest.fixture
def items(world: Path) -> list[Item]:
    return Questions(list_tasks([f"jsonl:{world / 'questions.jsonl'}"], limit=6)).items


def method(lm: LM, decoder: str, **settings: Any) -> TimedMethod:
    return TimedMethod(f"base, {decoder}", lm, get_decoder(decoder, "llada", block=8, **settings))


def test_counts_and_accuracy_are_of_the_decoded_rows(lm: LM, items: list[Item]) -> None:
    one, tad = measure_speeds([method(lm, "one-by-one"), method(lm, "tad")], items, 16)
    prompts = [plain_ids(lm, item.task, item.example, item.template) for item in items]
    rows = decode(lm, prompts, "tad", 16, block=8)
    assert tad.tokens == sum(len(row.content) for row in rows)
    assert tad.tokens_all == 6 * 16
    assert tad.forwards == tad.calls == sum(row.forwards for row in rows)
    assert tad.tokens_per_second == tad.tokens / tad.seconds
    assert tad.spread[0] <= tad.spread[1]
    assert (one.accuracy, one.rows) == (50.0, 6)  # every other question is answered right one token at a time
    assert next(measure_speeds([method(lm, "tad")], items, 16, grade=False)).accuracy is None


def test_methods_of_the_same_name_are_counted_apart(lm: LM, items: list[Item]) -> None:
    both = [TimedMethod("speed, tad", lm, method(lm, name).decoder) for name in ("one-by-one", "tad")]
    alone = [next(measure_speeds([one], items, 16)) for one in both]
    together = list(measure_speeds(both, items, 16))
    assert [(one.rows, one.forwards) for one in together] == [(6, one.forwards) for one in alone]


def test_methods_take_turns_and_warm_up_and_broken_batches_are_left_out(
    lm: LM, items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, int]] = []

    def counted(lm: LM, batch: list[list[int]], decoder: Any, *rest: Any) -> Any:
        turns.append((decoder.name, len(batch)))
        return decode(lm, batch, decoder, *rest)

    monkeypatch.setattr(module, "decode", counted)
    both = [method(lm, "tad"), method(lm, "fast-dllm")]
    speeds = list(measure_speeds(both, items, 16, [4, 3], warmup=1))
    pair = [("tad", 4), ("fast-dllm", 4)]
    assert turns[:4] == pair * 2
    assert turns[4:] == [(name, 3) for name, _ in pair] * 3
    assert [(one.method, one.batch, one.rows) for one in speeds] == [
        ("base, tad", 4, 4), ("base, fast-dllm", 4, 4), ("base, tad", 3, 6), ("base, fast-dllm", 3, 6),
    ]  # fmt: skip
    assert speeds[2].calls < speeds[2].forwards  # a batch shares its calls


def test_a_batch_larger_than_the_prompts_is_refused(lm: LM, items: list[Item]) -> None:
    with pytest.raises(TadError, match="batch size 7 with 6 prompts"):
        list(measure_speeds([method(lm, "tad")], items, 16, [7]))


def test_ratios_are_to_the_base_and_to_the_first_at_the_same_batch_size() -> None:
    def speed(name: str, batch: int, seconds: float) -> Speed:
        return Speed(name, batch, 4, seconds, 2, 100, 128, 50, 50, (1.0, 2.0), None)

    made = [
        speed(name, batch, seconds * batch)
        for batch in (1, 2)
        for name, seconds in (("a", 2), ("base", 8), ("c", 1))
    ]
    lines = [line.split() for line in show_speeds(made, "base").splitlines()[2:]]
    assert [(line[0], line[9], line[10]) for line in lines] == [
        ("a", "4.00", "1.00"),
        ("base", "1.00", "0.25"),
        ("c", "8.00", "2.00"),
    ] * 2
    assert {line[3] for line in lines} == {"50.0"}
    assert show_speeds(made).splitlines()[2].split()[9] == "-"
