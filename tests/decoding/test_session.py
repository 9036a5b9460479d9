"""Rows that join and leave a running session: each gives what it gives alone, whoever else is there."""

from __future__ import annotations

import random

import pytest
import torch

from tad.decoding import DECODERS, Decoded, decode, get_decoder
from tad.decoding.loop import Session, mixes_lengths
from tad.models import LM

BLOCK = 8


def outcome(row: Decoded) -> tuple[list[int], list[int], int]:
    return row.tokens, row.steps, row.forwards


def run_with_traffic(
    session: Session, arrivals: list[tuple[int, list[int], int]], dice: random.Random
) -> dict[int, Decoded]:
    """Let rows (name, prompt, length) in at random moments, in order, and step until all are done."""
    done: dict[int, Decoded] = {}
    waiting = list(arrivals)
    while waiting or len(session):
        while waiting and (not len(session) or dice.random() < 0.3):
            name, prompt, length = waiting.pop(0)
            session.join([prompt], length, seeds=[11 * name], names=[name])
        done |= session.step()
    return done


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_row_that_joins_late_decodes_as_alone(
    lm: LM, prompts: list[list[int]], name: str, sampling: dict
) -> None:
    overrides = sampling if name == "dream" else {"block": BLOCK, **sampling}
    shift = lm.family.logit_shift
    decoder = get_decoder(name, lm.family.name, **overrides)
    lengths = (BLOCK, 2 * BLOCK, 4 * BLOCK) if mixes_lengths(decoder) else (2 * BLOCK,)
    dice = random.Random(f"{name}{sampling}")
    arrivals = [(row, prompt, dice.choice(lengths)) for row, prompt in enumerate(prompts)]
    session = Session(lm.model, decoder.prepared(lengths[0], shift), lm.tokens, shift)
    done = run_with_traffic(session, arrivals, dice)
    for row, prompt, length in arrivals:
        alone = decode(lm, [prompt], name, length, seed=11 * row, **overrides)[0]
        assert outcome(done[row]) == outcome(alone)


@pytest.mark.parametrize("name", ["tad", "tad-cached", "fast-dllm-dual", "d2f"])
def test_a_row_that_leaves_early_changes_nothing_for_the_others(
    lm: LM, prompts: list[list[int]], name: str
) -> None:
    decoder = get_decoder(name, lm.family.name, block=BLOCK).prepared(32, lm.family.logit_shift)
    session = Session(lm.model, decoder, lm.tokens, lm.family.logit_shift)
    session.join(prompts, 32, seeds=[0] * len(prompts), names=range(len(prompts)))
    done = session.step()
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
    session.leave([longest, 0])
    session.join([prompts[0]], 32, seeds=[0], names=[99])  # the canvas is laid out anew, narrower
    while len(session):
        done |= session.step()
    assert longest not in done
    for row, result in done.items():
        alone = decode(lm, [prompts[0 if row == 99 else row]], name, 32, block=BLOCK)[0]
        assert outcome(result) == outcome(alone)


def test_an_empty_session_starts_again(lm: LM, prompts: list[list[int]]) -> None:
    decoder = get_decoder("tad-cached", lm.family.name, block=BLOCK).prepared(16, lm.family.logit_shift)
    session = Session(lm.model, decoder, lm.tokens, lm.family.logit_shift)
    session.join([prompts[1]], 16, seeds=[0], names=[1])
    session.step()
    session.leave([1])
    assert len(session) == 0
    session.join([prompts[2]], 32, seeds=[0], names=[2])
    done: dict[int, Decoded] = {}
    while len(session):
        done |= session.step()
    assert outcome(done[2]) == outcome(decode(lm, [prompts[2]], "tad-cached", 32, block=BLOCK)[0])


def test_a_decoder_that_depends_on_the_length_takes_one_length(lm: LM, prompts: list[list[int]]) -> None:
    decoder = get_decoder("llada", lm.family.name, block=BLOCK).prepared(16, lm.family.logit_shift)
    session = Session(lm.model, decoder, lm.tokens, lm.family.logit_shift)
    session.join([prompts[0]], 16, seeds=[0], names=[0])
    with pytest.raises(ValueError, match="one length, not 32"):
        session.join([prompts[0]], 32, seeds=[0], names=[1])


def test_columns_nobody_needs_are_given_back(lm: LM, prompts: list[list[int]]) -> None:
    decoder = get_decoder("tad-cached", lm.family.name, block=BLOCK).prepared(32, lm.family.logit_shift)
    session = Session(lm.model, decoder, lm.tokens, lm.family.logit_shift)
    short, long = min(prompts, key=len), max(prompts, key=len)
    session.join([short, long], 32, seeds=[0, 0], names=[0, 1])
    session.step()
    session.leave([1])
    session.join([short], 32, seeds=[0], names=[2])
    assert session.rows.canvas.shape == (2, len(short) + 32)
    assert session.cache is not None
    assert session.cache.length == len(short) + 32
    assert torch.equal(session.rows.pad.cpu(), torch.zeros(2, dtype=torch.int64))
