"""Checkpoints and adapters from strangers: each trick is one line that names the file, within seconds, and changes nothing."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, write_adapter, write_checkpoint

import tad
from tad.errors import TadError
from tad.models.info import describe

SECONDS = 40
IDS = torch.arange(20)[None] + 40


def refused(folder: Path, words: str, adapter: Path | None = None) -> None:
    for call in (tad.load, describe):
        start = time.monotonic()
        with pytest.raises(TadError, match=words) as caught:
            call(folder, adapter=adapter)
        assert time.monotonic() - start < SECONDS
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "llada", tokenizer=True)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layers", 10**5),
        ("n_layers", 10**30),
        ("n_layers", -1),
        ("n_layers", 2.0),
        ("n_layers", True),
        ("n_layers", "2"),
        ("d_model", 10**9),
        ("n_heads", 0),
        ("n_heads", 10**18),
        ("mlp_hidden_size", 10**12),
        ("embedding_size", 10**10),
        ("max_sequence_length", 10**40),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", float("inf")),
        ("rope_theta", []),
        ("rope_parameters", [1]),
        ("weight_tying", "yes"),
        ("include_bias", 3),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("model_type", ["llada"]),
        ("model_type", {"a": 1}),
        ("mask_token_id", 10**30),
        ("eos_token_id", {"a": 1}),
        ("shape", {"layers": 2}),
        ("read_shape", 3),
        ("dtype", ["float32"]),
        ("torch_dtype", {"a": 1}),
    ],
)
def test_absurd_fields_of_config_json(folder: Path, field: str, value: object) -> None:
    edit_json(folder / "config.json", **{field: value})
    refused(folder, r"config\.json|model:")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 10**9),
        ("num_experts", 4096),
        ("moe_intermediate_size", 10**12),
        ("num_experts_per_tok", "2"),
        ("block_size", 10**30),
        ("num_hidden_layers", 10**6),
        ("norm_topk_prob", "no"),
    ],
)
def test_absurd_fields_of_a_config_with_experts(tmp_path: Path, field: str, value: object) -> None:
    folder = write_checkpoint(tmp_path / "model", "sdar_moe")
    edit_json(folder / "config.json", **{field: value})
    refused(folder, r"config\.json|model:")


@pytest.mark.parametrize(
    "extra",
    [
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "someone/kernel"},
        {"_attn_implementation_internal": "someone/kernel"},
        {"attn_implementation": {"": "someone/kernel"}},
        {"auto_map": {"AutoModel": "someone/code--modeling.Model"}},
        {"num_labels": 10**9},
        {"_sizes": {"layers": "d_model"}, "_supported": 3},
        {"base_model_tp_plan": {"layers.*": "colwise"}},
        {"use_kernels": True, "kernel_config": {"RMSNorm": "someone/kernel"}},
        {"sub_configs": {"a": 1}, "output_attentions": True, "torchscript": True},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_fields_that_libraries_act_on_reach_none(folder: Path, extra: dict[str, object]) -> None:
    wanted = tad.load(folder).model(IDS).logits
    edit_json(folder / "config.json", **extra)
    lm = tad.load(folder)
    assert torch.equal(lm.model(IDS).logits, wanted)
    assert lm.model.config._attn_implementation == "sdpa"
    assert not any("someone" in str(value) for value in vars(lm.model.config).values())


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "text", [DEEP, '{"a":' * 50_000, "9" * 10_000, "", "[]", "\x00", '{"a": NaN'], ids=range(7)
)
def test_malformed_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    refused(folder, "json|tokenizer")


def test_malformed_added_tokens(folder: Path) -> None:
    for value in ([1], {"a": {"content": "x"}}, {"1": 3}, {"1": {}}):
        edit_json(folder / "tokenizer_config.json", added_tokens_decoder=value)
        refused(folder, "added_tokens_decoder|tokenizer")


FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "merges.txt",
]


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_a_device_in_place_of_a_file(folder: Path, name: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    refused(folder, f"{name}: is not a plain file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(folder, f"{name}: is not a plain file")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_text_of_many_gigabytes(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(40 * 10**9)  # holes: takes no room on the disk
    refused(folder, f"{name}: has 40000000000 bytes")


def write_header(path: Path, header: bytes, length: int | None = None, data: int = 0) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + b"\0" * data)


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> bytes:
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (entry(offsets=(0, 10**18)), 4),
        (entry(offsets=(4, 0)), 4),
        (entry(offsets=(-4, 0)), 4),
        (entry(offsets=(2, 6)), 6),
        (entry(shape=(10**18, 10**18)), 4),
        (entry(shape=(-1,)), 4),
        (entry(shape="1"), 4),
        (entry(dtype="F1024"), 4),
        (entry(dtype="I8", offsets=(0, 1)), 1),
        (entry(dtype="F64", offsets=(0, 8)), 8),
        (b"[]", 0),
        (b'{"x":' * 20_000, 0),
        (b"\xff" * 64, 0),
        (b"", 0),
    ],
    ids=range(14),
)
def test_malformed_safetensors_headers(folder: Path, header: bytes, data: int) -> None:
    write_header(folder / "model.safetensors", header, data=data)
    refused(folder, r"model\.safetensors: ")


def test_a_safetensors_header_of_40_gigabytes(folder: Path) -> None:
    path = folder / "model.safetensors"
    write_header(path, b"{}", length=40 * 10**9)
    with path.open("r+b") as file:
        file.truncate(40 * 10**9 + 8)
    refused(folder, r"model\.safetensors: ")


def test_an_index_that_names_pickles(folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    index = {"weight_map": dict.fromkeys(names, "pytorch_model.bin"), "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, r"index\.json: weight_map")


# Adapters


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    return write_adapter(folder, tmp_path / "adapter")


LAYER = "base_model.model.model.transformer.blocks.0"


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.model.transformer.wte.weight",
        f"{LAYER}.q_proj.weight",
        f"{LAYER}.q_proj.base_layer.weight",
        f"{LAYER}.attn_norm.weight",
        f"{LAYER}.attn_norm.lora_A.weight",
        f"{LAYER}.q_proj.lora_embedding_A",
        f"{LAYER}.q_proj.lora_magnitude_vector.weight",
        f"{LAYER}.q_proj.modules_to_save.weight",
        f"{LAYER}.q_proj.lora_A.default.weight",
        "base_model.model.model.transformer.ff_out.lora_A.weight",
        "x",
    ],
)
def test_an_adapter_holds_lora_weights_of_projections_and_nothing_else(
    folder: Path, adapter: Path, key: str
) -> None:
    weights = adapter / "adapter_model.safetensors"
    save_file({**load_file(weights), key: torch.zeros(4, 64)}, weights)
    refused(folder, r"adapter_model\.safetensors: ", adapter)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "gaussian"),
        ("r", 10**9),
        ("r", 3),
        ("r", 0),
        ("r", "4"),
        ("r", True),
        ("lora_alpha", float("nan")),
        ("lora_alpha", "4"),
        ("lora_dropout", 2),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["wte"]),
        ("layer_replication", [[0, 2], [0, 2]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["wte.weight"]),
        ("megatron_config", {"a": 1}),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"q_proj": 10**9}),
        ("rank_pattern", {"(a+)+b": 4}),
        ("rank_pattern", [1]),
        ("target_modules", "(.*a+)+$"),
        ("target_modules", ".*.*.*.*.*.*x"),
        ("target_modules", "("),
        ("target_modules", 3),
        ("target_modules", ["q_proj"]),
        ("peft_type", "LOHA"),
        ("from_the_future", "x"),
    ],
)
def test_an_adapters_configuration_changes_nothing_but_the_adapter(
    folder: Path, adapter: Path, field: str, value: object
) -> None:
    edit_json(adapter / "adapter_config.json", **{field: value})
    refused(folder, r"adapter_config\.json: ", adapter)


def test_the_base_stays_what_it_is_under_an_adapter(folder: Path, adapter: Path) -> None:
    wanted = tad.load(folder).model(IDS).logits
    edit_json(adapter / "adapter_config.json", auto_mapping={"base_model_class": "os.system"}, revision="x")
    lm = tad.load(folder, adapter=adapter)
    assert not torch.equal(lm.model(IDS).logits, wanted)
    with lm.base() as model:
        assert torch.equal(model(IDS).logits, wanted)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipes_in_an_adapter(folder: Path, adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    refused(folder, name, adapter)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_max_length", []), ("eos_token", "x" * 10**7), ("pad_token", {"content": "x" * 10**6})],
)
def test_absurd_fields_of_tokenizer_config_json(folder: Path, field: str, value: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    started = time.monotonic()
    with pytest.raises(TadError, match=rf"tokenizer_config\.json: {field}") as caught:
        tad.load(folder)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - started < SECONDS
