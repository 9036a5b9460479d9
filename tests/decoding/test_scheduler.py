"""Rows of a batch, all at once, or joining and leaving as it runs: each gives what it gives alone, whoever else is there."""

from __future__ import annotations

import random
import sys

import pytest

from tad.decoding import (
    Decoded,
    Decoder,
    EngineChoice,
    Request,
    Scheduler,
    decode,
    decoders_for,
    get_decoder,
)
from tad.decoding.scheduler import mixes_lengths
from tad.models import LM

BLOCK = 8


def outcome(row: Decoded) -> tuple[list[int], list[int], int]:
    return row.tokens, row.steps, row.forwards


def prepared(lm: LM, name: str, length: int, **settings: object) -> Decoder:
    return get_decoder(name, lm.family.name, **settings).bind(lm, length)


def finish(scheduler: Scheduler) -> dict[int, Decoded]:
    done: dict[int, Decoded] = {}
    while len(scheduler):
        done |= scheduler.step()
    return done


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", decoders_for(None))
def test_a_row_that_joins_late_decodes_as_alone(
    lm: LM, prompts: list[list[int]], name: str, sampling: dict
) -> None:
    overrides = sampling if name == "dream" else {"block": BLOCK, **sampling}
    mixed = mixes_lengths(get_decoder(name, lm.family.name, **overrides))
    lengths = (BLOCK, 2 * BLOCK, 4 * BLOCK) if mixed else (2 * BLOCK,)
    dice = random.Random(f"{name}{sampling}")
    waiting = []
    for row, prompt in enumerate(prompts[2:7]):
        length = dice.choice(lengths)
        waiting.append(Request(row, prompt, length, prepared(lm, name, length, **overrides), seed=11 * row))
    requests, scheduler, done = list(waiting), Scheduler(lm), {}
    while waiting or len(scheduler):
        while waiting and (not len(scheduler) or dice.random() < 0.3):
            scheduler.admit([waiting.pop(0)])
        done |= scheduler.step()
        assert len(scheduler.batches) <= 1  # all of them share forwards
    for request in requests:
        alone = decode(lm, [request.prompt], name, request.length, seed=request.seed, **overrides)[0]
        assert outcome(done[request.name]) == outcome(alone)


@pytest.mark.parametrize("name", decoders_for(None))
def test_a_decoder_is_bound_once_or_twice_alike(lm: LM, name: str) -> None:
    free = get_decoder(name, lm.family.name, **({} if name == "dream" else {"block": BLOCK}))
    bound = free.bind(lm, 32)
    assert bound.bind(lm, 32) == bound
    assert free.bind(lm).bind(lm, 32) == bound


@pytest.mark.parametrize("name", ["tad", "tad-cached", "fast-dllm-dual", "d2f"])
def test_a_row_that_leaves_early_changes_nothing_for_the_others(
    lm: LM, prompts: list[list[int]], name: str
) -> None:
    decoder, scheduler = prepared(lm, name, 32, block=BLOCK), Scheduler(lm)
    scheduler.admit([Request(row, prompt, 32, decoder) for row, prompt in enumerate(prompts)])
    done = scheduler.step()
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    scheduler.drop([longest, 0])
    assert longest not in scheduler
    scheduler.admit([Request(99, prompts[0], 32, decoder)])
    done |= finish(scheduler)
    assert longest not in done
    for row, result in done.items():
        alone = decode(lm, [prompts[0 if row == 99 else row]], name, 32, block=BLOCK)[0]
        assert outcome(result) == outcome(alone)


def test_an_empty_scheduler_starts_again(lm: LM, prompts: list[list[int]]) -> None:
    scheduler = Scheduler(lm)
    scheduler.admit([Request(1, prompts[1], 16, prepared(lm, "tad-cached", 16, block=BLOCK))])
    scheduler.step()
    scheduler.drop([1])
    assert (len(scheduler), len(scheduler.batches)) == (0, 0)
    assert scheduler.step() == {}
    scheduler.admit([Request(2, prompts[2], 32, prepared(lm, "tad-cached", 32, block=BLOCK))])
    alone = decode(lm, [prompts[2]], "tad-cached", 32, block=BLOCK)[0]
    assert outcome(finish(scheduler)[2]) == outcome(alone)


def test_rows_that_cannot_share_a_forward_take_turns(lm: LM, prompts: list[list[int]]) -> None:
    turns: list[int] = []
    scheduler = Scheduler(lm, on_step=lambda step: turns.append(step.row))
    kinds = [("one-by-one", 16), ("llada", 16), ("llada", 32)]  # the quota of "llada" depends on the length
    scheduler.admit(
        [
            Request(row, prompts[row], length, prepared(lm, name, length, block=BLOCK, stop="off"))
            for row, (name, length) in enumerate(kinds)
        ]
    )
    assert len(scheduler.batches) == 3
    done = finish(scheduler)
    assert turns[:9] == [0, 1, 2] * 3
    assert [done[row].forwards for row in range(3)] == [16, 16, 32]


@pytest.mark.parametrize("engine", ["plain", "graph"])
@pytest.mark.parametrize("name", ["tad-cached", "d2f", "llada"])
def test_rows_join_a_batch_of_longer_ones_up_to_twice_their_room(
    lm: LM, prompts: list[list[int]], name: str, engine: EngineChoice
) -> None:
    text = [token for prompt in prompts for token in prompt if token != lm.tokens.mask] * 20
    decoder, scheduler = prepared(lm, name, 16, block=BLOCK), Scheduler(lm, engine)
    requests = [Request(row, text[row:end], 16, decoder) for row, end in enumerate((40, 150, 30, 300, 50))]
    done: dict[int, Decoded] = {}
    for some, batches in ((requests[:2], 1), (requests[2:3], 1), (requests[3:4], 2), (requests[4:], 2)):
        scheduler.admit(some)  # the last two: there is room for 512, too much for a prompt of 46
        assert len(scheduler.batches) == batches
        done |= scheduler.step()
    done |= finish(scheduler)
    for request in requests:
        alone = decode(lm, [request.prompt], name, 16, block=BLOCK, engine="plain")[0]
        assert outcome(done[request.name]) == outcome(alone)


def test_letting_rows_in_costs_the_same_for_each_of_many(lm: LM, prompts: list[list[int]]) -> None:
    decoder = prepared(lm, "tad", 16, block=BLOCK)

    def count_calls(rows: int) -> int:
        calls, scheduler = 0, Scheduler(lm)

        def counting(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        requests = [Request(row, prompts[row % len(prompts)], 16, decoder) for row in range(rows)]
        sys.setprofile(counting)
        try:
            scheduler.admit(requests)
        finally:
            sys.setprofile(None)
        scheduler.close()
        return calls

    assert count_calls(400) < 12 * count_calls(40)


def test_a_batch_that_fails_takes_only_its_own_rows_with_it(
    lm: LM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(lm)
    for row, name in enumerate(("tad", "llada")):
        scheduler.admit([Request(row, prompts[row], 16, prepared(lm, name, 16, block=BLOCK))])
    forward = lm.model.forward

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lm.model, "forward", failing)
    with pytest.raises(RuntimeError, match="memory"):
        scheduler.step()
    monkeypatch.setattr(lm.model, "forward", forward)
    assert (0 in scheduler, 1 in scheduler) == (False, True)
    assert outcome(finish(scheduler)[1]) == outcome(decode(lm, [prompts[1]], "llada", 16, block=BLOCK)[0])


def test_a_forward_costs_what_its_rows_need(
    lm: LM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    forward = lm.model.forward
    monkeypatch.setattr(
        lm.model, "forward", lambda ids, **rest: sizes.append(tuple(ids.shape)) or forward(ids, **rest)
    )
    short, long = min(prompts, key=len), max(prompts, key=len)
    decoder, scheduler = prepared(lm, "tad", 16, block=BLOCK, stop="off"), Scheduler(lm)
    scheduler.admit([Request(0, short, 16, decoder), Request(1, long, 16, decoder)])
    scheduler.step()
    scheduler.drop([1])
    scheduler.step()
    assert sizes == [(2, len(long) + 16), (1, len(short) + 16)]


def test_batch_size_changes_nothing_but_the_batches(lm: LM, prompts: list[list[int]]) -> None:
    whole, parts = decode(lm, prompts, gen_length=64), decode(lm, prompts, gen_length=64, batch_size=3)
    assert [outcome(row) for row in parts] == [outcome(row) for row in whole]


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
