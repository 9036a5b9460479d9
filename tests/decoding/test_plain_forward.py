"""Decoding by the plain forward: counting, callbacks, reads of the host, guidance, end of a row, bad input."""

from __future__ import annotations

import pytest
import torch
from parity_models import tiny, tiny_prompts

from tad.decoding import Decoded, Request, Scheduler, Step, decode, get_decoder
from tad.errors import TadError
from tad.models import LM

EOS, EOT = 9, 8


def finished(tokens: list[int], forwards: int) -> Decoded:
    return Decoded(tokens, [1] * len(tokens), [1.0] * len(tokens), forwards, 0.0, ends=(EOS, EOT))


def test_content_counts_up_to_the_first_end_token_and_all_counts_every_position() -> None:
    row = finished([1, 2, 3, EOT, EOS, EOS, 4, EOS], forwards=2)
    assert row.content == [1, 2, 3, EOT]
    assert row.answer == [1, 2, 3]
    assert row.tpf == 2.0
    assert row.tpf_all == 4.0
    endless = finished([1, 2, 3, 4], forwards=4)
    assert endless.content == endless.answer == [1, 2, 3, 4]
    assert endless.tpf == endless.tpf_all == 1.0


def test_one_by_one_reveals_one_token_per_forward(lm: LM, prompts: list[list[int]]) -> None:
    assert decode(lm, []) == []
    for row in decode(lm, prompts, decoder="one-by-one", gen_length=32, stop="off"):
        assert row.forwards == 32
        assert sorted(row.steps) == list(range(1, 33))


def test_callback_replays_to_the_result(lm: LM, prompts: list[list[int]]) -> None:
    steps: list[Step] = []
    results = decode(lm, prompts, decoder="tad", gen_length=64, batch_size=3, on_step=steps.append)
    for row, result in enumerate(results):
        canvas = [lm.tokens.eos] * 64
        for step in (step for step in steps if step.row == row):
            for position, token, confidence in zip(step.positions, step.tokens, step.confidence, strict=True):
                canvas[position] = token
                assert result.steps[position] == step.forward
                assert result.confidence[position] == confidence
        assert canvas == result.tokens


@pytest.mark.parametrize("name", ["tad", "tad-cached", "fast-dllm-dual", "llada", "d2f", "one-by-one"])
def test_host_reads_one_tensor_per_forward(
    lm: LM, prompts, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of equal length that never end early, so that none leaves before the last forward.
    decoder = get_decoder(name, lm.family.name, stop="off", block=16).bind(lm, 32)
    scheduler = Scheduler(lm, "plain")
    scheduler.admit([Request(name, prompts[0], 32, decoder) for name in range(2)])
    reads = []
    for read in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        original = getattr(torch.Tensor, read)
        monkeypatch.setattr(
            torch.Tensor, read, lambda self, *a, _f=original, _n=read: reads.append(_n) or _f(self, *a)
        )
    for _ in range(2):
        before = len(reads)
        scheduler.step()
        assert len(reads) - before <= 1


def test_head_runs_at_candidates_only(lm: LM, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    head = lm.model.head
    monkeypatch.setattr(lm.model, "head", lambda hidden: asked.append(hidden.shape[0]) or head(hidden))
    decode(lm, prompts[:1], decoder="one-by-one", gen_length=64, block=16, stop="off")
    assert asked == [16 - step % 16 for step in range(64)]


def test_eager_stop_fills_behind_the_first_end_token_at_once(lm: LM, prompts) -> None:
    for eager in decode(lm, prompts, decoder="tad", gen_length=64, stop="eager"):
        end = len(eager.content)
        assert set(eager.tokens[end:]) <= {lm.tokens.eos}
        assert not any(eager.steps[end:])


def test_mask_token_is_never_sampled(lm: LM, prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    head = lm.model.head

    def prefers_mask(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).clone()
        logits[..., lm.tokens.mask] = 50.0
        return logits

    monkeypatch.setattr(lm.model, "head", prefers_mask)
    for row in decode(lm, prompts[:2], decoder="fast-dllm", gen_length=32):
        assert lm.tokens.mask not in row.tokens


BAD = [
    ({"gen_length": 100}, "not a multiple of the block length 32"),
    ({"gen_length": 0}, "gen_length must be positive"),
    ({"decoder": "tadd"}, "unknown decoder 'tadd'; did you mean 'tad'?"),
    ({"treshold": 0.4}, "no parameter 'treshold'; did you mean 'threshold'?"),
    ({"factor": 1.0}, "no parameter 'factor'"),
    ({"cache": "dual"}, "needs schedule 'sequential'"),
    ({"cache": "l2"}, "unknown cache 'l2'"),
    ({"decoder": "d2f", "cache": "delayed"}, "needs bidirectional attention"),
    ({"cache": "block-causal"}, "needs block-causal attention"),
    ({"decoder": "llada", "steps": 1000}, "at most gen_length"),
    ({"decoder": "llada", "steps": 3}, "multiple of the 2 blocks"),
    ({"decoder": "tad-cached", "cfg": 1.0}, "cfg needs cache 'none'"),
    ({"threshold": -1}, "threshold must be at least 0"),
    ({"threshold": float("nan")}, "threshold must be at least 0"),
    ({"threshold": "high"}, "threshold must be a number"),
    ({"decoded": 1.5}, "decoded must be between 0 and 1"),
    ({"block": 0}, "block must be at least 1"),
    ({"block": 16.0}, "block must be a whole number"),
    ({"temperature": -0.5}, "temperature must be at least 0"),
    ({"stop": "never"}, "stop is one of"),
    ({"threshold": None}, "threshold must be a number"),
    ({"strict": "maybe"}, "strict is true or false"),
    ({"schedule": 5}, "unknown schedule '5'"),
    ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[str(call) for call, _ in BAD])
def test_bad_parameter_is_an_error_that_names_it(call: dict, message: str) -> None:
    with pytest.raises(TadError) as error:
        decode(tiny("llada"), [[1, 2, 3]], **{"gen_length": 64, **call})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty"),
        (list(range(1, 300)) * 2, "over the context of 512"),
        ([1, 310, 2], "contains the mask token 310 at position 1"),
        ([1, 5000], "token 5000, outside the vocabulary of 320"),
    ],
)
def test_bad_prompt_is_an_error_that_names_it(prompt: list[int], message: str) -> None:
    with pytest.raises(TadError, match="prompt 1") as error:
        decode(tiny("llada"), [tiny_prompts("llada")[0], prompt], gen_length=64)
    assert message in str(error.value)


@pytest.mark.parametrize("decoder", ["tad", "fast-dllm-dual", "d2f"])
def test_outputs_that_are_not_numbers_end_the_decoding(
    lm: LM, prompts: list[list[int]], decoder: str
) -> None:
    weight = next(iter(lm.model.layers())).part(lm.model.names.query).weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    try:
        with pytest.raises(TadError, match="not numbers"):
            decode(lm, prompts, decoder=decoder, gen_length=32)
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_a_seed_that_does_not_fit_is_refused(lm: LM, prompts: list[list[int]]) -> None:
    with pytest.raises(TadError, match="seed 9223372036854775808"):
        decode(lm, prompts, gen_length=32, seed=2**63)
    assert decode(lm, prompts[:1], gen_length=32, seed=-(2**63), temperature=1.0)
