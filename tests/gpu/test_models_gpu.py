"""The 8B shapes on a GPU: built in place, one forward, compiled against eager, FlexAttention against SDPA."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tad
from tad.models import AttentionMask, DreamConfig, LLaDAConfig, MaskedDiffusionModel
from tad.models.shapes import build, shape_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = 384


def need_memory(gigabytes: int) -> None:
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, {free:.0f} GB are free")


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def ids_for(model: MaskedDiffusionModel, length: int = LENGTH, batch: int = 1) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return torch.randint(0, model.shape.vocab, (batch, length), device="cuda", generator=generator)


def small(family: str, dtype: torch.dtype = torch.float32) -> MaskedDiffusionModel:
    config = (
        LLaDAConfig(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, mlp_hidden_size=512, vocab_size=1000)
        if family == "llada"
        else DreamConfig(
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=512,
            vocab_size=1000,
        )
    )
    return build(config, "cuda", dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_an_8b_shape_is_built_on_the_device_and_runs_384_tokens(name: str) -> None:
    need_memory(20)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build(shape_config(name), "cuda", torch.bfloat16)
    weights = sum(weight.nbytes for weight in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.1 * weights
    with torch.no_grad():
        logits = model(ids_for(model)).logits
    assert logits.shape == (1, LENGTH, model.shape.vocab)
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_a_compiled_8b_forward_is_as_near_to_fp32_as_the_eager_one(name: str) -> None:
    """Two bf16 computations differ by rounding; each is held to fp32 on the same weights."""
    need_memory(60)
    model = build(shape_config(name), "cuda", torch.bfloat16)
    ids = ids_for(model)
    with torch.no_grad():
        eager = model(ids).logits
        compiled = torch.compile(model, fullgraph=True)(ids).logits
        truth = copy.deepcopy(model).float()(ids).logits
    assert error(eager, truth) < 0.1
    assert error(compiled, truth) < 2 * error(eager, truth)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_compiled_equals_eager_in_fp32_with_and_without_a_cache(family: str) -> None:
    model = small(family)
    compiled = torch.compile(model, fullgraph=True)
    ids = ids_for(model, 96, batch=2)
    at = torch.tensor([[3, 40, -1], [95, 0, 7]], device="cuda")
    with torch.no_grad():
        assert error(compiled(ids).logits, model(ids).logits) < 1e-4
        found = []
        for runner in (model, compiled):
            cache = model.new_cache(2, 96)
            model(ids, cache=cache, cache_position=slice(0, 96))
            found.append(runner(ids.gather(1, at.clamp(min=0)), cache=cache, cache_position=at).logits)
    assert error(found[1], found[0]) < 1e-4


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("padded", [False, True])
def test_flex_attention_agrees_with_sdpa(family: str, padded: bool) -> None:
    model = small(family)
    ids = ids_for(model, 200, batch=2)
    keys = torch.ones(2, 200, dtype=torch.bool, device="cuda")
    keys[1, 150:] = not padded
    rule = AttentionMask(keys, (torch.arange(200, device="cuda") // 32)[None].repeat(2, 1))
    with torch.no_grad():
        dense = model(ids, mask=rule).logits
        model.set_attn_implementation("flex_attention")
        assert error(model(ids, mask=rule).logits[keys], dense[keys]) < 2e-3  # its kernel may use TF32


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_cached_forward_equals_the_full_one(family: str) -> None:
    model = small(family)
    ids = ids_for(model, 128, batch=2)
    cache = model.new_cache(2, 128)
    with torch.no_grad():
        full = model(ids, cache=cache, cache_position=slice(0, 128)).logits
        block = model(ids[:, 32:64], cache=cache, cache_position=slice(32, 64)).logits
    assert error(block, full[:, 32:64]) < 1e-4


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_query_that_sees_nothing_spoils_nobody(dtype: torch.dtype) -> None:
    model = small("llada", dtype)
    ids = ids_for(model, 64)
    keys = torch.arange(64, device="cuda")[None] >= 16
    with torch.no_grad():
        logits = model(ids, mask=AttentionMask(keys, torch.where(keys, 0, -1))).logits
        wanted = model(ids, mask=AttentionMask(keys)).logits
    assert logits[keys].isfinite().all()
    assert error(logits[keys], wanted[keys]) < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_gpu_and_cpu_agree_in_fp32(family: str) -> None:
    model = small(family)
    ids = ids_for(model, 64)
    with torch.no_grad():
        on_gpu = model(ids).logits.cpu()
        on_cpu = model.cpu()(ids.cpu()).logits
    assert error(on_gpu, on_cpu) < 1e-3


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_quantized_model_loads_without_its_unrounded_weights_on_the_device(
    tmp_path: Path, kind: Any, clean: None
) -> None:
    config = LLaDAConfig(
        d_model=1024,
        n_layers=12,
        n_heads=16,
        mlp_hidden_size=2048,
        vocab_size=1024,
        mask_token_id=3,
        eos_token_id=1,
        pad_token_id=1,
    )
    plain = build(config, "cpu", torch.bfloat16)
    plain.save_pretrained(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lm = tad.load(tmp_path, device="cuda", quantize=kind)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    size = sum(weight.nbytes for weight in plain.parameters())
    one = 1024 * 2048
    assert held < 0.6 * size
    assert peak < held + 20 * one  # one weight as it was, and in fp32 while it is rounded
    ids = ids_for(lm.model, 64)
    with torch.no_grad():
        found, wanted = lm.model(ids).logits, plain(ids.cpu()).logits
    assert error(found.cpu(), wanted) < {"fp8": 0.15, "int8": 0.05, "int4": 0.3}[kind]
