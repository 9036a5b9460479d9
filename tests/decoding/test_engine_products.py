"""Products of few rows in parts: what they are the sum of, who gets them, and how a tiling is chosen. The kernel itself
is tested on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_models import tiny

from tad.decoding import decode
from tad.decoding.engine import Engine, products, tuning
from tad.decoding.engine.products import SPLITS, TILINGS, Tiling, candidates, split_project, usual_split
from tad.decoding.engine.residual import LIBRARY_JOIN, join_in_parts, sum_and_norm
from tad.decoding.engine.tuning import Trial, keep_best
from tad.decoding.engine.weights import Projection, read_weights
from tad.errors import TadError
from tad.models import LM
from tad.models.quantize import quantize_fp8, to_fp8


def draw(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8"])
def test_the_parts_are_of_the_inputs_and_sum_to_the_product(split: int, quantized: bool) -> None:
    x, weight, bias, scale = draw(5, 48), draw(30, 48), draw(30), None
    wanted = x @ weight.T + bias
    if quantized:
        weight, scales = to_fp8(weight)
        scale = scales[:, 0].contiguous()
        wanted = x @ (weight.float() * scales).T + bias
    parts = products._OPERATIONS[split](x, weight, scale, None)
    assert parts.shape == (split, 5, 30)
    x_first = x.clone()
    x_first[:, 48 // split :] = 0
    first = products._OPERATIONS[split](x_first, weight, scale, None)
    torch.testing.assert_close(first[0], parts[0])
    assert not first[1:].any()
    found = split_project(split)(x, Projection(weight, scale, bias), None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", [1, 4])
def test_a_projection_that_is_joined_in_parts_is_the_sum_and_its_norm(split: int) -> None:
    x, inputs, weight, scale = draw(5, 30), draw(5, 48), draw(30, 48), draw(30)
    found = join_in_parts(split)(x, inputs, Projection(weight, None, None), None, scale, 1e-5)
    wanted = LIBRARY_JOIN(x, inputs, Projection(weight, None, None), None, scale, 1e-5)
    summed = x + inputs @ weight.T
    torch.testing.assert_close(wanted[0], summed)
    torch.testing.assert_close(
        wanted[1], scale * summed / (summed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_bias_keeps_a_projection_from_being_joined_in_parts() -> None:
    plain, biased = (Projection(draw(8, 8), None, bias) for bias in (None, draw(8)))
    assert tuning._way("down", plain, 2) is join_in_parts(2)
    assert tuning._way("down", biased, 2) is LIBRARY_JOIN
    assert tuning._way("gate_up", biased, 2) is split_project(2)


def test_the_described_operation_is_the_operation() -> None:
    torch.library.opcheck(sum_and_norm, (draw(3, 8), draw(2, 3, 8), draw(8), 1e-5))
    for split in SPLITS:
        torch.library.opcheck(products._OPERATIONS[split], (draw(3, 48), draw(30, 48), None, None))


@pytest.mark.parametrize("slots", [1, 3])
def test_few_rows_in_parts_give_the_tokens_of_the_loop(
    lm: LM, prompts: list[list[int]], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sizes = Engine(lm.model, products="triton"), []
    inner = engine.network.parts_for

    def counting(tokens: int) -> object:
        sizes.append((tokens, inner(tokens) is engine.network.few_rows))
        return inner(tokens)

    monkeypatch.setattr(engine.network, "parts_for", counting)
    some = prompts[2:7]
    plain = decode(lm, some, "tad-cached", 64, engine="plain")
    found = decode(lm, some, "tad-cached", 64, batch_size=slots, engine=engine)
    assert [(row.tokens, row.steps) for row in found] == [(row.tokens, row.steps) for row in plain]
    assert all(few == (tokens <= products.MOST_ROWS) for tokens, few in sizes)
    assert any(few for _, few in sizes)


@pytest.mark.slow
def test_compiled_parts_are_added_where_they_are_used_and_compile_once(
    lm: LM, prompts: list[list[int]]
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    engine, some, made = Engine(lm.model, compiled=True, products="triton"), prompts[2:7], []
    for slots in (1, 3, 1):
        plain = decode(lm, some, "tad-cached", 64, engine="plain")
        found = decode(lm, some, "tad-cached", 64, batch_size=slots, engine=engine)
        assert [row.tokens for row in found] == [row.tokens for row in plain]
        made.append(counters["stats"]["unique_graphs"])
    assert made[2] == made[1]


def test_fp8_weights_in_parts_leave_activations_as_they_are() -> None:
    model = copy.deepcopy(tiny("llada").model)
    quantize_fp8(model)
    by = read_weights(model)[0].down
    x = draw(4, by.weight.shape[1])
    wanted = x @ (by.weight.float() * by.scale[:, None]).T
    torch.testing.assert_close(split_project(2)(x, by, None), wanted, rtol=1e-5, atol=1e-5)


def test_the_choice_of_products_is_checked_and_auto_is_the_library_without_cuda() -> None:
    lm = tiny("llada")
    assert Engine(lm.model).network.few_rows is None
    assert Engine(lm.model, products="auto").network.few_rows is None
    with pytest.raises(TadError, match="products is one of torch, triton, auto, not 'fast'"):
        Engine(lm.model, products="fast")
    with pytest.raises(TadError, match="attention is one of torch, triton, not 'fast'"):
        Engine(lm.model, attention="fast")


@given(st.integers(1, 400), st.integers(1, 300), st.booleans())
def test_candidates_cut_the_inputs_evenly_and_occupy_the_device(tiles: int, blocks: int, fp8: bool) -> None:
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    weight = torch.empty(64 * tiles, 64 * blocks, dtype=dtype, device="meta")
    for tiling in candidates(weight):
        assert weight.shape[1] % tiling.block_k == 0
        programs = tiling.split * -(-len(weight) // tiling.block_n)
        assert programs >= 120
        assert tiling.split == 1 or programs <= 420
    assert usual_split(weight) in SPLITS
    assert weight.shape[1] % products.tiling_for(weight, 40, 2).block_k == 0
    assert products.tiling_for(weight, 40, 2).split == 2


@pytest.mark.parametrize("shape", [(12288, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)])  # fmt: skip
def test_the_released_shapes_have_several_candidates(shape: tuple[int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        found = candidates(torch.empty(shape, dtype=dtype, device="meta"))
        assert len(found) >= 5
        assert {tiling._replace(split=1) for tiling in found} <= set(TILINGS[dtype != torch.bfloat16])


def test_the_split_is_best_for_all_rows_together_and_failures_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "chosen", {})
    monkeypatch.setattr(tuning, "_SUM_RATE", 1e30)
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    one, other = TILINGS[False][:2]

    def trial(rows: int, tiling: Tiling, split: int, ms: float | None) -> Trial:
        return Trial(rows, tiling._replace(split=split), ms)

    trials = [
        trial(32, one, 2, 1.0),
        trial(64, one, 2, 5.0),
        trial(32, one, 4, 2.0),
        trial(32, other, 4, 2.5),
        trial(64, one, 4, 3.0),
        trial(64, other, 4, 2.0),
        trial(32, other, 8, 0.1),
        trial(64, other, 8, None),
    ]
    assert keep_best(weight, trials) == 4
    assert products.tiling_for(weight, 32, 4) == one._replace(split=4)
    assert products.tiling_for(weight, 50, 4) == other._replace(split=4)
    assert keep_best(weight, trials[-1:]) == usual_split(weight)


def test_parts_that_are_read_again_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "chosen", {})
    weight = torch.empty(24576, 4096, dtype=torch.bfloat16, device="meta")
    tiling = TILINGS[False][0]
    trials = [Trial(64, tiling, 0.050), Trial(64, tiling._replace(split=2), 0.049)]
    assert keep_best(weight, trials) == 1


def test_the_library_is_left_its_work_where_it_is_clearly_faster() -> None:
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    tiling = TILINGS[False][0]._replace(split=8)
    trials = [Trial(32, tiling, 0.010), Trial(64, tiling, 0.012), Trial(64, tiling._replace(split=4), 0.001)]
    ours = sum(tuning.cost(trial, weight) for trial in trials[:2])
    assert tuning.beats_library(weight, trials, 8, {32: ours / 2, 64: ours / 2})
    assert tuning.beats_library(weight, trials, 8, {32: 0.49 * ours, 64: 0.49 * ours})
    assert not tuning.beats_library(weight, trials, 8, {32: 0.47 * ours, 64: 0.47 * ours})
    assert not tuning.beats_library(weight, [], 8, {32: 1.0, 64: 1.0})
