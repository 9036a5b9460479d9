"""Split-K GEMMs of few rows: who gets them, what they give, and how a config is chosen. The kernel itself is tested on a GPU."""

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
from tad.decoding.engine.add_norm import add_norm
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
from tad.models import LM
from tad.models.quantize import QuantizedLinear, quantize, to_fp8


def draw(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def small(*sizes: int) -> tuple[Projection, torch.Tensor]:
    """A projection with fp8 weights, and its weights in fp32."""
    codes, scale = to_fp8(draw(*sizes))
    return Projection(codes, scale[:, 0].contiguous(), None), codes.float() * scale


@pytest.mark.parametrize("split", [1, 2])
def test_rows_in_bf16_go_in_as_fp16_and_come_back_as_bf16(split: int) -> None:
    by, wide = small(30, 48)
    x = draw(5, 48).bfloat16()
    x[0, 0], x[0, 1] = 3e38, -3e38  # cut off, not infinite
    assert as_input(x, by).dtype == torch.float16
    torch.testing.assert_close(as_input(x, by)[0, :2].float(), torch.tensor([65280.0, -65280.0]))
    torch.testing.assert_close(as_input(x, by)[1:].float(), x[1:].float())
    found = split_k_project(split, torch.bfloat16)(x, by)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    torch.testing.assert_close(found[1:].float(), x[1:].float() @ wide.T, rtol=1e-2, atol=1e-2)
    assert (
        project_to_partials(split, torch.bfloat16)(x, by).dtype == [torch.bfloat16, torch.float32][split - 1]
    )


def test_the_fake_operation_is_the_operation() -> None:
    by, _ = small(30, 48)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(3, 8).to(dtype)
        for wanted in {dtype, gemm.input_dtype(dtype, by)}:
            torch.library.opcheck(add_norm, (x, draw(2, 3, 8), draw(8).to(dtype), 1e-5, wanted))
        for split in SPLITS:
            given = (as_input(draw(3, 48).to(dtype), by), by.weight, by.scale, dtype)
            torch.library.opcheck(gemm._OPERATIONS[split], given, test_utils="test_faketensor")
            plain = (draw(3, 48).to(dtype), draw(30, 48).to(dtype), None, dtype)
            torch.library.opcheck(gemm._OPERATIONS[split], plain, test_utils="test_faketensor")


@pytest.fixture(params=["fp8", "int8"])
def small_lm(lm: LM, request: pytest.FixtureRequest) -> LM:
    """The model with fp8 or int8 projections."""
    found = copy.deepcopy(lm)
    quantize(found.model, request.param)
    return found


def widen(by: Projection | QuantizedLinear) -> torch.Tensor:
    return by.weight.float() * by.scale[:, None]


@pytest.fixture
def wide_lm(small_lm: LM, monkeypatch: pytest.MonkeyPatch) -> LM:
    """The same weights in fp32 again; the engine's library then leaves activations unrounded too."""
    found = copy.deepcopy(small_lm)
    for parent in list(found.model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, QuantizedLinear):
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
    engine, sizes = GraphEngine(small_lm.model, kernels=True), []
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


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("by_library", [("qkv", "down"), ("attn_out", "gate_up"), ("query", "key_value")])
def test_each_projection_may_take_either_gemm(
    family: str, by_library: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU for weights that need no widening, where the faster one is taken."""
    lm, some, made = tiny(family), tiny_prompts(family)[2:6], {}
    operation = autotune._operation

    def force(kind: str, by: Projection, split: int | None, dtype: torch.dtype) -> object:
        made[kind] = None if kind in by_library else 3
        return operation(kind, by, made[kind], dtype)

    monkeypatch.setattr(gemm, "takes_split_k", lambda *_: True)
    monkeypatch.setattr(autotune, "_operation", force)
    engine = GraphEngine(lm.model, kernels=True)
    plain = decode(lm, some, "tad-cached", 64, refresh=16, engine="plain")
    found = decode(lm, some, "tad-cached", 64, refresh=16, batch_size=3, engine=engine)
    assert [(row.tokens, row.steps) for row in found] == [(row.tokens, row.steps) for row in plain]
    assert {kind for kind, split in made.items() if split is None} == set(by_library)
    monkeypatch.setattr(autotune, "tuned_split", lambda *_: None)
    assert GraphEngine(lm.model, kernels=True).network.few_row_ops is None


@pytest.mark.slow
def test_compiled_partials_are_reduced_where_they_are_used_and_compile_once(
    small_lm: LM, wide_lm: LM, prompts: list[list[int]]
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    engine, some, made = GraphEngine(small_lm.model, compiled=True, kernels=True), prompts[2:7], []
    for slots in (1, 3, 1):
        plain = decode(wide_lm, some, "tad-cached", 64, engine="plain")
        found = decode(small_lm, some, "tad-cached", 64, batch_size=slots, engine=engine)
        assert [row.tokens for row in found] == [row.tokens for row in plain]
        made.append(counters["stats"]["unique_graphs"])
    assert made[2] == made[1]


def test_own_kernels_serve_where_they_can(small_lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    for model, kernels, served in (
        (small_lm.model, None, False),  # no GPU
        (small_lm.model, True, True),
        (tiny("llada").model, True, False),  # no fp8
    ):
        network = GraphEngine(model, kernels=kernels).network
        assert (network.few_row_ops is not None, network.attends_few) == (served, False)
    assert [size for size in (8, 16, 96, 128, 256) if gemm.takes_heads(size)] == [16, 128]
    monkeypatch.setattr(gemm, "takes_heads", lambda _: False)
    assert GraphEngine(small_lm.model, kernels=True).network.few_row_ops is None


@given(st.integers(1, 400), st.integers(1, 300), st.sampled_from([torch.float8_e4m3fn, torch.bfloat16]))
def test_candidates_cut_the_inputs_evenly_and_occupy_the_device(
    tiles: int, blocks: int, dtype: torch.dtype
) -> None:
    weight = torch.empty(64 * tiles, 64 * blocks, dtype=dtype, device="meta")
    for config in candidates(weight):
        assert weight.shape[1] % config.block_k == 0
        programs = config.split * -(-len(weight) // config.block_n)
        assert programs >= 120
        assert config.split == 1 or programs <= 420
        assert config._replace(split=1) in (CONFIGS if dtype.itemsize == 1 else gemm.HALF_CONFIGS)
    assert usual_split(weight) in SPLITS
    assert weight.shape[1] % gemm.config_for(weight, 40, 2).block_k == 0
    assert gemm.config_for(weight, 40, 2).split == 2


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
    assert keep_best(weight, []) == usual_split(weight) > 1
    monkeypatch.setattr(autotune, "_SUM_RATE", 3e12)  # partials that are read again count
    wide = torch.empty(24576, 4096, dtype=torch.float8_e4m3fn, device="meta")
    assert keep_best(wide, [Timing(64, one, 0.050), Timing(64, one._replace(split=2), 0.049)]) == 1
    assert keep_best(wide, [Timing(64, one, 0.050), Timing(64, None, 0.051)]) == 1
    assert keep_best(wide, [Timing(64, one, 0.050), Timing(64, None, 0.049)]) is None
    assert keep_best(wide, [Timing(64, one, None), Timing(64, None, 0.049)]) is None


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
