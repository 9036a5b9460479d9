"""The cache: every write pattern gives what a full forward gives, and columns not fed keep what they held."""

from __future__ import annotations

from functools import cache as memo

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import tiny_model
from torch import Tensor

from tad.models import AttentionMask, KVCache, MaskedDiffusionModel

LENGTH, BATCH = 24, 3
SHAPES = (("llada", "plain"), ("llada", "grouped"), ("dream", "grouped"))
examples = settings(max_examples=25, deadline=None)
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 10_000)
slices = (
    st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
    .filter(lambda ends: ends[0] < ends[1])
    .map(lambda ends: slice(*ends))
)


@memo
def model_of(shape: tuple[str, str], layers: int = 2) -> MaskedDiffusionModel:
    family, heads = shape
    changes = (
        {"n_layers": layers, "n_kv_heads": 2 if heads == "grouped" else 4}
        if family == "llada"
        else {"num_hidden_layers": layers}
    )
    return tiny_model(family, **changes)


def random_ids(seed: int, batch: int = BATCH) -> Tensor:
    return torch.randint(0, 300, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


@st.composite
def column_sets(draw: st.DrawFn) -> Tensor:
    """[BATCH, n] columns, another set per row, padded with -1 where a row feeds fewer."""
    rows = [draw(st.sets(st.integers(0, LENGTH - 1), min_size=1, max_size=10)) for _ in range(BATCH)]
    width = max(len(row) for row in rows) + draw(st.integers(0, 2))
    orders = [draw(st.permutations([*row, *[-1] * (width - len(row))])) for row in rows]
    return torch.tensor(orders)


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5 * wanted.abs().max())


def full_at(full: Tensor, at: Tensor) -> Tensor:
    """Logits of a full forward at columns [BATCH, n]; those of column 0 where it is -1."""
    return full.gather(1, at.clamp(min=0)[:, :, None].expand(-1, -1, full.shape[-1]))


@torch.no_grad()
def filled(
    model: MaskedDiffusionModel, ids: Tensor, rule: AttentionMask | None = None
) -> tuple[KVCache, Tensor]:
    cache = model.new_cache(len(ids), LENGTH)
    return cache, model(ids, cache=cache, cache_position=slice(0, LENGTH), mask=rule).logits


@examples
@given(shapes, seeds)
def test_filling_the_cache_is_the_full_forward(shape: tuple[str, str], seed: int) -> None:
    model, ids = model_of(shape), random_ids(seed)
    _, logits = filled(model, ids)
    with torch.no_grad():
        assert torch.equal(logits, model(ids).logits)


@examples
@given(shapes, seeds, slices | column_sets())
def test_columns_fed_again_give_the_full_forwards_logits(
    shape: tuple[str, str], seed: int, fed: slice | Tensor
) -> None:
    """The prefix cache feeds from a column to the end, the dual cache a block, the delayed one from the first unfrozen."""
    model, ids = model_of(shape), random_ids(seed)
    cache, full = filled(model, ids)
    at = torch.arange(LENGTH)[fed].expand(BATCH, -1) if isinstance(fed, slice) else fed
    with torch.no_grad():
        logits = model(ids.gather(1, at.clamp(min=0)), cache=cache, cache_position=fed).logits
    assert near(logits[at >= 0], full_at(full, at)[at >= 0])


@examples
@given(shapes, seeds, column_sets())
def test_new_tokens_at_the_fed_columns_are_seen(shape: tuple[str, str], seed: int, at: Tensor) -> None:
    """With one layer, keys and values depend on their own column alone, so the cached forward is exact."""
    model, ids, changed = model_of(shape, layers=1), random_ids(seed), random_ids(seed + 1)
    cache, _ = filled(model, ids)
    fed = torch.zeros(BATCH, LENGTH + 1, dtype=torch.bool).scatter_(1, at % (LENGTH + 1), True)[:, :LENGTH]
    now = torch.where(fed, changed, ids)
    with torch.no_grad():
        logits = model(now.gather(1, at.clamp(min=0)), cache=cache, cache_position=at).logits
        full = model(now).logits
    assert near(logits[at >= 0], full_at(full, at)[at >= 0])


@examples
@given(shapes, seeds, column_sets())
def test_columns_that_are_not_fed_keep_their_keys_and_values(
    shape: tuple[str, str], seed: int, at: Tensor
) -> None:
    model, ids = model_of(shape), random_ids(seed)
    cache, _ = filled(model, ids)
    before = [part.clone() for part in (*cache.keys, *cache.values)]
    with torch.no_grad():
        model(random_ids(seed + 1).gather(1, at.clamp(min=0)), cache=cache, cache_position=at)
    fed = torch.zeros(BATCH, LENGTH + 1, dtype=torch.bool).scatter_(1, at % (LENGTH + 1), True)[:, :LENGTH]
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        same = (old == new)[:, :, :LENGTH].all(dim=3).all(dim=1)
        assert same[~fed].all()
        assert not same[fed].all()


@examples
@given(shapes, seeds, st.integers(1, LENGTH), st.integers(0, LENGTH))
def test_block_causal_blocks_fed_once_each_equal_one_forward(
    shape: tuple[str, str], seed: int, size: int, prompt: int
) -> None:
    """Nothing behind a block changes when a later one is fed, so each block is fed once and never again."""
    model, ids = model_of(shape), random_ids(seed)
    offset = torch.arange(LENGTH) - prompt
    blocks = torch.where(offset < 0, 0, offset.div(size, rounding_mode="floor") + 1)[None].expand(BATCH, -1)
    rule = AttentionMask(blocks=blocks)
    cache, pieces = model.new_cache(BATCH, LENGTH), []
    with torch.no_grad():
        full = model(ids, mask=rule).logits
        for block in blocks[0].unique().tolist():
            columns = (blocks[0] == block).nonzero()[:, 0]
            fed = slice(int(columns[0]), int(columns[-1]) + 1)
            pieces.append(model(ids[:, fed], cache=cache, cache_position=fed, mask=rule).logits)
    assert near(torch.cat(pieces, dim=1), full)


@examples
@given(shapes, seeds, st.lists(st.integers(1, LENGTH), min_size=BATCH, max_size=BATCH))
def test_columns_that_hold_nothing_are_hidden_by_the_rule(
    shape: tuple[str, str], seed: int, lengths: list[int]
) -> None:
    model, ids = model_of(shape), random_ids(seed)
    keys = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
    cache, logits = filled(model, ids, AttentionMask(keys))
    for part in (*cache.keys, *cache.values):  # what stands in a hidden column must not matter
        part[:, :, :LENGTH].masked_fill_(~keys[:, None, :, None], 1e4)
    with torch.no_grad():
        again = model(ids[:, :1], cache=cache, cache_position=slice(0, 1), mask=AttentionMask(keys)).logits
    assert near(again, logits[:, :1])


def test_positions_are_independent_of_the_layout_of_the_buffer() -> None:
    """The same tokens in shuffled columns, told their positions, give the same logits."""
    model, ids = model_of(SHAPES[0]), random_ids(0)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(BATCH, LENGTH)
    with torch.no_grad():
        full = model(ids).logits
        at = order.argsort()[None].expand(BATCH, -1)
        positions = torch.arange(LENGTH)[None]
        assert near(model(ids, cache=cache, cache_position=at, position_ids=positions).logits, full)


def test_a_narrowed_cache_is_a_view_of_its_rows_and_positions() -> None:
    model, ids = model_of(SHAPES[2]), random_ids(0)
    cache = model.new_cache(BATCH, LENGTH)
    view = cache.narrow(2, 3)
    assert (view.batch, view.length) == (2, LENGTH - 3)
    with torch.no_grad():
        positions = torch.arange(LENGTH - 3)[None]
        logits = model(
            ids[:2, 3:], cache=view, cache_position=slice(0, LENGTH - 3), position_ids=positions
        ).logits
        assert near(logits, model(ids[:2, 3:]).logits)
    assert cache.keys[0][:2, :, 3:LENGTH].any()
    assert not cache.keys[0][2:].any()
    assert not cache.keys[0][:, :, :3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cache_has_the_models_dtype(dtype: torch.dtype) -> None:
    assert tiny_model("dream").to(dtype).new_cache(1, 4).keys[0].dtype == dtype
