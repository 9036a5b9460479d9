"""What holds for every decoder, checked over random parameters."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity_models import tiny, tiny_prompts

from tad.decoding import DECODERS, decode, decoders_for
from tad.decoding.unmasking import TopKPerStep

LENGTH = 32
# The fast tier draws few examples, always the same; `make test-all` draws many.
EXAMPLES = int(os.environ.get("TAD_EXAMPLES", "8"))
quick = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A named decoder with drawn parameters."""
    name = draw(st.sampled_from(decoders_for(None)))
    call: dict[str, Any] = {"decoder": name, "gen_length": LENGTH}
    decoder = DECODERS[name]
    if name != "dream":
        call["block"] = draw(st.sampled_from([4, 8, 16, 32]))
    if isinstance(decoder.rule, TopKPerStep):
        blocks = LENGTH // call.get("block", LENGTH)
        call["steps"] = blocks * draw(st.integers(1, LENGTH // blocks))
    if hasattr(decoder.rule, "threshold"):
        call["threshold"] = draw(st.floats(0, 1.2))
    if hasattr(decoder.schedule, "decoded"):
        call["decoded"], call["block_add"] = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    if hasattr(decoder.cache, "delay"):
        call["delay"], call["refresh"] = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    call["temperature"] = draw(st.sampled_from([0.0, 0.0, 1.5]))
    call["stop"] = draw(st.sampled_from(["end", "off", "eager"]))
    return call


@quick
@given(call=calls(), family=st.sampled_from(["llada", "dream"]), seed=st.integers(0, 2**31))
def test_decoding_ends_with_no_mask_left_and_each_position_revealed_once(
    call: dict, family: str, seed: int
) -> None:
    lm, prompts = tiny(family), tiny_prompts(family)[:3]
    revealed: dict[tuple[int, int], int] = {}

    def watch(step: Any) -> None:
        for position in step.positions:
            assert (step.row, position) not in revealed
            revealed[step.row, position] = step.forward

    for row, result in enumerate(decode(lm, prompts, seed=seed, on_step=watch, **call)):
        assert lm.tokens.mask not in result.tokens
        assert len(result.tokens) == LENGTH
        assert result.forwards <= LENGTH
        for position, step in enumerate(result.steps):
            assert step in (0, revealed.get((row, position)))
            filled = step == 0
            assert filled == (result.confidence[position] == 0)
            assert not filled or result.tokens[position] == lm.tokens.eos
        if call["stop"] == "off" and call["decoder"] != "d2f":
            assert all(result.steps)


@quick
@given(
    block=st.sampled_from([8, 16, 32]),
    threshold=st.floats(0, 1),
    family=st.sampled_from(["llada", "dream"]),
    name=st.sampled_from(["tad", "d3llm"]),
)
def test_multi_block_with_both_thresholds_one_is_sequential(
    block: int, threshold: float, family: str, name: str
) -> None:
    lm, prompts = tiny(family), tiny_prompts(family)[:4]
    call = {"decoder": name, "gen_length": LENGTH, "threshold": threshold, "block": block}
    multi = decode(lm, prompts, **call, block_add=1.0, decoded=1.0)
    single = decode(lm, prompts, **call, schedule="sequential")
    assert [(row.tokens, row.steps, row.forwards) for row in multi] == [
        (row.tokens, row.steps, row.forwards) for row in single
    ]


@quick
@given(
    name=st.sampled_from(["tad-leftmost", "dparallel", "fast-dllm", "tad-cached"]),
    block=st.sampled_from([8, 16, 32]),
    threshold=st.floats(0, 1),
    family=st.sampled_from(["llada", "dream"]),
)
def test_keeping_the_leftmost_unmasks_the_first_mask_at_every_forward(
    name: str, block: int, threshold: float, family: str
) -> None:
    call = {"gen_length": LENGTH, "threshold": threshold, "block": block, "keep": "leftmost", "stop": "off"}
    for row in decode(tiny(family), tiny_prompts(family)[:4], name, **call):
        for forward in range(1, row.forwards + 1):
            assert next(step for step in row.steps if step >= forward) == forward


@quick
@given(
    family=st.sampled_from(["llada", "dream"]),
    name=st.sampled_from(["tad", "d3llm"]),
    block=st.sampled_from([8, 16]),
    threshold=st.floats(0.05, 0.9),
    cache=st.sampled_from(
        [{"delay": 10_000, "refresh": 10_000}, {"delay": 2, "refresh": 1}, {"delay": 0, "refresh": 1}]
    ),
)
def test_delayed_cache_that_never_freezes_or_always_refreshes_is_exact(
    family: str, name: str, block: int, threshold: float, cache: dict
) -> None:
    lm, prompts = tiny(family), tiny_prompts(family)[:4]
    call = {"gen_length": LENGTH * 2, "threshold": threshold, "block": block}
    exact = decode(lm, prompts, decoder=name, **call)
    cached = decode(lm, prompts, decoder=f"{name}-cached", cache="delayed", **call, **cache)
    assert [(row.tokens, row.forwards) for row in cached] == [(row.tokens, row.forwards) for row in exact]


@quick
@given(
    family=st.sampled_from(["llada", "dream"]),
    block=st.sampled_from([8, 16, 32]),
    threshold=st.floats(0.3, 1),
    add=st.floats(0, 1) | st.just(1.0),
    rule=st.sampled_from(["confidence", "entropy", "contiguous-prefix"]),
)
def test_block_causal_cache_is_exact(
    family: str, block: int, threshold: float, add: float, rule: str
) -> None:
    """Pipelined blocks and, where the next one waits for the last, sequential ones."""
    lm, prompts = tiny(family), tiny_prompts(family)[:4]
    call = {
        "decoder": "d2f",
        "gen_length": LENGTH * 2,
        "threshold": threshold,
        "block": block,
        "block_add": add,
        "rule": rule,
    }
    cached = decode(lm, prompts, **call)
    exact = decode(lm, prompts, **call, cache="none")
    assert [(row.tokens, row.forwards) for row in cached] == [(row.tokens, row.forwards) for row in exact]


@pytest.mark.parametrize("name", [name for name in decoders_for(None) if name != "d2f"])
def test_stopping_at_the_end_leaves_the_text_as_it_is_and_counts_only_real_forwards(
    lm, prompts, name: str
) -> None:
    full = decode(lm, prompts, decoder=name, gen_length=96, stop="off")
    short = decode(lm, prompts, decoder=name, gen_length=96, stop="end")
    saved = 0
    for complete, stopped in zip(full, short, strict=True):
        end = len(stopped.content)
        assert stopped.content == complete.content
        assert stopped.steps[:end] == complete.steps[:end]
        assert stopped.forwards <= complete.forwards
        assert stopped.forwards == max(stopped.steps)
        saved += complete.forwards - stopped.forwards
    assert saved > 0 or name == "dream"  # the whole canvas at once: its end may be the last thing revealed


def test_forward_is_called_as_often_as_is_counted(lm, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = lm.model.forward
    monkeypatch.setattr(lm.model, "forward", lambda *args, **rest: calls.append(1) or forward(*args, **rest))
    for name in decoders_for(None):
        calls.clear()
        results = decode(lm, prompts[:2], decoder=name, gen_length=64)
        assert len(calls) == max(result.forwards for result in results), name
