"""What `tad info` knows without loading weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import ALL, FIRST_SPECIAL, edit_json, tiny_model, write_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tad
from tad.errors import TadError
from tad.models.info import describe, describe_shape
from tad.models.shapes import SHAPES, build, forward_cost, shape_config

PARAMETERS = {
    "llada-8b": 8_015_581_184,
    "dream-7b": 7_615_616_512,
    "fast-dllm-v2-7b": 7_615_616_512,
    "fast-dllm-v2-1.5b": 1_543_714_304,
    "sdar-4b": 4_411_424_256,
    "sdar-8b": 8_190_735_360,
    "sdar-30b-a3b": 30_532_122_624,
    "llada2-mini": 16_255_638_528,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "sdar-30b-a3b" else ()) for name in SHAPES]
)
def test_the_released_shapes(name: str) -> None:
    facts = describe_shape(name)
    assert (facts.parameters, facts.dtype) == (PARAMETERS[name], "bfloat16")
    embedding = 0 if facts.shape.tied else facts.shape.vocab * facts.shape.width
    assert facts.cost.weight_bytes == 2 * (facts.parameters - embedding)


TIED = [("llada", {"weight_tying": True}), ("dream", {"tie_word_embeddings": True})]


@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in ALL), *TIED])
def test_costs_are_what_torch_counts(family: str, changes: dict[str, bool]) -> None:
    model, length = tiny_model(family, **changes), 24
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():  # it does not know the fused CPU kernel
        model(torch.zeros(1, length, dtype=torch.long))
    cost = forward_cost(model.shape, length, torch.float32)
    assert cost.flops == counter.get_total_flops()
    embedding = 0 if changes else model.embedding().weight.numel()
    assert cost.weight_bytes == 4 * (sum(weight.numel() for weight in model.parameters()) - embedding)
    assert cost.cache_bytes_per_position * 10 == model.new_cache(1, 9).nbytes


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_directory_is_described_from_its_own_files(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, family, tokenizer=True)
    facts, lm = describe(folder, length=16), tad.load(folder)
    assert facts.tokens == lm.tokens
    assert facts.parameters == sum(weight.numel() for weight in lm.model.parameters())
    assert (facts.family, facts.dtype, facts.shape) == (family, "float32", lm.model.shape)
    assert facts.shifted == (family == "dream")
    assert str(FIRST_SPECIAL + (6 if family == "llada" else 5)) in facts.tokenizer
    assert facts.adapter is None
    assert len(facts.lora_targets) == 7


def test_an_adapter_is_described_and_checked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada")
    lm = tad.load(folder)
    peft = lm.attach(rank=3, alpha=6)
    peft.save_pretrained(tmp_path / "adapter")
    found = describe(folder, adapter=tmp_path / "adapter").adapter
    assert (found.rank, found.alpha) == (3, 6)
    assert found.parameters == peft.get_nb_trainable_parameters()[0]


def test_bad_questions_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    for length in (0, 257):
        with pytest.raises(TadError, match=f"length {length} "):
            describe(folder, length=length)
    with pytest.raises(TadError, match=r"'gpt'.*llada-8b"):
        describe_shape("gpt")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TadError, match=f"^{folder}: "):
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
