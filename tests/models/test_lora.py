"""Adapters: which layers, how many parameters, on and off, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import randomise, tiny_model, write_checkpoint

import tad
from tad.errors import TadError
from tad.models import LM
from tad.models.lora import attach
from tad.models.shapes import build, shape_config

NAMES = ("llada", "dream")
IDS = torch.arange(20)[None]


def adapted(folder: Path, family: str, rank: int = 4) -> LM:
    lm = tad.load(write_checkpoint(folder, family))
    torch.manual_seed(0)
    lm.attach(rank=rank)
    randomise(lm.model)
    return lm


def test_llada_8b_has_the_published_number_of_trainable_parameters() -> None:
    model = build(shape_config("llada-8b"), "meta")
    with torch.device("meta"):
        trainable, total = attach(model, rank=128).get_nb_trainable_parameters()
    assert (trainable, total - trainable) == (335_544_320, 8_015_581_184)


@pytest.mark.parametrize("family", NAMES)
def test_a_fresh_adapter_changes_nothing_and_a_disabled_one_is_bit_equal_to_the_base(
    tmp_path: Path, family: str
) -> None:
    lm = tad.load(write_checkpoint(tmp_path, family))
    base = lm.model(IDS).logits
    lm.attach(rank=4)
    assert torch.equal(lm.model(IDS).logits, base)
    randomise(lm.model)
    assert not torch.allclose(lm.model(IDS).logits, base)
    with lm.base() as model:
        assert torch.equal(model(IDS).logits, base)
    assert not torch.allclose(lm.model(IDS).logits, base)


@pytest.mark.parametrize("family", NAMES)
def test_a_saved_adapter_comes_back_bit_equal_here_and_with_plain_peft(tmp_path: Path, family: str) -> None:
    lm = adapted(tmp_path / "base", family)
    lm.peft.save_pretrained(tmp_path / "adapter")
    expected = lm.model(IDS).logits
    again = tad.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert torch.equal(again.model(IDS).logits, expected)
    assert again.adapter == str(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(tiny_model(family), str(tmp_path / "adapter"))
    assert torch.equal(plain(IDS).logits, expected)


def test_an_adapter_trained_elsewhere_with_listed_targets_loads(tmp_path: Path) -> None:
    """Published adapters name q_proj, k_proj, ... in a list and say they are causal language models."""
    folder = write_checkpoint(tmp_path / "base", "dream")
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft = get_peft_model(tiny_model("dream"), config)
    peft.save_pretrained(tmp_path / "adapter")
    lm = tad.load(folder, adapter=tmp_path / "adapter")
    assert torch.equal(lm.model(IDS).logits, peft.eval()(IDS).logits)


def test_an_adapter_for_another_family_is_refused(tmp_path: Path) -> None:
    adapted(tmp_path / "dream", "dream").peft.save_pretrained(tmp_path / "adapter")
    folder = write_checkpoint(tmp_path / "llada", "llada")
    with pytest.raises(TadError, match=r"adapter_model\.safetensors: .*dream.*llada"):
        tad.load(folder, adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("change", "words"), [({"mlp_hidden_size": 128}, "ff_out.lora_A"), ({"n_layers": 1}, "blocks.1")]
)
def test_an_adapter_for_another_size_is_refused(tmp_path: Path, change: dict[str, int], words: str) -> None:
    adapted(tmp_path / "small", "llada").peft.save_pretrained(tmp_path / "adapter")
    folder = write_checkpoint(tmp_path / "other", "llada", **change)
    with pytest.raises(TadError, match=rf"adapter_model.safetensors: .*{words}"):
        tad.load(folder, adapter=tmp_path / "adapter")


def test_broken_adapter_directories_are_refused(tmp_path: Path) -> None:
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    adapted(folder, "llada").peft.save_pretrained(adapter)
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    good_weights = weights.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(TadError, match=words) as caught:
            tad.load(folder, adapter=adapter)
        assert "\n" not in str(caught.value)

    weights.write_bytes(good_weights[:-1])
    refused("adapter_model.safetensors: is truncated")
    weights.unlink()
    refused("adapter_model.safetensors: missing")
    (adapter / "adapter_model.bin").write_bytes(b"")
    refused("pickled weights are not read")
    weights.write_bytes(good_weights)
    config.unlink()
    refused("adapter_config.json: missing; this directory is not a PEFT adapter")
    with pytest.raises(TadError, match="no such directory"):
        tad.load(folder, adapter=tmp_path / "nowhere")


def test_weights_and_targets_that_do_not_match_are_refused(tmp_path: Path) -> None:
    """PEFT itself would load what matches, and say nothing or warn."""
    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    adapted(folder, "llada").peft.save_pretrained(adapter)
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    values, tensors = json.loads(config.read_text()), load_file(weights)
    config.write_text(json.dumps({**values, "target_modules": ["q_proj", "ff_out"]}))
    with pytest.raises(
        TadError, match=r"target_modules leaves out model\.transformer\.blocks\.0\.\w+, which"
    ):
        tad.load(folder, adapter=adapter)
    config.write_text(json.dumps(values))
    gone = next(name for name in tensors if "blocks.1.q_proj" in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, weights)
    with pytest.raises(TadError, match=r"has no weights for model\.transformer\.blocks\.1\.q_proj"):
        tad.load(folder, adapter=adapter)
    save_file(tensors, weights)
    assert tad.load(folder, adapter=adapter).peft is not None


def test_a_second_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="adapter"):
        adapted(tmp_path / "model", "llada").attach()
    with pytest.raises(TadError, match="rank"):
        tad.load(tmp_path / "model").attach(rank=0)


@pytest.mark.parametrize("family", NAMES)
def test_a_merged_adapter_gives_the_same_logits_from_plain_layers(tmp_path: Path, family: str) -> None:
    lm = adapted(tmp_path / "base", family)
    with torch.no_grad():
        wanted = lm.model(IDS).logits
    lm.peft.save_pretrained(str(tmp_path / "adapter"))
    merged = tad.load(tmp_path / "base", adapter=tmp_path / "adapter", merge=True)
    assert merged.peft is None
    assert merged.adapter == str(tmp_path / "adapter")
    assert not any("lora" in name for name, _ in merged.model.named_modules())
    with torch.no_grad():
        torch.testing.assert_close(merged.model(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    lm.merge()
    with torch.no_grad():
        assert torch.equal(lm.model(IDS).logits, merged.model(IDS).logits)


def test_a_merged_adapter_decodes_to_the_same_tokens_with_the_engine(tmp_path: Path) -> None:
    from tad.decoding import decode

    lm = adapted(tmp_path / "base", "llada")
    wanted = decode(lm, [[5, 6, 7]], "one-by-one", 16, block=8)
    lm.merge()
    found = decode(lm, [[5, 6, 7]], "one-by-one", 16, block=8, engine="graph")
    assert [row.tokens for row in found] == [row.tokens for row in wanted]


@pytest.mark.parametrize(("kind", "error"), [("fp8", 0.2), ("int8", 0.05), ("int4", 0.3)])
def test_loading_smaller_weights_merges_and_quantizes(tmp_path: Path, kind: Any, error: float) -> None:
    from tad.models.quantize import KINDS
    from tad.runs.fingerprint import fingerprint_model

    lm = adapted(tmp_path / "base", "dream")
    lm.peft.save_pretrained(str(tmp_path / "adapter"))
    small = tad.load(tmp_path / "base", adapter=tmp_path / "adapter", quantize=kind)
    assert sum(isinstance(module, KINDS[kind]) for module in small.model.modules()) == 14
    with torch.no_grad():
        wanted, found = lm.model(IDS).logits, small.model(IDS).logits
    assert (found - wanted).norm() < error * wanted.norm()
    base = tad.load(tmp_path / "base", quantize=kind)
    plain = tad.load(tmp_path / "base")
    assert (
        repr(base).split(",")[2] == repr(plain).split(",")[2]
    )  # as many parameters, however they are stored
    assert len({fingerprint_model(one) for one in (small, base, lm)}) == 3  # other weights are another model


def test_an_unknown_kind_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="'int3'"):
        tad.load(tmp_path / "base", quantize="int3")  # type: ignore[arg-type]
