"""Smaller weights: rounding, what is replaced and what is refused. The fp8 product is simulated where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import tiny_model
from torch import nn

from tad.errors import TadError
from tad.models.quantize import (
    FP8,
    GROUP,
    KINDS,
    Int4Linear,
    Kind,
    QuantizedLinear,
    fp8_linear,
    quantize,
    to_fp8,
    widen_int4,
)

IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_row_is_rounded_relative_to_its_own_largest_value() -> None:
    rows = values(6, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]
    small, scale = to_fp8(rows)
    assert small.dtype == FP8
    assert scale.shape == (6, 1)
    again = small.float() * scale
    # e4m3 has three bits behind the leading one; far below the largest value the steps are even.
    error = (again - rows).abs()
    assert (error <= rows.abs() / 16 + rows.abs().amax(-1, keepdim=True) / 448 / 512).all()
    assert torch.equal(again[5], torch.zeros(64))
    assert torch.allclose(again.abs().amax(-1), rows.abs().amax(-1), rtol=1e-6)


# How far a product may be from the exact one, over its norm: three bits behind the leading one; 7 bits; 4 bits.
ERROR: dict[Kind, float] = {"fp8": 0.06, "int8": 0.012, "int4": 0.12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_near_the_exact_one_in_every_channel(kind: Kind, dtype: torch.dtype) -> None:
    linear = nn.Linear(256, 4).to(dtype)
    linear.weight.data = (values(4, 256) * torch.tensor([1e-4, 1.0, 1e4, 0.0])[:, None]).to(dtype)
    x = values(3, 32, 256, seed=1).to(dtype)
    with torch.no_grad():
        found, wanted = KINDS[kind](linear)(x), linear(x)
    assert (found.shape, found.dtype) == (wanted.shape, x.dtype)
    distance = (found - wanted).float().flatten(0, 1).norm(dim=0)
    assert (distance[:3] < ERROR[kind] * wanted.float().flatten(0, 1).norm(dim=0)[:3]).all()
    assert distance[3] == 0


def test_every_group_of_int4_has_steps_of_its_own() -> None:
    linear = nn.Linear(4 * GROUP, 8, bias=False)
    size = torch.tensor([1e-3, 1.0, 1e3, 0.0]).repeat_interleave(GROUP)
    linear.weight.data = values(8, 4 * GROUP) * size + 5 * size  # far from zero: the offset is needed
    small = Int4Linear(linear)
    assert small.weight.nbytes == linear.weight.numel() / 2
    groups = linear.weight.detach().unflatten(1, (4, GROUP))
    error = (widen_int4(small.weight, small.scale).view_as(groups) - groups).abs().amax(-1)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    assert (error <= 0.501 * step).all()


def test_the_product_is_that_of_the_rounded_values() -> None:
    x, weight = values(4, 32), values(16, 32, seed=1)
    rows, row_scale = to_fp8(x)
    small, scale = to_fp8(weight)
    wanted = (rows.float() * row_scale) @ (small.float() * scale).t()
    torch.testing.assert_close(fp8_linear(x, small, scale[:, 0]), wanted, rtol=1e-4, atol=1e-4)


# The size of the layers' weights over that in fp32, with scales.
SIZE: dict[Kind, float] = {"fp8": 1 / 4, "int8": 1 / 4, "int4": 1 / 8 + 2 / GROUP}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_quantized_model_is_near_its_original_and_smaller_in_its_layers(
    family: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(family)
    plain = sum(layer.get_submodule(path).weight.nbytes for layer, path in model.projections())
    with torch.no_grad():
        before = model(IDS).logits
        quantize(model, kind)
        after = model(IDS).logits
    assert 0 < (after - before).norm() < 2 * ERROR[kind] * before.norm()
    modules = [layer.get_submodule(path) for layer, path in model.projections()]
    assert all(isinstance(module, QuantizedLinear) for module in modules)
    bytes_per_channel = 0 if kind == "int4" else 4
    scales = sum(bytes_per_channel * len(module.scale) for module in modules)
    held = sum(module.weight.nbytes + module.scale.nbytes for module in modules)
    assert held == SIZE[kind] * plain + scales
    assert model.get_submodule(model.names.head).weight.dtype == torch.float32
    assert model.dtype == torch.float32
    assert ("points" in caplog.text) == (kind == "fp8")  # what was measured to cost accuracy says so


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_must_be_merged_before(kind: Kind) -> None:
    from tad.models import lora

    model = tiny_model("llada")
    lora.attach(model, rank=2)
    with pytest.raises(TadError, match="of layer 0"):
        quantize(model, kind)


@pytest.mark.parametrize(("kind", "named"), [("fp8", "120 x 64"), ("int4", "120 inputs")])
def test_odd_sizes_are_refused(kind: Kind, named: str) -> None:
    model = tiny_model("llada", mlp_hidden_size=120)
    with pytest.raises(TadError, match=named):
        quantize(model, kind)
