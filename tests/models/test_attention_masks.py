"""Attention masks: padding, batch neighbours, block-causal, and FlexAttention held to SDPA."""

from __future__ import annotations

from functools import cache as memo

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import tiny_model
from torch import Tensor

from tad.models import AttentionMask, BlockLayout, MaskedDiffusionModel, block_index

LENGTH, PAD = 16, 9
examples = settings(max_examples=25, deadline=None)
families = st.sampled_from(("llada", "dream"))
seeds = st.integers(0, 10_000)


@memo
def model_of(family: str, attention: str = "sdpa") -> MaskedDiffusionModel:
    model = tiny_model(family, **({"n_kv_heads": 2} if family == "llada" else {}))
    model.set_attn_implementation(attention)
    return model


def random_ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


@examples
@given(families, seeds, st.lists(st.integers(0, PAD), min_size=2, max_size=4), st.booleans())
def test_a_row_does_not_depend_on_its_padding_or_on_other_rows(
    family: str, seed: int, pads: list[int], left: bool
) -> None:
    """Padding holds arbitrary tokens. Rows padded on the left are told their own positions."""
    model, total = model_of(family), LENGTH + max(pads)
    rows = [random_ids(seed + number, 1, total - pad) for number, pad in enumerate(pads)]
    ids, keys = random_ids(seed + 99, len(pads), total), torch.zeros(len(pads), total, dtype=torch.bool)
    positions = torch.zeros(len(pads), total, dtype=torch.long)
    for number, (row, pad) in enumerate(zip(rows, pads, strict=True)):
        place = slice(pad, total) if left else slice(0, total - pad)
        ids[number, place], keys[number, place] = row[0], True
        positions[number, place] = torch.arange(total - pad)
    with torch.no_grad():
        together = model(ids, mask=AttentionMask(keys), position_ids=positions).logits
        for number, row in enumerate(rows):
            assert near(together[number][keys[number]], model(row).logits[0])


@examples
@given(families, seeds, st.integers(0, PAD))
def test_the_attention_mask_is_the_padded_one(family: str, seed: int, pad: int) -> None:
    model, ids = model_of(family), random_ids(seed, 2, LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH - pad :] = 0
    with torch.no_grad():
        assert torch.equal(
            model(ids, attention_mask=mask).logits, model(ids, mask=AttentionMask(mask.bool())).logits
        )


@examples
@given(families, seeds, st.integers(1, LENGTH))
def test_block_causal_logits_do_not_depend_on_later_blocks(family: str, seed: int, size: int) -> None:
    model, ids = model_of(family), random_ids(seed, 2, LENGTH)
    blocks = (torch.arange(LENGTH) // size)[None].expand(2, -1)
    changed = torch.where(blocks > 0, random_ids(seed + 1, 2, LENGTH), ids)
    rule = AttentionMask(blocks=blocks)
    first = blocks[0] == 0
    with torch.no_grad():
        assert torch.equal(model(ids, mask=rule).logits[:, first], model(changed, mask=rule).logits[:, first])
        assert near(model(ids, mask=rule).logits[:, first], model(ids[:, first]).logits)


def test_a_query_that_sees_nothing_spoils_nobody() -> None:
    """Padding in a block of its own, before all others, sees no key at all; the real positions must stay finite."""
    model, ids = model_of("llada"), random_ids(0, 1, LENGTH)
    keys = torch.arange(LENGTH)[None] >= 4
    blocks = torch.where(keys, 0, -1)
    with torch.no_grad():
        logits = model(ids, mask=AttentionMask(keys, blocks)).logits
        wanted = model(ids, mask=AttentionMask(keys)).logits
    assert near(logits[keys], wanted[keys])


def noisy_and_clean(samples: Tensor | None) -> AttentionMask:
    """Halves of the row, or of each of its two samples."""
    half = LENGTH // (2 if samples is None else 4)
    columns = torch.arange(LENGTH)[None]
    return AttentionMask.noisy_and_clean(columns % half // 3, columns // half % 2 == 0, samples)


def masks(name: str, batch: int) -> AttentionMask:
    keys = torch.ones(batch, LENGTH, dtype=torch.bool)
    keys[0, :3], keys[1, -5:] = False, False
    blocks = (torch.arange(LENGTH) // 5)[None].expand(batch, -1).contiguous()
    return {
        "full": AttentionMask(),
        "padded": AttentionMask(keys),
        "block-causal": AttentionMask(blocks=blocks),
        "both": AttentionMask(keys, blocks),
        "noisy and clean": noisy_and_clean(samples=None),
        "packed": noisy_and_clean(samples=torch.arange(LENGTH)[None] // (LENGTH // 2)),
    }[name]


@pytest.mark.parametrize("name", ["full", "padded", "block-causal", "both", "noisy and clean", "packed"])
def test_flex_attention_agrees_with_sdpa(name: str) -> None:
    ids, rule = random_ids(1, 2, LENGTH), masks(name, 2)
    real = rule.keys if rule.keys is not None else torch.ones(2, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        flex = model_of("dream", "flex_attention")(ids, mask=rule).logits
        assert near(flex[real], model_of("dream")(ids, mask=rule).logits[real])


@pytest.mark.parametrize(
    "at", [slice(5, 12), torch.tensor([[4, 9, -1], [15, 0, 7]])], ids=["slice", "scattered"]
)
def test_flex_attention_agrees_with_sdpa_on_a_cache(at: slice | Tensor) -> None:
    ids, rule, found = random_ids(1, 2, LENGTH), masks("both", 2), []
    fed = ids[:, at] if isinstance(at, slice) else ids.gather(1, at.clamp(min=0))
    for attention in ("sdpa", "flex_attention"):
        model = model_of("dream", attention)
        cache = model.new_cache(2, LENGTH)
        with torch.no_grad():
            model(ids, cache=cache, cache_position=slice(0, LENGTH), mask=rule)
            found.append(model(fed, cache=cache, cache_position=at, mask=rule).logits)
    assert near(found[1], found[0])


def test_mask_is_as_written_out_by_hand() -> None:
    rule = AttentionMask(torch.tensor([[False, True, True, True]]), torch.tensor([[0, 0, 1, 2]]))
    assert rule.dense()[0, 0].int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert rule.dense(slice(2, 4))[0, 0].int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]
    assert rule.dense(torch.tensor([[3, 0]]))[0, 0].int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert AttentionMask().dense() is None


def test_a_schedule_may_be_block_causal_on_a_model_that_is_not() -> None:
    model, positions = model_of("llada"), torch.arange(20)
    assert model.attention_mask(positions) == AttentionMask()
    mask = model.attention_mask(positions, prompt_len=6, layout=BlockLayout(8))
    assert mask.blocks is not None
    assert mask.blocks.tolist() == [[0] * 6 + [1] * 8 + [2] * 6]


@given(st.integers(0, 12), st.integers(0, 9), st.integers(1, 9), st.integers(1, 30))
def test_block_index_is_the_same_however_the_row_is_padded(
    pad: int, prompt: int, size: int, length: int
) -> None:
    positions = torch.arange(pad + prompt + length) - pad
    for grid in ("answer", "absolute"):
        found = block_index(positions, prompt, size, grid)[pad:].tolist()
        start = 0 if grid == "absolute" else prompt
        wanted = [
            0 if i < start else (i - start) // size + (grid == "answer") for i in range(prompt + length)
        ]
        assert found == wanted
    columns = torch.arange(pad + prompt + length)
    assert torch.equal(block_index(columns, pad + prompt, size), block_index(positions, prompt, size))
