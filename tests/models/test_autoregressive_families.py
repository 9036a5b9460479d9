"""Llama, Qwen2 and Qwen3 checkpoints in the one network, held to transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_autoregressive import FREE, KINDS, VOCAB, edit, hf_model, write_autoregressive

import tad
from tad.errors import TadError
from tad.models import AttentionMask, BlockLayout
from tad.models.attention import open_block


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_logits_are_those_of_transformers_also_with_padding(kind: str, tmp_path: Path) -> None:
    lm = tad.load(write_autoregressive(tmp_path / "model", kind), dtype="fp32")
    reference = hf_model(kind)
    ids = torch.randint(0, VOCAB, (3, 90), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[1, :31] = 0  # left padding
    real[2, :7] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = reference(ids, attention_mask=real, position_ids=positions).logits
        blocks = torch.arange(90)[None]
        found = lm.model(ids, position_ids=positions, mask=AttentionMask(real.bool(), blocks)).logits
        plain = lm.model(ids[:1]).logits
    assert (wanted - found)[real.bool()].abs().max() < 1e-4
    assert (wanted[:1] - plain).abs().max() < 1e-4


def test_classes_of_transformers_stay_its_own(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(write_autoregressive(tmp_path / "model", "llama"))
    assert type(found).__module__.startswith("transformers.")


def test_an_unconverted_model_has_blocks_of_one_and_no_mask(tmp_path: Path) -> None:
    lm = tad.load(write_autoregressive(tmp_path / "model"))
    assert lm.model.shape.blocks == BlockLayout(1, "absolute", causal=True)
    assert not lm.model.shape.blocks.drafts
    assert lm.tokens.mask == -1


def test_block_size_and_mask_make_a_converted_model_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    parent = tad.load(write_autoregressive(tmp_path / "parent", kind))
    lm = tad.load(write_autoregressive(tmp_path / "converted", kind, block_size=8))
    layout = lm.model.shape.blocks
    assert layout == BlockLayout(8, "absolute", causal=True)
    assert layout.drafts
    assert lm.tokens.mask == FREE
    ids = torch.arange(40)[None]
    assert torch.equal(lm.model(ids).logits, parent.model(ids).logits)


def test_only_the_open_block_sees_itself_in_both_directions() -> None:
    seen = AttentionMask(None, open_block(torch.arange(6), torch.tensor([[2, 4]]))).dense()
    assert seen is not None
    wanted = torch.ones(6, 6).tril().bool()
    wanted[2, 3] = True
    assert torch.equal(seen[0, 0], wanted)


def test_several_end_tokens_end_an_answer(tmp_path: Path) -> None:
    folder = write_autoregressive(tmp_path / "model")
    edit(folder / "generation_config.json", eos_token_id=[260, 257, 12])
    tokens = tad.load(folder).tokens
    assert tokens.eos == 257
    assert set(tokens.ends) == {257, 260, 12}


def test_without_a_chat_template_text_is_still_encoded(tmp_path: Path) -> None:
    folder = write_autoregressive(tmp_path / "model")
    edit(folder / "tokenizer_config.json", chat_template=None)
    lm = tad.load(folder)
    assert lm.encode_text("a")
    with pytest.raises(TadError, match="no chat template"):
        lm.encode("a question")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": 8}, "block_size needs mask_token_id"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "need factor"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_autoregressive(tmp_path / "model")
    edit(folder / "config.json", **changes)
    with pytest.raises(TadError, match=said) as error:
        tad.load(folder)
    assert "\n" not in str(error.value)
    assert "config.json" in str(error.value)
