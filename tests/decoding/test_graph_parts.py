"""Parts of the graph engine: sizes, fused weights, adapters beside them, the delayed cache against its definition."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_models import tiny, tiny_prompts
from torch import Tensor

from tad.decoding import decode
from tad.decoding.cache_policy import ActiveCache, DelayedCache
from tad.decoding.engine.buckets import StepShape, doubled, prompt_bucket, slot_bucket, stepped, token_bucket
from tad.decoding.engine.weights import UnfitError, read_weights, why_unfit
from tad.decoding.table import BlockTable

COUNTS = st.integers(1, 100_000)


@given(COUNTS)
def test_a_bucket_holds_the_count_and_wastes_little(count: int) -> None:
    assert count <= token_bucket(count) <= max(32, 1.5 * count)
    assert count <= prompt_bucket(count) <= max(64, 1.5 * count)
    assert count <= slot_bucket(count) <= max(4, 1.5 * count)
    assert count <= doubled(count, 32) < max(33, 2 * count)
    if count > 128:
        assert token_bucket(count) <= 1.25 * count
    for bucket in (token_bucket, prompt_bucket, slot_bucket):
        assert bucket(count) <= bucket(count + 1)
        assert bucket(bucket(count)) == bucket(count)


def test_there_are_few_buckets() -> None:
    assert len({token_bucket(count) for count in range(1, 16_385)}) <= 34
    assert len({prompt_bucket(count) for count in range(1, 4_097)}) <= 14
    assert [stepped(count, 64) for count in (1, 64, 65, 97, 129, 200)] == [64, 64, 96, 128, 192, 256]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 64)), min_size=1, max_size=9), st.booleans())
def test_a_step_shape_holds_all_rows(rows: list[tuple[int, int]], masked: bool) -> None:
    queries, candidates = [row[0] for row in rows], [row[1] for row in rows]
    shape = StepShape.holding(queries, candidates, len(rows), 300, 64, masked)
    assert shape.tokens >= sum(queries)
    assert shape.window >= max(queries)
    assert shape.candidates >= sum(candidates)
    assert max(candidates) <= shape.widest <= 64


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_joint_weights_are_the_models_own_memory(family: str, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny(family).model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        layers = read_weights(model)
        assert torch.equal(model(ids).logits, before)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
        for state in (model.state_dict(), again.state_dict()):
            assert all(torch.equal(value, saved[name]) for name, value in state.items())
        gate = model.layers()[0].part(model.names.gate).weight
        gate.add_(1)
    assert torch.equal(layers[0].gate_up.weight[: len(gate)], gate)
    assert not why_unfit(model)
    assert [layer.qkv.weight.data_ptr() for layer in read_weights(model)] == [
        layer.qkv.weight.data_ptr() for layer in layers
    ]


@pytest.mark.parametrize("made_in_inference_mode", [True, False])
def test_the_plain_forward_works_on_joined_weights_inside_and_outside_inference_mode(
    made_in_inference_mode: bool,
) -> None:
    with torch.inference_mode(made_in_inference_mode):
        model = copy.deepcopy(tiny("dream").model)
    ids = torch.arange(20)[None]
    wanted = tiny("dream").model(ids).logits
    read_weights(model)
    for inside in (True, False):
        with torch.inference_mode(inside), torch.no_grad():
            assert torch.equal(model(ids).logits, wanted)


def test_a_joined_model_trains_like_any_other() -> None:
    steps = []
    for joined in (True, False):
        model = copy.deepcopy(tiny("llada").model)
        if joined:
            read_weights(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(torch.arange(20)[None]).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        steps.append(model.state_dict())
    for name, value in steps[0].items():
        torch.testing.assert_close(value, steps[1][name], msg=name)


def test_weights_that_are_parts_of_a_flat_buffer_are_not_moved() -> None:
    model = copy.deepcopy(tiny("llada").model)
    for layer in model.layers():
        gate = layer.part(model.names.gate).weight
        gate.data = torch.cat((gate.data, gate.data))[: len(gate)]
    with pytest.raises(UnfitError, match="parts of larger buffers"):
        read_weights(model)


def freeze_block_by_block(
    table: BlockTable, delay: int, refresh: int, prompt: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """The delayed cache as its definition reads, one row and one block at a time: start, cached, finished_at."""
    starts, cached, marks = [], [], []
    for row in range(len(table.forwards)):
        now, frozen = int(table.forwards[row]) + 1, int(table.cached[row])
        was, waits, marked = frozen, False, table.finished_at[row].tolist()
        if frozen < 0:
            frozen, waits = (0, False) if now >= delay else (frozen, True)
        while 0 <= frozen < table.blocks and int(table.masks[row, frozen]) == 0:
            if marked[frozen] < 0:
                marked[frozen] = now
            if now - marked[frozen] < delay:
                waits = True
                break
            frozen += 1
        renews = (waits or now % refresh == 0) and not frozen > was
        start = 0 if was < 0 or renews or refresh == 1 else prompt + was * table.size
        starts.append(start)
        cached.append(frozen)
        marks.append(marked)
    return starts, cached, marks


@given(st.data())
def test_the_delayed_cache_freezes_as_its_definition_says(data: st.DataObject) -> None:
    rows, blocks, size = 3, data.draw(st.integers(1, 5)), 4
    delay, refresh = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    table = BlockTable.start(rows, blocks * size, size, torch.device("cpu"))
    visible = torch.full((rows,), blocks * size)
    for _ in range(data.draw(st.integers(1, 12))):
        left = data.draw(
            st.lists(
                st.lists(st.integers(0, 2), min_size=blocks, max_size=blocks), min_size=rows, max_size=rows
            )
        )
        table.masks = torch.minimum(table.masks, torch.tensor(left) * 2)  # masks only go
        wanted = freeze_block_by_block(table, delay, refresh, prompt=10)
        asked = DelayedCache(delay, refresh).query_range(table, 10, visible)
        found: tuple[Tensor, ...] = (asked.start, table.cached, table.finished_at)
        assert tuple(part.tolist() for part in found) == wanted
        assert asked.end.tolist() == [10 + blocks * size] * rows
        table.count_forward()


def test_the_active_cache_computes_the_whole_canvas_once_and_then_what_exists() -> None:
    table, other = (BlockTable.start(3, 16, 4, torch.device("cpu")) for _ in range(2))
    visible, renewed, gaps = torch.full((3,), 16), [], set()
    for masks, created in (
        ([4, 4, 4, 4], 1),
        ([0, 4, 4, 4], 2),
        ([0, 2, 4, 4], 2),
        ([0, 1, 4, 4], 3),
        ([0, 0, 3, 4], 3),
    ):
        for one in (table, other):
            one.masks, one.created = torch.tensor([masks] * 3), torch.tensor([created] * 3)
        first = int(table.forwards[0]) == 0
        found, delayed = (
            ActiveCache(1, 4).query_range(table, 10, visible),
            DelayedCache(1, 4).query_range(other, 10, visible),
        )
        assert found.start.tolist() == delayed.start.tolist()
        assert table.cached.tolist() == other.cached.tolist()
        assert found.end.tolist() == [26 if first else 10 + 4 * created] * 3
        frozen = max(0, int(table.cached[0])) if int(found.start[0]) == 0 else 0
        assert found.gap is not None
        assert found.gap.tolist() == [[10, 4 * frozen]] * 3  # a renewal leaves frozen blocks out
        gaps.add(4 * frozen)
        renewed.append(int(found.start[0]) == 0)
        for one in (table, other):
            one.count_forward()
    assert True in renewed[1:]
    assert False in renewed
    assert gaps > {0}


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_an_active_cache_that_is_renewed_by_every_forward_changes_nothing(family: str) -> None:
    lm, some = tiny(family), tiny_prompts(family)[2:5]
    exact = decode(lm, some, "tad", 64, block=16)
    found = decode(lm, some, "tad-cached", 64, block=16, cache="active", refresh=1)
    assert [(row.tokens, row.steps) for row in found] == [(row.tokens, row.steps) for row in exact]
