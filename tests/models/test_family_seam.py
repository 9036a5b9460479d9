"""What a new family may change in one file: block-causal attention of its own, head_dim, q/k norm, another MLP.

The family below is made up; its layout is that of block-diffusion models (blocks on an absolute grid).
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import dream_config, tiny_model
from torch import Tensor, nn

from tad.decoding.decoders import get_decoder
from tad.decoding.engine import why_not
from tad.models import AttentionMask, BlockLayout, DreamConfig, DreamModel, block_index
from tad.models.layers import Attention, Layer, Names, RMSNorm, SwiGLU, place
from tad.models.lora import attach
from tad.models.quantize import quantize_fp8
from tad.models.qwen import NAMES
from tad.models.shape import Shape


class NormedAttention(Attention):
    """RMSNorm of every query and key head before RoPE."""

    def build(self, layer: Layer) -> None:
        super().build(layer)
        for norm in ("q_norm", "k_norm"):
            place(layer, f"self_attn.{norm}", RMSNorm(layer.shape.head_dim, layer.shape.eps))

    def heads(self, layer: Layer, path: str, x: Tensor) -> Tensor:
        heads = super().heads(layer, path, x)
        norm = {NAMES.query: "self_attn.q_norm", NAMES.key: "self_attn.k_norm"}.get(path)
        return heads if norm is None else layer.part(norm)(heads)


class TwoExperts(SwiGLU):
    """Every token goes to both; enough to show that a layer may have other projections."""

    def linears(self, names: Names, shape: Shape) -> dict[str, tuple[int, int, bool]]:
        return {
            f"mlp.experts.{i}.{side}": (shape.width, shape.width, False)
            for i in (0, 1)
            for side in ("a", "b")
        }

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        expert = [layer.part(f"mlp.experts.{i}.b")(layer.part(f"mlp.experts.{i}.a")(x)) for i in (0, 1)]
        return expert[0] + expert[1]


class BlockConfig(DreamConfig):
    block: int = 4

    @property
    def shape(self) -> Shape:
        return self.read_shape(qkv_bias=True, blocks=BlockLayout(self.block, "absolute"))


class BlockModel(DreamModel):
    config_class = BlockConfig
    attention_op = NormedAttention()

    def mlp_op(self, index: int) -> SwiGLU:
        return TwoExperts() if index else SwiGLU()


def block_model(head_dim: int = 24) -> BlockModel:
    torch.manual_seed(0)
    return BlockModel(BlockConfig(**{**dream_config().to_dict(), "head_dim": head_dim})).eval()


IDS = torch.arange(20)[None] + 40


def test_parameters_keep_the_released_names() -> None:
    state = block_model().state_dict()
    assert state["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 24, 64)
    assert state["model.layers.0.self_attn.o_proj.weight"].shape == (64, 4 * 24)
    assert state["model.layers.1.self_attn.k_norm.weight"].shape == (24,)
    assert "model.layers.0.mlp.gate_proj.weight" in state
    assert "model.layers.1.mlp.experts.1.b.weight" in state
    assert "model.layers.1.mlp.gate_proj.weight" not in state


def test_a_head_dim_in_the_config_is_the_models() -> None:
    model = tiny_model("dream", head_dim=24)
    assert model.shape.head_dim == 24
    cache = model.new_cache(1, 20)
    with torch.no_grad():
        plain = model(IDS).logits
        assert torch.allclose(model(IDS, cache=cache, cache_position=slice(0, 20)).logits, plain, atol=1e-4)


def test_a_forward_asks_the_model_for_its_mask() -> None:
    """Later blocks do not matter to earlier ones, with or without a cache, also for a batch with left padding."""
    model, changed = block_model(), IDS.clone()
    changed[:, 12:] = 7
    with torch.no_grad():
        whole = model(IDS).logits
        assert torch.allclose(whole[:, :12], model(changed).logits[:, :12], atol=1e-5)
        assert not torch.allclose(
            whole[:, 8], model(IDS[:, :10]).logits[:, 8], atol=1e-3
        )  # inside a block all see all
        cache = model.new_cache(1, 20)
        pieces = [
            model(IDS[:, at : at + 4], cache=cache, cache_position=slice(at, at + 4)).logits
            for at in range(0, 20, 4)
        ]
        assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-5)
        pad = torch.full((1, 3), 5)
        positions = torch.arange(23)[None] - 3
        mask = model.attention_mask(positions, 0, real=positions >= 0)
        padded = model(torch.cat((pad, IDS), 1), position_ids=positions.clamp(min=0), mask=mask).logits
        assert torch.allclose(padded[:, 3:], whole, atol=1e-5)


def test_adapters_and_fp8_ask_the_layers_for_their_projections() -> None:
    model = block_model(head_dim=16)
    quantize_fp8(model)
    assert not any(type(layer.get_submodule(path)) is nn.Linear for layer, path in model.projections())
    model = block_model()
    attach(model, rank=2)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {f"model.layers.{layer.index}.{path}" for layer, path in model.projections()}


def test_the_engine_declines_what_it_does_not_know() -> None:
    decoder = get_decoder("one-by-one")
    assert why_not(tiny_model("dream"), decoder) is None
    assert why_not(block_model(), decoder) is not None
    model = tiny_model("dream")
    model.layers()[1].mlp_op = TwoExperts()
    assert why_not(model, decoder) is not None


def test_a_schedule_may_be_block_causal_on_a_model_that_is_not() -> None:
    model = tiny_model("llada")
    positions = torch.arange(20)
    assert model.attention_mask(positions) == AttentionMask.full()
    mask = model.attention_mask(positions, prompt_len=6, layout=BlockLayout(8))
    assert mask.blocks is not None
    assert mask.blocks.tolist() == [[0] * 6 + [1] * 8 + [2] * 6]


@given(st.integers(0, 12), st.integers(0, 9), st.integers(1, 9), st.integers(1, 30))
def test_block_index_is_the_same_however_the_row_is_padded(
    pad: int, prompt: int, size: int, length: int
) -> None:
    positions = torch.arange(pad + prompt + length) - pad
    for grid in ("answer", "absolute"):
        found = block_index(positions, prompt, size, grid)[pad:].tolist()
        start = 0 if grid == "absolute" else prompt
        wanted = [
            0 if i < start else (i - start) // size + (grid == "answer") for i in range(prompt + length)
        ]
        assert found == wanted
    columns = torch.arange(pad + prompt + length)
    assert torch.equal(block_index(columns, pad + prompt, size), block_index(positions, prompt, size))
