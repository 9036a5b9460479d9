"""The engine's kernels on a GPU against what they compute by definition: split-K GEMMs, add + RMSNorm, RoPE with the KV write,
attention to a run of positions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "decoding"))
from parity_models import tiny

from tad.decoding.engine import add_norm, autotune, gemm
from tad.decoding.engine.layout import Spans
from tad.decoding.engine.rope import apply_rope_and_write
from tad.decoding.engine.weights import Projection
from tad.models.quantize import to_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Outputs and inputs of the projections of LLaDA-8B and Dream-7B, and an odd number of outputs.
GEMMS = [(12288, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4608, 3584), (512, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (1000, 4096)]  # fmt: skip


def draw_projection(n: int, k: int, biased: bool, small: bool = True) -> tuple[Projection, Tensor]:
    """A projection with fp8 or bf16 weights, and its weights in fp32."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    bias = torch.randn(n, generator=generator, device="cuda").bfloat16() if biased else None
    drawn = torch.randn(n, k, generator=generator, device="cuda")
    if not small:
        return Projection(drawn.bfloat16(), None, bias), drawn.bfloat16().float()
    codes, scale = to_fp8(drawn)
    return Projection(codes, scale[:, 0].contiguous(), bias), codes.float() * scale


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("small", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("shape", GEMMS, ids=str)
@torch.inference_mode()
def test_split_k_gemms_are_gemms(shape: tuple[int, int], small: bool) -> None:
    by, wide = draw_projection(*shape, shape[1] == 3584, small)
    for rows in (1, 17, 32, 64):
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        wanted = x.float() @ wide.T + (0 if by.bias is None else by.bias.float())
        for split in {1, 3, gemm.usual_split(by.weight)}:
            found = gemm.split_k_project(split, torch.bfloat16)(x, by)
            assert found.dtype == torch.bfloat16
            assert relative_error(found, wanted) < 4e-3, (
                f"{rows} rows in {split} splits"
            )  # bf16 rounds to 2e-3


@pytest.mark.parametrize("rows", [9, 32, 50])
@pytest.mark.parametrize("config", [*gemm.CONFIGS, *gemm.HALF_CONFIGS], ids=str)
@torch.inference_mode()
def test_every_config_gives_the_gemm(config: gemm.KernelConfig, rows: int) -> None:
    by, wide = draw_projection(1000, 1024, False, config in gemm.CONFIGS)
    x = torch.randn(rows, 1024, device="cuda").to(torch.bfloat16 if by.scale is None else torch.float16)
    partials = gemm.gemm_partials(x, by.weight, by.scale, torch.bfloat16, config._replace(split=3))
    assert partials.shape == (3, rows, 1000)
    assert relative_error(partials.sum(0), x.float() @ wide.T) < 1e-4


@pytest.mark.parametrize("width", [4096, 3584])
@pytest.mark.parametrize("split", [1, 8])
@torch.inference_mode()
def test_add_norm_of_partials_is_that_of_the_layers(width: int, split: int) -> None:
    x, partials = (
        torch.randn(33, width, device="cuda").bfloat16(),
        torch.randn(split, 33, width, device="cuda"),
    )
    weight = torch.randn(width, device="cuda").bfloat16()
    partials = partials.bfloat16() if split == 1 else partials
    wanted = add_norm.add(x, partials.float().sum(0).bfloat16())
    for dtype in (torch.bfloat16, torch.float16):
        summed, normed = add_norm.add_norm(x, partials, weight, 1e-5, dtype)
        assert normed.dtype == dtype
        assert relative_error(summed, wanted.float()) < 1e-4
        assert relative_error(normed, add_norm.rms_norm(summed, weight, 1e-5).float()) < 1e-3


@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
@pytest.mark.parametrize("split", [1, 3])
@torch.inference_mode()
def test_rotated_queries_and_written_keys_are_those_of_the_layers(family: str, split: int) -> None:
    shape = tiny(family).model.shape
    own, theirs, dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.head_dim
    partials = torch.randn(split, 21, own + 2 * theirs, device="cuda")
    partials = partials.bfloat16() if split == 1 else partials
    bias = torch.randn(own + 2 * theirs, device="cuda").bfloat16() if shape.qkv_bias else None
    norms = list(torch.randn(2, dim, device="cuda").bfloat16()) if shape.qk_norm else None
    cos, sin = torch.randn(2, 21, 1, dim, device="cuda")
    kv_index = torch.randperm(40, device="cuda")[:21]
    results = []
    for on in ("cuda", "cpu"):
        keys, values = torch.zeros(2, 40, shape.kv_heads, dim, device=on).bfloat16()
        given = [None if part is None else part.to(on) for part in (partials, bias)]
        weights = None if norms is None else [norm.to(on) for norm in norms]
        table = (part.to(on) for part in (cos, sin, kv_index))
        results.append((apply_rope_and_write(*given, weights, *table, keys, values, shape), keys, values))
    for found, wanted in zip(*results, strict=True):
        # A norm that rounds at the edge of two numbers of bf16 may take the other one.
        assert relative_error(found.cpu(), wanted.float()) < (1e-4 if norms is None else 1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_small_weights_are_widened_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[[127, 255]] = 0  # not numbers in fp8
    weight = codes.view(dtype)[:, None].expand(256, 64).contiguous()
    scale, x = torch.ones(256, device="cuda"), torch.eye(64, device="cuda").half()
    for config in gemm.CONFIGS:
        if config.block_k == 64:
            partials = gemm.gemm_partials(x, weight, scale, torch.bfloat16, config)
            assert torch.equal(partials[0], weight.bfloat16().T)


@torch.inference_mode()
def test_split_k_gemms_can_be_captured_and_repeat_exactly() -> None:
    by, _ = draw_projection(4096, 4096, biased=False)
    x, project = (
        torch.randn(64, 4096, device="cuda").bfloat16(),
        gemm.split_k_project(4, torch.bfloat16),
    )
    wanted = project(x, by)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = project(x, by)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("small", [True, False], ids=["fp8", "bf16"])
@torch.inference_mode()
def test_tuning_finds_a_config_and_says_what_failed(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "chosen", {})
    monkeypatch.setattr(autotune, "_SPLITS", {})
    some = [draw_projection(4096, 4096, False, small)[0]] * 2
    timings = autotune.tune(some, torch.bfloat16)
    assert [timing for timing in timings if timing.ms is None] == []
    assert any(timing.config is None for timing in timings) is not small
    if autotune.tuned_split(some, torch.bfloat16) is None:
        assert (small, gemm.chosen) == (False, {})  # the library was faster
        return
    assert {key[-2] for key in gemm.chosen} == {32, 64}
    assert {autotune.tuned_split(some, torch.bfloat16)} == {key[-1] for key in gemm.chosen}


def by_definition(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, room: int) -> Tensor:
    """What `attend_spans` computes, a slot at a time."""
    out = torch.zeros(len(query), query[0].numel(), device="cuda")
    place = torch.arange(room, device="cuda")
    for slot, (first, count, start) in enumerate(zip(*(part.tolist() for part in spans[:3]), strict=True)):
        own, theirs = slice(first, first + count), slice(slot * room, (slot + 1) * room)
        asked = query[own].transpose(0, 1)[None].float()
        seen = (part[theirs].transpose(0, 1)[None].float() for part in (keys, values))
        mask = (place >= start) & (place < spans.end[own, None])
        found = F.scaled_dot_product_attention(asked, *seen, attn_mask=mask, enable_gqa=True)
        out[own] = found[0].transpose(0, 1).flatten(1)
    return out


@pytest.mark.parametrize("heads", [(32, 32), (28, 4)])
@torch.inference_mode()
def test_our_attention_is_attention_to_a_run_of_positions(heads: tuple[int, int]) -> None:
    from tad.decoding.engine.kernels import FEW, MANY, ROWS, attend_spans

    for counts, room in (([200], 385), ([33], 101), ([1], 18), ([32, 0, 4, 32], 450), ([130, 384], 500)):
        count = torch.tensor(counts, device="cuda")
        start = torch.arange(len(counts), device="cuda") * 3
        first, total = count.cumsum(0) - count, sum(counts)
        # As under a block-causal mask: some see less than others.
        row = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), count)
        end = (start[row] + 1 + (torch.arange(total, device="cuda") - first[row]) // 4 * 37).clamp(
            max=room - 1
        )
        spans = Spans(first, count, start, end)
        sizes = ((total, heads[0]), (len(counts) * room, heads[1]), (len(counts) * room, heads[1]))
        draw = [torch.randn(*size, 128, device="cuda").bfloat16() for size in sizes]
        wanted = by_definition(*draw, spans, room)
        for config in (FEW, ROWS, MANY):
            for dtype in (torch.bfloat16, torch.float16):
                found = attend_spans(*draw, spans, max(counts), room, dtype, config)
                assert relative_error(found, wanted) < 1e-2
