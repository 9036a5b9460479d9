"""Frozen projections with an fp8 forward: values, gradients, compiled and checkpointed, and a run that leaves no trace of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_store import read_log, recipe, same_weights, stopped
from torch import nn

import tad
from tad.errors import TadError
from tad.models import LLaDAConfig
from tad.models.lora import attach
from tad.models.quantize import fp8_linear, to_fp8
from tad.models.shapes import build
from tad.runs.fingerprint import fingerprint_model
from tad.training.distill import build_module, build_objective, distill
from tad.training.fp8_base import Fp8BaseLinear, fp8_buffers, quantize_base, restore_base
from tad.training.objectives.module import adapters_off, checkpoint_layers
from tad.training.weights import detach

WEIGHTS = "adapter_model.safetensors"
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


def frozen_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 32).requires_grad_(False)


def adapted_model(dtype: torch.dtype = torch.float32, hidden: int = 48, dropout: float = 0.0) -> Any:
    """A tiny model with adapters in fp32 that do something."""
    config = LLaDAConfig.from_sizes(
        width=32, layers=2, heads=2, kv_heads=2, mlp=hidden, vocab=48, context=64, mask_token_id=46, eos_token_id=47,
        pad_token_id=47,
    )  # fmt: skip
    model = build(config, "cpu", dtype, 0)
    attach(model, 4, dropout=dropout)
    draws = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
            if ".lora_B." in name:
                weight.data.normal_(0, 0.05, generator=draws)
    return model.train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of a made-up loss of the logits, for the adapters."""
    model.zero_grad()
    weight = torch.randn(48, generator=torch.Generator().manual_seed(2))
    (model(IDS).logits.float() * weight).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Between two gradients, relative to the second."""
    apart = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    return (apart / sum(float(value.double().square().sum()) for value in right.values())) ** 0.5


# The product


def test_forward_is_the_fp8_product_and_the_gradient_is_the_plain_maps() -> None:
    linear = frozen_linear()
    fp8 = Fp8BaseLinear(linear)
    x = torch.randn(3, 5, 64, requires_grad=True)
    again = x.detach().clone().requires_grad_(True)
    given = torch.randn(3, 5, 32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = fp8(x)
    assert [tensor.data_ptr() for tensor in kept] == [linear.weight.data_ptr()]  # nothing else for backward
    plain = linear(again)
    small, scale = to_fp8(linear.weight)
    assert torch.equal(out, fp8_linear(x.detach(), small, scale[:, 0], linear.bias))
    assert not torch.equal(out, plain)
    out.backward(given)
    plain.backward(given)
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-6, atol=1e-6)
    assert linear.weight.grad is None
    assert fp8.state_dict().keys() == linear.state_dict().keys()


def test_an_input_of_another_dtype_is_multiplied_in_the_weights() -> None:
    linear = frozen_linear().to(torch.bfloat16)
    x = torch.randn(4, 64, requires_grad=True)
    out = Fp8BaseLinear(linear)(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32


# The model


def test_student_and_teacher_change_little_and_the_gradient_keeps_its_direction() -> None:
    model = adapted_model()
    with torch.no_grad(), adapters_off(model):
        base = model(IDS).logits
    want = gradients(model)
    quantize_base(model)
    with torch.no_grad(), adapters_off(model):
        assert 0 < (model(IDS).logits - base).norm() < 0.1 * base.norm()
    assert 0 < distance(gradients(model), want) < 0.2
    assert sum(isinstance(part, Fp8BaseLinear) for part in model.modules()) == 14
    restore_base(model)
    assert distance(gradients(model), want) == 0
    assert fp8_buffers(model) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [0, 2])  # activations kept, or checkpointed in every other layer
def test_compiled_layers_have_the_same_gradient(dtype: torch.dtype, every: int) -> None:
    model = adapted_model(dtype)
    quantize_base(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        want = gradients(model)
        checkpoint_layers(model, every)
        for layer in model.layers():
            layer.compile(dynamic=False, fullgraph=not every)
        with torch.no_grad(), adapters_off(model):
            model(IDS)
        found = gradients(model)
    torch._dynamo.reset()
    # In fp32 the sums differ in their last bits, and an input on the edge of two fp8 values may fall to either side.
    assert distance(found, want) < (1e-4 if dtype == torch.float32 else 0.05)


def test_a_map_without_an_adapter_is_refused() -> None:
    model = adapted_model()
    plain = model.layers()[1].get_submodule(model.layers()[1].projections[0])
    plain.base_layer = nn.Identity()
    with pytest.raises(TadError, match=r"^fp8_base_forward: .* of layer 1"):
        quantize_base(model)


def test_odd_shapes_are_refused_before_anything_is_changed() -> None:
    model = adapted_model(hidden=40)
    with pytest.raises(TadError, match=r"^fp8_base_forward: .* 40 x 32"):
        quantize_base(model)
    assert fp8_buffers(model) == []


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "Old GPU"), ("mps", "mps")],
)
def test_devices_without_fp8_are_refused(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted_model()
    monkeypatch.setattr(type(model), "device", torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(TadError, match=f"^fp8_base_forward: .*{message}"):
        quantize_base(model)


# A run


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_log(run)]


def test_a_run_is_near_the_plain_one_resumes_bit_equal_and_leaves_a_plain_base_and_an_ordinary_adapter(
    run: Path, world: Path, tmp_path: Path
) -> None:
    lm, values = tad.load(world / "base", device="cpu"), recipe(world, fp8_base_forward=True)
    before = fingerprint_model(lm)
    distill(values, tmp_path / "whole", lm=lm, quiet=True)
    detach(lm)
    assert fingerprint_model(lm) == before
    assert not any(isinstance(part, Fp8BaseLinear) for part in lm.model.modules())
    assert losses(tmp_path / "whole") != losses(run)
    assert losses(tmp_path / "whole") == pytest.approx(losses(run), rel=0.05)
    plain, fp8 = (load_file(folder / "adapter" / WEIGHTS) for folder in (run, tmp_path / "whole"))
    assert {name: (v.shape, v.dtype) for name, v in fp8.items()} == {
        name: (v.shape, v.dtype) for name, v in plain.items()
    }
    parts = stopped(tmp_path / "whole", tmp_path / "parts", 4)
    with pytest.raises(TadError, match=r"checkpoint-4: .*fp8_base_forward=True"):
        distill(recipe(world), parts, resume=True, quiet=True)
    assert distill(values, parts, resume=True, quiet=True).finished
    assert same_weights(tmp_path / "whole" / "adapter", parts / "adapter")


def test_processes_do_not_send_each_other_fp8_weights(world: Path) -> None:
    lm = tad.load(world / "base", device="cpu")
    values = recipe(world, fp8_base_forward=True)
    module = build_module(values, lm, build_objective(values, lm), bf16=False)
    ignored = set(module._ddp_params_and_buffers_to_ignore)
    small = {name for name, value in module.named_buffers() if value.dtype == torch.float8_e4m3fn}
    assert small
    assert small < ignored <= set(dict(module.named_buffers()))
