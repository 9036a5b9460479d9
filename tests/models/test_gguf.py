"""GGUF files: tiny ones written here, read as checkpoints; and bad ones, refused in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_autoregressive import BEGIN, CONTEXT, END, SPECIAL, TEMPLATE, hf_model
from tokenizers import pre_tokenizers

import tad
from tad.errors import TadError

gguf = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(
    path: Path, kind: str, quantized: bool = False, architecture: str | None = None, **fields: Any
) -> Any:
    """A tiny model of transformers as llama.cpp's converter lays it out; returns that model."""
    model = hf_model(
        kind, hidden_size=64, intermediate_size=64, **({"head_dim": 16} if kind == "qwen3" else {})
    )
    config, name = model.config, architecture or kind
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(fields.pop("layers", config.num_hidden_layers))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "qwen3":
        writer.add_key_length(16)
        writer.add_value_length(16)
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL, "<x1>", "<x2>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.pop("pre", "qwen2"))
    writer.add_token_list(texts)
    writer.add_token_types([1] * 256 + [3] * (len(texts) - 257) + [1])
    writer.add_token_merges(fields.pop("merges", ["a b"]))
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    if fields.pop("template", True):
        writer.add_chat_template(TEMPLATE)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name), config.num_hidden_layers
    )
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = key.rsplit(".", 1)
        values = weight.float()
        if kind == "llama" and stem.endswith(("q_proj", "k_proj")):  # llama.cpp turns pairs, not halves
            count = heads if stem.endswith("q_proj") else kv_heads
            values = values.view(count, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        array, own = values.contiguous().numpy(), f"{names.get_name(stem)}.{suffix}"
        if quantized and array.ndim == 2:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(own, gguf.quantize(array, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(own, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_file_gives_the_logits_of_its_model(kind: str, tmp_path: Path) -> None:
    reference = write_gguf(tmp_path / "tiny.gguf", kind)
    lm = tad.load(tmp_path / "tiny.gguf")
    assert lm.dtype == torch.float32
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (lm.model(ids).logits - reference(ids).logits).abs().max() < 1e-4
    assert lm.encode("hi")[0] == 259
    assert lm.decode(lm.encode_text("x = 12\n\n y")) == "x = 12\n\n y"
    assert lm.tokens.eos == END


def test_quantized_numbers_are_those_of_the_readers_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", "qwen2", quantized=True)
    lm = tad.load(tmp_path / "tiny.gguf")
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert (lm.model(ids).logits - other(ids).logits).abs().max() < 1e-4


def test_a_file_is_unpacked_once(tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2")
    tad.load(tmp_path / "tiny.gguf")
    assert "unpacking" in capfd.readouterr().err
    (made,) = (cache / "gguf").iterdir()
    (tmp_path / "tiny.gguf").rename(tmp_path / "moved.GGUF")
    assert (made / "model.safetensors").is_file()
    tad.load(made)


def test_without_a_chat_template_chats_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", template=False)
    lm = tad.load(tmp_path / "tiny.gguf")
    assert lm.encode_text("hi")
    with pytest.raises(TadError, match="no chat template"):
        lm.encode("hi")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not supported; known: llama, qwen2, qwen3"),
        ({"layers": 500}, "says 500 layers and has"),
        ({"layers": 100_000}, "layers should be an integer from 1 to 4096"),
        ({"pre": "deepseek-coder"}, "tokenizer.ggml.pre 'deepseek-coder' is not known"),
        ({"qwen2__rope__scaling__type": "yarn"}, "rope.scaling.type 'yarn'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    fields: dict[str, Any], said: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2", **fields)
    with pytest.raises(TadError, match=said) as error:
        tad.load(tmp_path / "tiny.gguf")
    assert "\n" not in str(error.value)
    assert "tiny.gguf" in str(error.value)
    assert not list(cache.glob("gguf/*"))


def test_a_tokenizer_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2", merges=["a c"])
    with pytest.raises(TadError, match=r"tiny\.gguf: its tokenizer cannot be read"):
        tad.load(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kept", [0, 3, 200, 20_000])
def test_a_truncated_file_is_refused_in_one_line(kept: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[:kept])
    with pytest.raises(TadError, match=r"tiny\.gguf: is truncated or no GGUF file"):
        tad.load(tmp_path / "tiny.gguf")
