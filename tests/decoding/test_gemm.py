"""Split-K GEMMs of few rows: what their partials sum to, who gets them, and how a config is chosen. The kernel itself is
tested on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_models import tiny, tiny_prompts

from tad.decoding import decode
from tad.decoding.engine import GraphEngine, autotune, gemm, network, weights
from tad.decoding.engine.add_norm import add_norm, split_k_add_norm
from tad.decoding.engine.autotune import Timing, keep_best
from tad.decoding.engine.gemm import (
    CONFIGS,
    SPLITS,
    KernelConfig,
    as_input,
    candidates,
    project_to_partials,
    split_k_project,
    usual_split,
)
from tad.decoding.engine.network import LayerOps
from tad.decoding.engine.rope import apply_rope_and_write
from tad.decoding.engine.weights import Projection
from tad.errors import TadError
from tad.models import LM
from tad.models.quantize import Fp8Linear, quantize_fp8, to_fp8


def draw(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def small(*sizes: int, bias: torch.Tensor | None = None) -> tuple[Projection, torch.Tensor]:
    """A projection with fp8 weights, and its weights in fp32."""
    codes, scale = to_fp8(draw(*sizes))
    return Projection(codes, scale[:, 0].contiguous(), bias), codes.float() * scale


@pytest.mark.parametrize("split", SPLITS)
def test_the_partials_are_of_parts_of_k_and_sum_to_the_gemm(split: int) -> None:
    x, bias = draw(5, 48), draw(30)
    by, wide = small(30, 48, bias=bias)
    operation = gemm._OPERATIONS[split]
    partials = operation(x, by.weight, by.scale, torch.float32)
    assert partials.shape == (split, 5, 30)
    x_first = x.clone()
    x_first[:, 48 // split :] = 0
    first = operation(x_first, by.weight, by.scale, torch.float32)
    torch.testing.assert_close(first[0], partials[0])
    assert not first[1:].any()
    found = split_k_project(split, torch.float32)(x, by)
    torch.testing.assert_close(found, x @ wide.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", [1, 2])
def test_rows_in_bf16_go_in_as_fp16_and_come_back_as_bf16(split: int) -> None:
    by, wide = small(30, 48)
    x = draw(5, 48).bfloat16()
    x[0, 0], x[0, 1] = 3e38, -3e38  # cut off, not infinite
    assert as_input(x).dtype == torch.float16
    torch.testing.assert_close(as_input(x)[0, :2].float(), torch.tensor([65280.0, -65280.0]))
    torch.testing.assert_close(as_input(x)[1:].float(), x[1:].float())
    found = split_k_project(split, torch.bfloat16)(x, by)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    torch.testing.assert_close(found[1:].float(), x[1:].float() @ wide.T, rtol=1e-2, atol=1e-2)
    assert (
        project_to_partials(split, torch.bfloat16)(x, by).dtype == [torch.bfloat16, torch.float32][split - 1]
    )


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_split_k_projection_with_add_norm_is_the_sum_and_its_norm(split: int, dtype: torch.dtype) -> None:
    by, wide = small(30, 48)
    x, inputs, scale = (part.to(dtype) for part in (draw(5, 30), draw(5, 48), draw(30)))
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    summed = x.float() + inputs.float() @ wide.T
    for last in (False, True):
        found = split_k_add_norm(split)(x, inputs, by, scale, 1e-5, last)
        normed = scale.float() * summed / (summed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(found[0].float(), summed, **close)
        torch.testing.assert_close(found[1].float(), normed, **close)
        assert found[0].dtype == dtype
        assert found[1].dtype == (dtype if last else gemm.input_dtype(dtype))


def test_the_fake_operation_is_the_operation() -> None:
    by, _ = small(30, 48)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(3, 8).to(dtype)
        for wanted in {dtype, gemm.input_dtype(dtype)}:
            torch.library.opcheck(add_norm, (x, draw(2, 3, 8), draw(8).to(dtype), 1e-5, wanted))
        for split in SPLITS:
            given = (as_input(draw(3, 48).to(dtype)), by.weight, by.scale, dtype)
            torch.library.opcheck(gemm._OPERATIONS[split], given, test_utils="test_faketensor")


@pytest.fixture
def small_lm(lm: LM) -> LM:
    """The model with fp8 projections."""
    found = copy.deepcopy(lm)
    quantize_fp8(found.model)
    return found


def widen(by: Projection | Fp8Linear) -> torch.Tensor:
    return by.weight.float() * by.scale[:, None]


@pytest.fixture
def wide_lm(small_lm: LM, monkeypatch: pytest.MonkeyPatch) -> LM:
    """The same weights in fp32 again; the engine's library then leaves activations unrounded too."""
    found = copy.deepcopy(small_lm)
    for parent in list(found.model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, Fp8Linear):
                linear = torch.nn.Linear(*module.weight.shape[::-1], bias=module.bias is not None)
                linear.weight.data, linear.bias = widen(module), module.bias
                setattr(parent, name, linear)
    monkeypatch.setattr(
        weights, "fp8_linear", lambda x, weight, scale, bias: x @ (weight.float() * scale[:, None]).T + (0 if bias is None else bias)
    )  # fmt: skip
    return found


@pytest.mark.parametrize("slots", [1, 3])
def test_split_k_gemms_give_the_tokens_of_exact_ones(
    small_lm: LM, wide_lm: LM, prompts: list[list[int]], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sizes = GraphEngine(small_lm.model, gemm="triton"), []
    inner = engine.network.ops_for

    def counting(tokens: int) -> object:
        sizes.append((tokens, inner(tokens) is engine.network.few_row_ops))
        return inner(tokens)

    monkeypatch.setattr(engine.network, "ops_for", counting)
    some = prompts[2:7]
    plain = decode(wide_lm, some, "tad-cached", 64, refresh=16, engine="plain")
    found = decode(small_lm, some, "tad-cached", 64, refresh=16, batch_size=slots, engine=engine)
    assert [(row.tokens, row.steps) for row in found] == [(row.tokens, row.steps) for row in plain]
    assert all(few == (tokens <= gemm.MAX_ROWS) for tokens, few in sizes)
    assert any(few for _, few in sizes)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("name", ["tad", "tad-cached", "one-by-one"])
@pytest.mark.parametrize("slots", [1, 3])
def test_rope_in_a_kernel_of_its_own_gives_the_tokens_of_the_plain_forward(
    family: str, name: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where our kernel does it; here the same in torch."""
    lm, some, calls = tiny(family), tiny_prompts(family)[2:6], []

    def rope(*arguments: Any) -> torch.Tensor:
        calls.append(arguments[0].shape[0])
        return apply_rope_and_write(*arguments)

    engine = GraphEngine(lm.model)
    engine.network.ops = LayerOps(lm.model, compiled=False, rope_kernel=True)
    monkeypatch.setattr(network, "apply_rope_and_write", rope)
    plain = decode(lm, some, name, 32, engine="plain")
    found = decode(lm, some, name, 32, batch_size=slots, engine=engine)
    assert [(row.tokens, row.steps) for row in found] == [(row.tokens, row.steps) for row in plain]
    assert set(calls) == {1}


@pytest.mark.slow
def test_compiled_partials_are_reduced_where_they_are_used_and_compile_once(
    small_lm: LM, wide_lm: LM, prompts: list[list[int]]
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    engine, some, made = GraphEngine(small_lm.model, compiled=True, gemm="triton"), prompts[2:7], []
    for slots in (1, 3, 1):
        plain = decode(wide_lm, some, "tad-cached", 64, engine="plain")
        found = decode(small_lm, some, "tad-cached", 64, batch_size=slots, engine=engine)
        assert [row.tokens for row in found] == [row.tokens for row in plain]
        made.append(counters["stats"]["unique_graphs"])
    assert made[2] == made[1]


def test_the_choice_of_kernels_is_checked_and_auto_is_the_library_without_cuda(small_lm: LM) -> None:
    lm = tiny("llada")
    for model in (lm.model, small_lm.model):
        assert GraphEngine(model).network.few_row_ops is None
        assert not GraphEngine(model).network.attends_few
    with pytest.raises(TadError, match="gemm is one of auto, torch, triton, not 'fast'"):
        GraphEngine(lm.model, gemm="fast")
    with pytest.raises(TadError, match="gemm 'triton': qkv"):
        GraphEngine(lm.model, gemm="triton")
    with pytest.raises(TadError, match="attention is one of auto, torch, triton, not 'fast'"):
        GraphEngine(lm.model, attention="fast")
    with pytest.raises(TadError, match="attention 'triton' needs half precision on a GPU"):
        GraphEngine(lm.model, attention="triton")


@given(st.integers(1, 400), st.integers(1, 300))
def test_candidates_cut_the_inputs_evenly_and_occupy_the_device(tiles: int, blocks: int) -> None:
    weight = torch.empty(64 * tiles, 64 * blocks, dtype=torch.float8_e4m3fn, device="meta")
    for config in candidates(weight):
        assert weight.shape[1] % config.block_k == 0
        programs = config.split * -(-len(weight) // config.block_n)
        assert programs >= 120
        assert config.split == 1 or programs <= 420
    assert usual_split(weight) in SPLITS
    assert weight.shape[1] % gemm.config_for(weight, 40, 2).block_k == 0
    assert gemm.config_for(weight, 40, 2).split == 2


@pytest.mark.parametrize("shape", [(12288, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)])  # fmt: skip
def test_the_released_shapes_have_several_candidates(shape: tuple[int, int]) -> None:
    found = candidates(torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"))
    assert len(found) >= 5
    assert {config._replace(split=1) for config in found} <= set(CONFIGS)


def test_the_split_is_best_for_all_rows_together_and_failures_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm, "chosen", {})
    monkeypatch.setattr(autotune, "_SUM_RATE", 1e30)
    weight = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    one, other = CONFIGS[:2]

    def timing(rows: int, config: KernelConfig, split: int, ms: float | None) -> Timing:
        return Timing(rows, config._replace(split=split), ms)

    timings = [
        timing(32, one, 2, 1.0),
        timing(64, one, 2, 5.0),
        timing(32, one, 4, 2.0),
        timing(32, other, 4, 2.5),
        timing(64, one, 4, 3.0),
        timing(64, other, 4, 2.0),
        timing(32, other, 8, 0.1),
        timing(64, other, 8, None),
    ]
    assert keep_best(weight, timings) == 4
    assert gemm.config_for(weight, 32, 4) == one._replace(split=4)
    assert gemm.config_for(weight, 50, 4) == other._replace(split=4)
    assert keep_best(weight, timings[-1:]) == usual_split(weight)


def test_without_timings_the_split_is_the_usual_one() -> None:
    weight = torch.empty(512, 512, dtype=torch.float8_e4m3fn, device="meta")
    assert candidates(weight) == []
    assert keep_best(weight, []) == usual_split(weight) > 1


@pytest.mark.parametrize(("size", "served"), [(8, False), (16, True), (96, False), (128, True), (256, False)])
def test_heads_that_the_kernels_cannot_take_are_left_to_the_library(
    small_lm: LM, size: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gemm.takes_heads(size) == served
    if not served:
        monkeypatch.setattr(gemm, "takes_heads", lambda _: False)
        with pytest.raises(TadError, match="gemm 'triton': qkv"):
            GraphEngine(small_lm.model, gemm="triton")


@pytest.mark.parametrize(
    ("triton", "capability", "compiles", "own"),
    [(True, (9, 0), True, True), (True, (8, 0), True, False), (True, (6, 1), False, False), (False, (9, 0), False, False)],
)  # fmt: skip
def test_compiling_takes_triton_and_own_kernels_a_newer_gpu(
    triton: bool,
    capability: tuple[int, int],
    compiles: bool,
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm, "find_spec", lambda _: object() if triton else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda")
    assert (gemm.can_compile(device), gemm.has_kernels(device)) == (compiles, own)
    assert not gemm.can_compile(torch.device("cpu"))


def test_few_rows_in_bf16_run_through_a_whole_engine(small_lm: LM, prompts: list[list[int]]) -> None:
    rounded = copy.deepcopy(small_lm)
    rounded.model.bfloat16()
    for module in rounded.model.modules():
        if isinstance(module, Fp8Linear):  # a model in bf16 keeps its scales in fp32
            module.scale = module.scale.float()
    engine = GraphEngine(rounded.model, gemm="triton")
    found = decode(rounded, prompts[2:5], "tad-cached", 32, refresh=16, batch_size=1, engine=engine)
    assert all(len(row.tokens) == 32 for row in found)


def test_partials_that_are_read_again_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "chosen", {})
    weight = torch.empty(24576, 4096, dtype=torch.float8_e4m3fn, device="meta")
    config = CONFIGS[0]
    timings = [Timing(64, config, 0.050), Timing(64, config._replace(split=2), 0.049)]
    assert keep_best(weight, timings) == 1
