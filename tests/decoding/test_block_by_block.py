"""Decoding block by block: exact caches, batches, strategies of the house, ends, lengths, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from golden_lm import golden_lm as lm
from golden_lm import golden_meta as meta
from tad.conversation import Conversation
from tad.decoding import Decoded, Step, decode, decoders_for, get_decoder
from tad.errors import TadError
from tad.models import LM, SpecialTokens

DECODER = {"fastdllm_v2": "fast-dllm-v2", "sdar": "sdar", "llada2": "llada2"}
every_family = pytest.mark.parametrize("folder", DECODER)


def run(folder: str, length: int = 64, decoder: str | None = None, **settings: Any) -> list[Decoded]:
    prompts = meta(folder)["prompts"]
    return decode(lm(folder), prompts, decoder or DECODER[folder], length, **settings)


def same(left: list[Decoded], right: list[Decoded]) -> bool:
    return all(
        (a.tokens, a.steps, a.forwards) == (b.tokens, b.steps, b.forwards)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("decoder", ["fast-dllm-v2", "sdar", "llada2", "llada2.1"])
@every_family
def test_the_cache_of_finished_blocks_is_exact(folder: str, decoder: str) -> None:
    """Any of the decoders on any of the models; a prompt of each length modulo the block."""
    block = {"block": 8} if folder == "sdar" else {}
    cached = run(folder, decoder=decoder, stop="off", **block)
    assert same(cached, run(folder, decoder=decoder, stop="off", cache="none", **block))


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("fastdllm_v2", {}),
        ("fastdllm_v2", {"cache": "sub-block", "threshold": 0.7}),
        ("sdar", {}),
        ("sdar", {"rule": "entropy-bound"}),
        ("llada2", {}),
        ("llada2", {"decoder": "llada2.1", "threshold": 0.5, "edit_threshold": 0.3}),
    ],
)
def test_a_row_is_the_same_alone_and_in_a_batch(folder: str, settings: dict[str, Any]) -> None:
    call = {"decoder": DECODER[folder], "gen_length": 64, **settings}
    prompts = meta(folder)["prompts"]
    together = decode(lm(folder), prompts, **call)
    assert same(together, [decode(lm(folder), [prompt], **call)[0] for prompt in prompts])
    assert same(together, decode(lm(folder), prompts, batch_size=2, **call))


@pytest.mark.parametrize(
    "rule",
    [
        {"rule": "best"},
        {"rule": "confidence", "threshold": 0.8},
        {"rule": "entropy", "threshold": 0.4},
        {"rule": "factor", "factor": 0.7},
        {"rule": "hierarchy"},
        {"rule": "entropy-bound", "bound": 0.5},
        {"rule": "contiguous-prefix"},
        {"rule": "credit"},
    ],
    ids=lambda rule: rule["rule"],
)
@every_family
def test_every_strategy_of_the_house_decodes_these_models(folder: str, rule: dict[str, Any]) -> None:
    for row in run(folder, 48, stop="off", **rule):
        assert lm(folder).tokens.mask not in row.tokens
        assert min(row.steps) >= 1


def test_a_storing_forward_costs_one_per_block() -> None:
    """One token per forward: four reveals and one store for every block of four, and one forward for the prompt."""
    prompt = meta("sdar")["prompts"][1]
    assert len(prompt) == 8
    steps: list[Step] = []
    (row,) = decode(lm("sdar"), [prompt], "sdar", 16, threshold=None, stop="off", on_step=steps.append)
    assert row.forwards == 1 + 4 * 5
    assert [step.queries for step in steps] == [8] + [4] * 20
    assert [len(step.positions) for step in steps] == [0] + [1, 1, 1, 1, 0] * 4


def test_blocks_without_a_storing_forward_are_stored_with_the_next() -> None:
    prompt = meta("sdar")["prompts"][1]
    steps: list[Step] = []
    (row,) = decode(
        lm("sdar"), [prompt], "sdar", 16, threshold=None, stop="off", store=False, on_step=steps.append
    )
    assert row.forwards == 16
    assert [step.queries for step in steps] == [12, 4, 4, 4] + [8, 4, 4, 4] * 3
    stored = decode(lm("sdar"), [prompt], "sdar", 16, threshold=None, stop="off")
    assert row.tokens == stored[0].tokens


@every_family
def test_an_end_token_ends_the_text_and_not_its_content(folder: str) -> None:
    whole = run(folder, stop="off")
    for stop in ("end", "block"):
        stopped = run(folder, stop=stop)
        assert [row.content for row in stopped] == [row.content for row in whole]
        assert all(a.forwards <= b.forwards for a, b in zip(stopped, whole, strict=True))
    assert any(row.content[-1] in lm(folder).tokens.ends for row in whole)
    assert sum(row.forwards for row in run(folder, stop="end")) <= sum(row.forwards for row in stopped)


@every_family
def test_the_last_block_is_whole_whatever_the_length(folder: str) -> None:
    """A shorter answer is the beginning of a longer one: nothing but the cut depends on gen_length."""
    block = int(lm(folder).model.shape.blocks.size)
    longer = run(folder, 2 * block, stop="off")
    for length in (1, block - 1, block + 3):
        shorter = run(folder, length, stop="off")
        assert [row.tokens for row in shorter] == [row.tokens[:length] for row in longer]


def test_edits_change_tokens_of_the_current_block_only() -> None:
    prompt, block = meta("llada2")["prompts"][2], 16
    steps: list[Step] = []
    settings = {"threshold": 0.5, "edit_threshold": 0.3, "block": block}
    (row,) = decode(lm("llada2"), [prompt], "llada2.1", 48, stop="off", on_step=steps.append, **settings)
    canvas: dict[int, int] = {}
    edits, last = 0, 0
    for step in steps:
        blocks = {(len(prompt) + place) // block for place in step.positions}
        assert len(blocks) <= 1
        assert all(number >= last for number in blocks)
        last = max(blocks, default=last)
        edits += sum(place in canvas for place in step.positions)
        assert all(canvas.get(p) != token for p, token in zip(step.positions, step.tokens, strict=True))
        canvas |= dict(zip(step.positions, step.tokens, strict=True))
    assert edits
    assert [canvas[place] for place in range(48)] == row.tokens


def test_a_block_is_left_after_its_post_steps() -> None:
    prompt, settings = meta("llada2")["prompts"][2], {"threshold": 0.5, "edit_threshold": 0.0, "block": 16}
    counts = [
        decode(lm("llada2"), [prompt], "llada2.1", 32, stop="off", post_steps=n, **settings)[0].forwards
        for n in (0, 1, 16)
    ]
    assert counts[0] < counts[1] <= counts[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sub_block": 3}, "sub_block"),
        ({"block": 0}, "block"),
        ({"steps": 0}, "steps"),
        ({"post_steps": 4}, "post_steps"),
        ({"rule": "editing"}, "editing"),
        ({"cache": "dual"}, "dual"),
        ({"cache": "block-causal"}, "block-causal"),
        ({"rule": "quota"}, "quota"),
        ({"store": "yes"}, "store"),
        ({"leftmost": 1}, "leftmost"),
        ({"threshold": -1}, "threshold"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TadError, match=words) as caught:
        run("sdar", 16, **settings)
    assert "\n" not in str(caught.value)


def test_these_decoders_are_for_these_models(tiny_llada: LM) -> None:
    for name in ("fast-dllm-v2", "sdar", "llada2", "llada2.1"):
        with pytest.raises(TadError, match=name.replace(".", r"\.")):
            decode(tiny_llada, [[1, 2, 3]], name, 32)
        assert name not in decoders_for(tiny_llada.model.shape.blocks)
    for name in set(decoders_for(None)) - {"one-by-one"}:
        with pytest.raises(TadError, match=rf"'{name}'.*'sdar'.*rule=entropy"):
            decode(lm("sdar"), [[1, 2, 3]], name, 32)
    talk = Conversation(lm("sdar"), "sdar", 32)
    with pytest.raises(TadError, match="'tad'"):
        talk.switch("tad", {})
    assert talk.name == "sdar"
    fitting = decoders_for(lm("sdar").model.shape.blocks)
    assert set(fitting) == {"one-by-one", "fast-dllm-v2", "sdar", "llada2", "llada2.1"}
    for settings in ({"cache": "block"}, {"rule": "block-quota"}, {"stop": "block"}):
        with pytest.raises(TadError, match="block-by-block"):
            get_decoder("fast-dllm", "llada", **settings).check(32)


def test_a_prompt_with_the_mask_token_is_refused() -> None:
    with pytest.raises(TadError, match="mask token"):
        decode(lm("sdar"), [[1, lm("sdar").tokens.mask]], "sdar", 8)


@pytest.fixture
def tiny_llada() -> LM:
    from tad.models import LLADA, LLaDAConfig
    from tad.models.shapes import build

    config = LLaDAConfig.from_sizes(
        width=32,
        layers=1,
        heads=2,
        kv_heads=2,
        mlp=48,
        vocab=64,
        context=128,
        mask_token_id=63,
        eos_token_id=62,
    )
    return LM(build(config, "cpu", torch.float32), LLADA, SpecialTokens(63, 62, 62))
