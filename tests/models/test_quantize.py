"""FP8 weights: rounding, what is replaced and what is refused. The product is simulated where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import tiny_model
from torch import nn

from tad.errors import TadError
from tad.models.quantize import FP8, Fp8Linear, fp8_linear, quantize_fp8, to_fp8

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


def test_a_product_is_near_the_exact_one_in_every_channel() -> None:
    linear = nn.Linear(256, 4)
    linear.weight.data = values(4, 256) * torch.tensor([1e-4, 1.0, 1e4, 1.0])[:, None]
    x = values(3, 32, 256, seed=1)
    with torch.no_grad():
        found, wanted = Fp8Linear(linear)(x), linear(x)
    assert (found.shape, found.dtype) == (wanted.shape, x.dtype)
    assert ((found - wanted).flatten(0, 1).norm(dim=0) < 0.06 * wanted.flatten(0, 1).norm(dim=0)).all()


def test_the_product_is_that_of_the_rounded_values() -> None:
    x, weight = values(4, 32), values(16, 32, seed=1)
    rows, row_scale = to_fp8(x)
    small, scale = to_fp8(weight)
    wanted = (rows.float() * row_scale) @ (small.float() * scale).t()
    torch.testing.assert_close(fp8_linear(x, small, scale[:, 0]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_quantized_model_is_near_its_original_and_a_quarter_the_size_in_its_layers(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        before = model(IDS).logits
        quantize_fp8(model)
        after = model(IDS).logits
    assert 0 < (after - before).norm() < 0.1 * before.norm()
    for layer, path in model.projections():
        module = layer.get_submodule(path)
        assert isinstance(module, Fp8Linear)
        assert module.weight.dtype == FP8
    assert model.get_submodule(model.names.head).weight.dtype == torch.float32
    assert model.dtype == torch.float32


def test_an_adapter_must_be_merged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from tad.models import lora

    model = tiny_model("llada")
    lora.attach(model, rank=2)
    with pytest.raises(TadError, match="of layer 0"):
        quantize_fp8(model)


def test_odd_sizes_are_refused() -> None:
    model = tiny_model("llada", mlp_hidden_size=120)
    with pytest.raises(TadError, match="120 x 64"):
        quantize_fp8(model)
