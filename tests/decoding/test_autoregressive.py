"""Autoregressive decoding: equal to `transformers.generate`, in batches, with both forwards; and who may decode what."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_autoregressive import END, KINDS, VOCAB, hf_model, write_autoregressive

import tad
from tad.decoding import GraphEngine, decode, decoders_for
from tad.errors import TadError
from tad.models import LM

PROMPTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=4)


@cache
def model(kind: str, seed: int, block_size: int | None = None) -> LM:
    with TemporaryDirectory() as folder:
        return tad.load(
            write_autoregressive(Path(folder), kind, seed, block_size, tokenizer=False), dtype="fp32"
        )


reference = cache(hf_model)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(KINDS)), st.integers(0, 3), PROMPTS, st.integers(1, 24), st.integers(1, 4))
def test_greedy_tokens_are_those_of_transformers(
    kind: str, seed: int, prompts: list[list[int]], length: int, batch_size: int
) -> None:
    rows = decode(model(kind, seed), prompts, "autoregressive", length, batch_size=batch_size)
    for prompt, row in zip(prompts, rows, strict=True):
        ids = torch.tensor([prompt])
        wanted = (
            reference(kind, seed)
            .generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                do_sample=False,
                pad_token_id=END,
            )[0, len(prompt) :]
            .tolist()
        )
        assert row.content == wanted
        assert row.forwards == len(wanted)
        assert row.tpf == 1


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["llama3", "qwen3"]), PROMPTS, st.integers(1, 20), st.sampled_from([0.0, 0.8]))
def test_packed_steps_give_the_same_tokens(
    kind: str, prompts: list[list[int]], length: int, temperature: float
) -> None:
    lm = model(kind, 1)
    engine = GraphEngine(lm.model)
    asked = {"gen_length": length, "temperature": temperature, "top_p": 0.9, "seed": 5}
    plain = decode(lm, prompts, "autoregressive", engine="plain", **asked)
    packed = decode(lm, prompts, "autoregressive", engine=engine, **asked)
    assert [row.tokens for row in plain] == [row.tokens for row in packed]


def test_sampling_depends_on_the_seed_and_not_on_the_company() -> None:
    lm, prompts = model("qwen2", 2), [[1, 2, 3], [7], list(range(30))]
    together = decode(lm, prompts, "autoregressive", 16, seed=[4, 5, 6], temperature=1.0)
    alone = [
        decode(lm, [prompt], "autoregressive", 16, seed=seed, temperature=1.0)[0]
        for prompt, seed in zip(prompts, (4, 5, 6), strict=True)
    ]
    assert [row.tokens for row in together] == [row.tokens for row in alone]
    other = decode(lm, prompts, "autoregressive", 16, seed=7, temperature=1.0)
    assert [row.tokens for row in other] != [row.tokens for row in together]


def test_prompts_that_begin_alike_share_their_keys_and_change_nothing() -> None:
    lm, start = model("qwen2", 1), list(range(90))
    prompts = [[*start, 3], [*start, 200, 5], [*start[:80], 9]]
    one_slot = decode(lm, prompts, "autoregressive", 12, batch_size=1)
    assert [row.tokens for row in one_slot] == [
        decode(lm, [prompt], "autoregressive", 12)[0].tokens for prompt in prompts
    ]


@pytest.mark.parametrize("decoder", ["sdar", "fast-dllm-v2", "one-by-one", "tad", "verified"])
def test_masks_of_an_unconverted_model_are_refused_and_convert_is_named(decoder: str) -> None:
    with pytest.raises(TadError, match="tad convert"):
        decode(model("qwen2", 0), [[1, 2]], decoder, 32)


def test_decoders_of_each_kind_of_model_are_listed() -> None:
    assert decoders_for(model("qwen2", 0).model.shape.blocks) == ["autoregressive"]
    converted = decoders_for(model("qwen2", 0, 8).model.shape.blocks)
    assert {"autoregressive", "verified", "sdar", "fast-dllm-v2", "one-by-one"} <= set(converted)
    assert "autoregressive" not in decoders_for(None)


@pytest.mark.parametrize("engine", ["plain", "graph"])
@pytest.mark.parametrize("decoder", ["sdar", "fast-dllm-v2", "llada2", "one-by-one"])
def test_a_converted_model_decodes_by_blocks_as_without_a_cache(decoder: str, engine: str) -> None:
    """Every token is what a forward of the canvas as it was then predicts, with a token-causal context."""
    lm = model("llama3", 1, 8)
    prompt, length = list(range(40, 53)), 24
    seen: list[tuple[list[int], list[int]]] = []
    row = decode(
        lm,
        [prompt, [5, 6]],
        decoder,
        length,
        engine=engine,  # type: ignore[arg-type]
        stop="off",
        on_step=lambda step: seen.append((step.positions, step.tokens)) if step.row == 0 else None,
    )[0]
    canvas = [*prompt, *[lm.tokens.mask] * (length + 8)]
    start = len(prompt)
    for positions, tokens in seen:
        if not positions:
            continue
        first = start + positions[0]
        block = first // 8
        opened = max(start, block * 8), block * 8 + 8
        if all(token != lm.tokens.mask for token in canvas[start : opened[0]]) or opened[0] == start:
            ids = torch.tensor([canvas[: opened[1]]])
            mask = lm.model.attention_mask(torch.arange(opened[1]), opened=torch.tensor([opened]))
            with torch.no_grad():
                logits = lm.model(ids, mask=mask).logits[0]
            logits[:, lm.tokens.mask] = float("-inf")
            for place, token in zip(positions, tokens, strict=True):
                if place < length:
                    assert int(logits[start + place - 1].argmax()) == token
        for place, token in zip(positions, tokens, strict=True):
            canvas[start + place] = token
    assert row.tokens == canvas[start : start + length]
    assert max(row.tokens) < VOCAB
