"""What `tad info` knows without loading weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import FIRST_SPECIAL, edit_json, tiny_model, write_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tad
from tad.errors import TadError
from tad.models.info import describe, describe_shape
from tad.models.shapes import build, forward_cost, shape_config


@pytest.mark.parametrize(
    ("name", "parameters", "targets"),
    [
        (
            "llada-8b",
            8_015_581_184,
            ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out"),
        ),
        (
            "dream-7b",
            7_615_616_512,
            (
                *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
                *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            ),
        ),
    ],
)
def test_the_released_shapes(name: str, parameters: int, targets: tuple[str, ...]) -> None:
    facts = describe_shape(name)
    assert (facts.parameters, facts.lora_targets, facts.dtype) == (parameters, targets, "bfloat16")
    embedding = facts.vocabulary * facts.width
    assert facts.cost.weight_bytes == 2 * (parameters - embedding)


def test_the_illada_shape_is_llada_with_grouped_keys_and_a_tied_head(tmp_path: Path) -> None:
    from tad.models import LLaDAConfig

    config = LLaDAConfig(
        n_kv_heads=8, mlp_hidden_size=14336, vocab_size=155136, weight_tying=True, max_sequence_length=8192
    )
    model = build(config, "meta")
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    assert sum(weight.numel() for weight in model.parameters()) == 32 * layer + 155136 * 4096 + 4096


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_flops_are_what_torch_counts(family: str) -> None:
    model = tiny_model(family)
    counter = FlopCounterMode(display=False)
    with (
        sdpa_kernel(SDPBackend.MATH),
        counter,
        torch.no_grad(),
    ):  # the counter does not know the fused CPU kernel
        model(torch.zeros(1, 32, dtype=torch.long))
    assert forward_cost(model.shape, 32, torch.float32).flops == counter.get_total_flops()


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_bytes_are_those_of_the_weights_a_forward_reads(family: str) -> None:
    for tied in (False, True):
        model = tiny_model(family, **{"weight_tying" if family == "llada" else "tie_word_embeddings": tied})
        total = sum(weight.numel() for weight in model.parameters())
        embedding = 0 if tied else model.embedding().weight.numel()
        cost = forward_cost(model.shape, 8, torch.float32)
        assert cost.weight_bytes == 4 * (total - embedding)
        cache = model.new_cache(1, 9)
        assert cost.cache_bytes_per_position * 10 == cache.nbytes


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_directory_is_described_from_its_own_files(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, family, tokenizer=True)
    facts, lm = describe(folder, length=16), tad.load(folder)
    assert facts.tokens == lm.tokens
    assert facts.parameters == sum(weight.numel() for weight in lm.model.parameters())
    assert (facts.family, facts.dtype, facts.context, facts.layers) == (family, "float32", 256, 2)
    assert facts.shifted == (family == "dream")
    assert str(FIRST_SPECIAL + (6 if family == "llada" else 5)) in facts.tokenizer
    assert facts.adapter is None


def test_an_adapter_is_described_and_checked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada")
    lm = tad.load(folder)
    peft = lm.attach(rank=3, alpha=6)
    peft.save_pretrained(tmp_path / "adapter")
    found = describe(folder, adapter=tmp_path / "adapter").adapter
    assert (found.rank, found.alpha) == (3, 6)
    assert found.parameters == peft.get_nb_trainable_parameters()[0]
    other = write_checkpoint(tmp_path / "dream", "dream")
    with pytest.raises(TadError, match="adapter for llada"):
        describe(other, adapter=tmp_path / "adapter")


def test_bad_questions_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    for length in (0, 257):
        with pytest.raises(TadError, match="outside the model's context"):
            describe(folder, length=length)
    with pytest.raises(TadError, match="shape 'gpt' is not known; known: llada-8b, dream-7b"):
        describe_shape("gpt")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TadError, match="no weights here"):
        describe(folder)


@pytest.mark.parametrize("name", ["llada-8b", "dream-7b"])
def test_a_model_is_built_on_its_device_with_reproducible_weights(name: str) -> None:
    config = shape_config(name)
    for field in ("n_layers", "num_hidden_layers"):
        if field in config.to_dict():
            setattr(config, field, 1)
    small = {"llada-8b": {"d_model": 64, "n_heads": 4, "mlp_hidden_size": 64, "embedding_size": 99}}.get(
        name, {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
    )
    for field, value in small.items():
        setattr(config, field, value)
    first, second = (build(config, "cpu", torch.bfloat16, seed=4).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(value.isfinite().all() and value.dtype == torch.bfloat16 for value in first.values())


@pytest.mark.parametrize("declared", [True, False])
def test_a_hub_models_weights_are_fetched_only_where_they_alone_tell_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    if not declared:
        edit_json(folder / "config.json", torch_dtype=None)
    fetched = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append("*.safetensors" in allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert describe("owner/name").dtype == "float32"
    assert fetched == ([False] if declared else [False, True])
