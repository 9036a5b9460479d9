"""The forward: where the head runs, hidden states, embeddings, gradient checkpointing, compilation."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import ALL, tiny_model

from tad.models import AttentionMask, MaskedDiffusionModel
from tad.models.layers import RMSNorm, rotary_table, rotate

FAMILIES = ("llada", "dream")
IDS = torch.randint(0, 290, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> MaskedDiffusionModel:
    return tiny_model(request.param)


@pytest.mark.parametrize("family", ALL)
def test_logits_at_are_the_full_logits_at_those_positions(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        full = model(IDS).logits
        for wanted in (torch.tensor([3, 7, 7]), torch.tensor([[3, 7, 7], [0, 23, 5]])):
            rows = wanted.expand(2, -1)
            expected = torch.stack([full[row, rows[row]] for row in range(2)])
            torch.testing.assert_close(model(IDS, logits_at=wanted).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("full", "sdpa"),
        ("padded", "sdpa"),
        ("block-causal", "sdpa"),
        ("block-causal", "flex_attention"),
        ("block-causal for all rows", "sdpa"),
    ],
)
def test_outputs_wanted_at_some_positions_are_those_of_the_whole_forward(
    model: MaskedDiffusionModel, kind: str, attention: str
) -> None:
    keys = torch.arange(24) >= torch.tensor([[4], [0]])
    blocks = (torch.arange(24) // 8)[None]
    rule = {
        "full": AttentionMask(),
        "padded": AttentionMask(keys),
        "block-causal": AttentionMask(keys, blocks.expand(2, -1)),
        "block-causal for all rows": AttentionMask(blocks=blocks),
    }[kind]
    model.set_attn_implementation(attention)
    wanted = torch.tensor([[5, 23, 9], [0, 12, 11]])
    with torch.no_grad():
        full = model(IDS, mask=rule, head=False).hidden
        some = model(IDS, mask=rule, logits_at=wanted, head=False).hidden
    model.set_attn_implementation("sdpa")
    expected = torch.stack([full[row, wanted[row]] for row in range(2)])
    torch.testing.assert_close(some, expected, rtol=1e-5, atol=1e-5)


def test_a_cached_forward_writes_all_that_it_is_fed_wherever_outputs_are_wanted(
    model: MaskedDiffusionModel,
) -> None:
    caches = []
    with torch.no_grad():
        for wanted in (None, torch.tensor([1])):
            caches.append(model.new_cache(2, 24))
            model(IDS, cache=caches[-1], cache_position=slice(0, 24))
            model(IDS[:, :8] + 1, cache=caches[-1], cache_position=slice(8, 16), logits_at=wanted)
    for one, other in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        assert torch.equal(one, other)


def test_gradients_reach_every_weight_where_outputs_are_wanted_at_some_positions(
    model: MaskedDiffusionModel,
) -> None:
    wanted, gradients = torch.tensor([[5, 23], [0, 12]]), []
    for trimmed in (True, False):
        model.zero_grad()
        out = model(IDS, logits_at=wanted if trimmed else None).logits
        if not trimmed:
            out = out.gather(1, wanted[:, :, None].expand(-1, -1, out.shape[-1]))
        out.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_head_and_the_last_mlp_run_only_where_asked(model: MaskedDiffusionModel) -> None:
    seen = []
    downs = (layer.part(layer.names.down) for layer in (model.layers()[0], model.layers()[-1]))
    for module in (*downs, model.get_submodule(model.names.head)):
        module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    model(IDS, logits_at=torch.tensor([1, 2]))
    assert seen == [24, 2, 2]
    output = model(IDS, head=False)
    assert seen == [24, 2, 2, 24, 24]
    assert output.logits is None
    assert torch.equal(model.head(output.hidden), model(IDS).logits)
    embedded = model.get_input_embeddings()(IDS)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(IDS).logits)


def test_positions_default_to_counting_and_matter_only_relatively(model: MaskedDiffusionModel) -> None:
    with torch.no_grad():
        plain = model(IDS).logits
        assert torch.equal(model(IDS, position_ids=torch.arange(24)[None]).logits, plain)
        torch.testing.assert_close(
            model(IDS, position_ids=torch.arange(24)[None] + 7).logits, plain, rtol=1e-4, atol=1e-3
        )
        assert not torch.allclose(
            model(IDS, position_ids=torch.arange(24)[None] * 2).logits, plain, atol=1e-2
        )


def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(model: MaskedDiffusionModel) -> None:
    model.train()
    gradients, calls = [], []
    model.layers()[0].part(model.names.attn_out).register_forward_hook(lambda *args: calls.append(1))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(IDS).logits.logsumexp(-1).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert len(calls) == 3
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(model: MaskedDiffusionModel, dtype: torch.dtype) -> None:
    with torch.no_grad():
        full = model(IDS).logits
        half = model.to(dtype)(IDS).logits
    assert half.dtype == dtype
    assert (half.float() - full).abs().max() <= 0.1 * full.abs().max()


def test_the_forward_compiles_without_graph_breaks_with_and_without_a_cache() -> None:
    torch._dynamo.reset()
    model = tiny_model("dream", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rule = AttentionMask(torch.ones(2, 24, dtype=torch.bool), (torch.arange(24) // 8)[None].expand(2, -1))
    with torch.no_grad():
        for options in ({}, {"mask": rule, "logits_at": torch.tensor([4, 5])}):
            torch.testing.assert_close(compiled(IDS, **options).logits, model(IDS, **options).logits)
        for at in (slice(8, 16), torch.tensor([[3, 4, -1], [7, 20, 21]])):
            fed = IDS[:, at] if isinstance(at, slice) else IDS.gather(1, at.clamp(min=0))
            found = []
            for runner in (model, compiled):
                cache = model.new_cache(2, 24)
                model(IDS, cache=cache, cache_position=slice(0, 24))
                logits = runner(fed + 1, cache=cache, cache_position=at).logits
                found.append((logits, *(part[..., :24, :] for part in (*cache.keys, *cache.values))))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_compiled_forward_has_a_backward() -> None:
    """aot_eager traces the backward as well, which `eager` does not."""
    torch._dynamo.reset()
    model = tiny_model("dream", num_hidden_layers=1)
    gradients = []
    for runner in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        runner(IDS).logits.logsumexp(-1).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_llada_rotates_in_fp32_and_dream_in_the_models_dtype() -> None:
    """Golden data is fp32, where both are the same; the released models run in bf16, where they are not."""
    x = torch.randn(1, 4, 24, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    frequencies = {}
    for family in FAMILIES:
        shape = tiny_model(family).shape
        cos, sin = rotary_table(torch.arange(24)[None], shape, torch.bfloat16)
        frequencies[family] = cos.dtype
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        angles = torch.arange(24.0)[:, None] / shape.theta ** (torch.arange(0, 16, 2) / 16)
        c, s = angles.cos().to(cos.dtype), angles.sin().to(cos.dtype)
        wanted = torch.cat((first * c - second * s, second * c + first * s), dim=-1).bfloat16()
        assert torch.equal(rotate(x, cos, sin), wanted)
    assert frequencies == {"llada": torch.float32, "dream": torch.bfloat16}


def test_the_norm_rounds_before_it_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(64, 1e-5).bfloat16()
    norm.weight.data = torch.rand(64, generator=generator).bfloat16() + 0.5
    x = torch.randn(8, 64, generator=generator).bfloat16()
    wide = x.float()
    normed = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16()
    assert (norm(x) == norm.weight * normed).float().mean() > 0.99  # sqrt and rsqrt may round apart
    rounded_once = (
        norm.weight.float() * wide * wide.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    ).bfloat16()
    assert (norm(x) == rounded_once).float().mean() < 0.9


def test_left_to_right_generation_is_refused(model: MaskedDiffusionModel) -> None:
    from tad.errors import TadError

    assert not model.can_generate()
    with pytest.raises(TadError, match="decoder"):
        model.prepare_inputs_for_generation(IDS)
