"""Adapters that act on masks only, and the directories of models that are converted with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_autoregressive import BEGIN, END, FREE, KINDS, TURN, VOCAB, edit, write_autoregressive

import tad
from tad.errors import TadError
from tad.models import AttentionMask, MaskedDiffusionModel
from tad.models.attention import open_block
from tad.models.checkpoint import Checkpoint
from tad.models.conversion import FILE, Conversion, choose_mask, fingerprint_files
from tad.models.export import export
from tad.models.gated import gate
from tad.models.info import describe, format_info
from tad.models.lora import WEIGHTS
from tad.training.objectives.module import checkpoint_layers
from tad.training.weights import gather_weights, save_weights

BLOCK = 8


def disturb(model: MaskedDiffusionModel) -> None:
    """Adapters that are not the identity."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)


def adapted(parent: Path) -> tad.LM:
    lm = tad.load(parent)
    lm.attach(4)
    gate(lm.model, FREE)
    disturb(lm.model)
    return lm


def write_conversion(parent: Path, folder: Path) -> tad.LM:
    """A converted model of a parent on disk; returns it as it is in memory."""
    lm = adapted(parent)
    save_weights(gather_weights(lm.peft), folder, lm.peft.peft_config["default"])
    files = fingerprint_files(Checkpoint.open(parent).shards)
    Conversion(folder, str(parent), files, lm.family.name, BLOCK, FREE, "a test's").write(folder)
    return lm


@pytest.fixture(params=list(KINDS))
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_autoregressive(tmp_path / "parent", request.param)


def test_without_masks_every_bit_is_the_parents_and_with_masks_it_is_not(parent: Path) -> None:
    lm, before = adapted(parent), tad.load(parent)
    ids = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(1))
    grown = before.model(ids).logits
    assert torch.equal(lm.model(ids).logits, grown)
    with torch.no_grad():  # adapters are passed over
        assert torch.equal(lm.model(ids).logits, grown)
    ids[0, 12:] = FREE
    masked = lm.model(ids).logits
    assert torch.equal(masked[1], grown[1])
    assert torch.equal(masked[0, :12], before.model(ids).logits[0, :12])
    assert not torch.allclose(masked[0, 12:], before.model(ids).logits[0, 12:])


def test_the_gate_stands_in_the_right_places_where_few_outputs_are_wanted(parent: Path) -> None:
    lm = adapted(parent)
    ids = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(2))
    ids[0, 3:9] = ids[1, 10:] = FREE
    mask = AttentionMask(None, open_block(torch.arange(16), torch.tensor([[3, 9], [10, 16]])))
    at = torch.tensor([[2, 3, 8, 12], [1, 9, 10, 15]])
    whole = lm.model(ids, mask=mask).logits
    found = lm.model(ids, mask=mask, logits_at=at).logits
    assert torch.allclose(found, whole.gather(1, at[..., None].expand(-1, -1, VOCAB)), atol=1e-4)


def test_activations_made_again_in_backward_have_the_gate_of_their_own_forward(parent: Path) -> None:
    lm = adapted(parent)
    lm.model.train()
    one, other = torch.randint(0, 250, (2, 1, 16), generator=torch.Generator().manual_seed(3))
    one[0, 8:], other[0, :4] = FREE, FREE

    def gradients() -> list[torch.Tensor]:
        found = lm.model(one).logits.square().mean()
        lm.model(other)  # a second forward before the first one's backward
        return list(torch.autograd.grad(found, [p for p in lm.model.parameters() if p.requires_grad]))

    kept = gradients()
    checkpoint_layers(lm.model)
    again = gradients()
    assert any(gradient.abs().max() > 0 for gradient in kept)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_only_the_adapter_and_the_masks_embedding_learn(parent: Path) -> None:
    lm = adapted(parent)
    learning = {name for name, weight in lm.model.named_parameters() if weight.requires_grad}
    assert "mask_embedding" in learning
    assert all("lora_" in name for name in learning - {"mask_embedding"})


def test_a_converted_model_is_loaded_as_it_was_saved(parent: Path, tmp_path: Path) -> None:
    made = write_conversion(parent, tmp_path / "out")
    lm = tad.load(tmp_path / "out")
    assert lm.conversion is not None
    assert lm.tokens.mask == FREE
    layout = lm.model.shape.blocks
    assert layout is not None
    assert layout.drafts
    assert layout.size == BLOCK
    ids = torch.arange(40)[None]
    assert torch.equal(lm.model(ids).logits, tad.load(parent).model(ids).logits)
    ids[:, 30:] = FREE
    assert torch.equal(lm.model(ids).logits, made.model(ids).logits)
    assert not any(weight.requires_grad for weight in lm.model.parameters())
    assert tad.load(tmp_path / "out", weights=False).encode("hello")


def test_what_cannot_be_merged_is_refused_and_says_what_to_do(parent: Path, tmp_path: Path) -> None:
    write_conversion(parent, tmp_path / "out")
    lm = tad.load(tmp_path / "out")
    with pytest.raises(TadError, match="masks only and cannot be merged"):
        lm.merge()
    for settings in ({"merge": True}, {"quantize": "int8"}, {"adapter": str(tmp_path / "out")}):
        with pytest.raises(TadError, match="has its own adapter"):
            tad.load(tmp_path / "out", **settings)  # type: ignore[arg-type]
    with pytest.raises(TadError, match="give it as the model"):
        tad.load(parent, adapter=tmp_path / "out")
    with pytest.raises(TadError, match="no merged weights to write"):
        export(tmp_path / "out", tmp_path / "exported")


def _other_parent(parent: Path, out: Path) -> None:
    write_autoregressive(parent, seed=1)


def _no_parent(parent: Path, out: Path) -> None:
    edit(out / FILE, parent=str(parent / "gone"))


def _own_parent(parent: Path, out: Path) -> None:
    edit(out / FILE, parent=str(out))


def _no_mask_embedding(parent: Path, out: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(out / WEIGHTS)
    del state["base_model.model.mask_embedding"]
    save_file(state, out / WEIGHTS)


def _cut(parent: Path, out: Path) -> None:
    (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-100])


def _wrong_mask(parent: Path, out: Path) -> None:
    edit(out / FILE, mask_token_id=VOCAB)


def _newer(parent: Path, out: Path) -> None:
    edit(out / FILE, format=9)


def _no_block(parent: Path, out: Path) -> None:
    edit(out / FILE, block_size="many")


def _other_family(parent: Path, out: Path) -> None:
    edit(out / FILE, family="llama")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_other_parent, "are not those the adapter was trained on"),
        (_no_parent, "its parent cannot be opened"),
        (_own_parent, "is not a qwen2 checkpoint"),
        (_no_mask_embedding, "mask_embedding of 32 numbers is missing"),
        (_cut, "truncated"),
        (_wrong_mask, "outside of its 264 rows"),
        (_newer, "format 9 is not known"),
        (_no_block, "block_size is 'many'"),
        (_other_family, "is not a llama checkpoint"),
    ],
)
def test_a_damaged_conversion_is_refused_in_one_line(damage: Any, said: str, tmp_path: Path) -> None:
    parent, out = write_autoregressive(tmp_path / "parent", "qwen2"), tmp_path / "out"
    write_conversion(parent, out)
    damage(parent, out)
    with pytest.raises(TadError, match=said) as error:
        tad.load(out)
    assert "\n" not in str(error.value)


def test_the_mask_takes_a_token_that_texts_do_not_use(tmp_path: Path) -> None:
    lm = tad.load(write_autoregressive(tmp_path / "model"))
    tokenizer, taken = lm.tokenizer, set(lm.tokens.all)
    assert choose_mask(tokenizer, VOCAB, taken).id == 261  # the first of three rows beyond the tokenizer
    found = choose_mask(tokenizer, 261, taken)
    assert found.id in (BEGIN, FREE)  # neither the end nor what the chat template writes
    assert "<|free|>" in choose_mask(tokenizer, 261, {*taken, BEGIN}).row
    with pytest.raises(TadError, match="no free token for the mask"):
        choose_mask(tokenizer, 261, {*taken, BEGIN, FREE})
    assert choose_mask(tokenizer, VOCAB, taken, given=263).id == 263
    for wrong, said in ((VOCAB, "rows 0 to 263"), (END, "begins or ends"), (97, "part of texts")):
        with pytest.raises(TadError, match=said):
            choose_mask(tokenizer, VOCAB, taken, given=wrong)
    assert TURN not in (found.id, FREE)


def test_what_is_written_is_plain_json_about_the_parent(tmp_path: Path) -> None:
    parent = write_autoregressive(tmp_path / "parent")
    write_conversion(parent, tmp_path / "out")
    said = json.loads((tmp_path / "out" / FILE).read_text())
    assert said["parent"] == str(parent)
    assert list(said["parent_files"]) == ["model.safetensors"]


def test_tad_info_names_the_adapter_on_masks(parent: Path, tmp_path: Path) -> None:
    write_conversion(parent, tmp_path / "out")
    facts = describe(tmp_path / "out")
    assert facts.adapter is not None
    assert facts.adapter.gated
    assert "on masks only" in format_info(facts)
    with pytest.raises(TadError, match="has its own adapter"):
        describe(tmp_path / "out", adapter=tmp_path / "out")
