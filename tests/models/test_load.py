"""tad.load: what it accepts, what it refuses and in which words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, tiny_model, write_checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import tad
from tad.errors import TadError
from tad.models.source import BUNDLED, locate

FAMILIES = ("llada", "dream")
IDS = torch.arange(20)[None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_loads_single_and_sharded_directories_bit_equal(tmp_path: Path, family: str, shard: str) -> None:
    folder = write_checkpoint(tmp_path / "model", family, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "60KB")
    lm = tad.load(folder)
    assert torch.equal(lm.model(IDS).logits, tiny_model(family)(IDS).logits)
    assert (lm.family.name, lm.context, lm.tokenizer, lm.adapter) == (family, 256, None, None)
    assert not lm.model.training


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("auto", "options"),
    [(AutoModel, {}), (AutoModelForCausalLM, {}), (AutoModel, {"trust_remote_code": True})],
)
def test_auto_classes_run_our_code(tmp_path: Path, family: str, auto: type, options: dict[str, bool]) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    assert AutoConfig.from_pretrained(folder).model_type == {"llada": "llada", "dream": "Dream"}[family]
    model = auto.from_pretrained(folder, **options)
    assert type(model).__module__.startswith("tad.")
    assert torch.equal(model(IDS).logits, tiny_model(family)(IDS).logits)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("half", torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_dtype_by_name_or_torch_dtype(tmp_path: Path, name: str | torch.dtype, dtype: torch.dtype) -> None:
    lm = tad.load(write_checkpoint(tmp_path / "model", "dream"), dtype=name)
    assert {parameter.dtype for parameter in lm.model.parameters()} == {dtype} == {lm.dtype}
    assert lm.model(IDS).logits.dtype == dtype


@pytest.mark.parametrize("field", ["torch_dtype", "dtype", None])
def test_dtype_defaults_to_what_the_config_says_else_to_the_stored_one(
    tmp_path: Path, field: str | None
) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada")
    weights = folder / "model.safetensors"
    save_file({name: value.to(torch.float16) for name, value in load_file(weights).items()}, weights)
    edit_json(folder / "config.json", torch_dtype=None)
    edit_json(folder / "config.json", **({field: "bfloat16"} if field else {}))
    assert tad.load(folder).dtype == (torch.bfloat16 if field else torch.float16)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto"])
def test_device_map(tmp_path: Path, device_map: str | dict[str, str]) -> None:
    lm = tad.load(write_checkpoint(tmp_path / "model", "dream"), device_map=device_map)
    ids = IDS.to(lm.device)
    assert torch.allclose(lm.model(ids).logits.cpu(), tiny_model("dream")(IDS).logits, atol=1e-4)


def test_weights_offloaded_by_accelerate_still_compute_and_cache(tmp_path: Path) -> None:
    from accelerate import cpu_offload

    model = tiny_model("llada")
    expected = model(IDS).logits
    cpu_offload(model, execution_device="cpu")
    cache = model.new_cache(1, 20)
    assert torch.equal(model(IDS, cache=cache, cache_position=slice(0, 20)).logits, expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llada", {"n_kv_heads": 2}),
        ("llada", {"n_kv_heads": None, "multi_query_attention": True}),
        ("llada", {"weight_tying": True}),
        ("llada", {"n_kv_heads": 1, "weight_tying": True, "mlp_hidden_size": 112}),
        ("llada", {"include_qkv_bias": True}),
        ("llada", {"include_bias": True}),
        ("dream", {"tie_word_embeddings": True}),
        ("dream", {"num_key_value_heads": 4}),
        ("dream", {"head_dim": 24}),
    ],
)
def test_other_shapes_of_a_family_load_bit_equal(tmp_path: Path, family: str, changes: dict) -> None:
    folder = write_checkpoint(tmp_path / "model", family, **changes)
    lm = tad.load(folder)
    assert torch.equal(lm.model(IDS).logits, tiny_model(family, **changes)(IDS).logits)


@pytest.mark.parametrize(("family", "field"), [("llada", "weight_tying"), ("dream", "tie_word_embeddings")])
def test_a_tied_model_stores_no_head_but_accepts_a_copy_of_the_embedding(
    tmp_path: Path, family: str, field: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", family, **{field: True})
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    names = tad.load(folder).family.names
    assert f"{names.head}.weight" not in tensors
    tensors[f"{names.head}.weight"] = tensors[f"{names.embed}.weight"].clone()
    save_file(tensors, weights)
    assert torch.equal(tad.load(folder).model(IDS).logits, tiny_model(family, **{field: True})(IDS).logits)
    tensors[f"{names.head}.weight"] += 1
    save_file(tensors, weights)
    with pytest.raises(TadError, match=names.head):
        tad.load(folder)


def remove_shard(folder: Path) -> None:
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()


def truncate(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-10])


def drop_tensor(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, shard)


def store_twice(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    save_file({**load_file(second), **dict([next(iter(load_file(first).items()))])}, second)


def edit(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def map_weights(**names: str) -> Callable[[Path], None]:
    """Set entries of the index; a name `all` stands for every tensor."""

    def write(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        found = json.loads(index.read_text())["weight_map"]
        new = dict.fromkeys(found, names["all"]) if "all" in names else {**found, **names}
        edit_json(index, weight_map=new)

    return write


def remove_weights(left: str | None = None) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for file in folder.glob("model*"):
            file.unlink()
        if left is not None:
            (folder / left).write_bytes(b"x")

    return remove


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (remove_shard, r"model-00001-of-\d+.safetensors: missing"),
    "truncated shard": (truncate, r"model-\S+.safetensors: is truncated"),
    "lost tensor": (drop_tensor, r"index.json: says \S+ is in model-00001"),
    "tensor stored twice": (store_twice, r"has \S+, which model-00001\S+ has too"),
    "index names a tensor nobody has": (
        map_weights(x="model-00001-of-00008.safetensors"),
        r"index.json: says x",
    ),
    "index points outside": (map_weights(all="../elsewhere.safetensors"), r"weight_map"),
    "pickles only": (remove_weights("pytorch_model.bin"), r"pickled"),
    "no weights": (remove_weights(), r"model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config.json: missing"),
    "unknown model_type": (edit(model_type="gpt2"), r"model_type 'gpt2'"),
    "no model_type": (edit(model_type=None), r"model_type None"),
    "wrong width": (edit(d_model=128), r"wte.weight has shape \[320, 64\], config.json implies \[320, 128\]"),
    "wrong MLP": (edit(mlp_hidden_size=100), r"ff_proj.weight"),
    "more layers": (edit(n_layers=3), r"config.json: has 3 layers"),
    "fewer layers": (edit(n_layers=1), r"config.json: has 1 layers"),
    "heads that do not fit": (edit(n_heads=5), r"config.json: .* 5 heads"),
    "another block type": (edit(block_type="sequential"), r"config.json: block_type='sequential'"),
    "no mask token": (edit(mask_token_id=None), r"config.json: .*mask_token_id"),
    "no end token": (edit(eos_token_id=None), r"config.json: .*eos_token_id"),
    "mask id outside": (edit(mask_token_id=320), r"mask_token_id is 320"),
    "negative pad id": (edit(pad_token_id=-1), r"pad_token_id is -1"),
    "unknown dtype": (edit(torch_dtype="int8"), r"dtype 'int8'"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_directory_is_refused_in_one_line(tmp_path: Path, problem: str) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada", shard="60KB")
    damage, words = BROKEN[problem]
    damage(folder)
    with pytest.raises(TadError, match=words) as caught:
        tad.load(folder)
    assert "\n" not in str(caught.value)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "dream")
    for arguments, words in (
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"dtype": torch.int64}, "int64"),
        ({"device": "teapot"}, "device 'teapot'"),
        ({"device": "cpu", "device_map": "auto"}, "device_map"),
        ({"attn_implementation": "eager"}, "'eager'"),
    ):
        with pytest.raises(TadError, match=words):
            tad.load(folder, **arguments)
    if not torch.cuda.is_available():
        with pytest.raises(TadError, match="device 'cuda'"):
            tad.load(folder, device="cuda")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for source in (folder / "config.json", tmp_path / "nothing", "word", tmp_path / "adapter"):
        with pytest.raises(TadError, match=f"^{source}: "):
            tad.load(source)
    with pytest.raises(TadError, match=r"nano-llada --adapter nano-llada-ltr$"):
        tad.load("nano-llada-ltr")


def test_a_hub_id_downloads_text_and_safetensors_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada")
    asked = {}

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert tad.load("owner/name", revision="v1").family.name == "llada"
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1")
    assert set(asked["patterns"]) == {"*.json", "*.txt", "*.jinja", "*.model", "*.safetensors"}
    locate("owner/name", weights=False)
    assert "*.safetensors" not in asked["patterns"]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("long story\nwith lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(TadError, match=r"^owner/name: ") as caught:
        tad.load("owner/name")
    assert "\n" not in str(caught.value)


def test_special_tokens_fall_back_to_the_generation_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "dream")
    edit_json(folder / "config.json", mask_token_id=None, eos_token_id=None, pad_token_id=None)
    (folder / "generation_config.json").write_text(
        json.dumps({"mask_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": None})
    )
    tokens = tad.load(folder).tokens
    assert (tokens.mask, tokens.eos, tokens.pad, tokens.bos, tokens.eot) == (7, 8, 8, None, None)
    assert tokens.ends == (8,)


def test_loading_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada", tokenizer=True)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    copy = shutil.copytree(folder, tmp_path / "copy")
    tad.load(copy)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "family"),
    [("nano-llada", "llada"), ("nano-dream", "dream"), ("nano-fast-dllm-v2", "fast-dllm-v2")],
)
def test_bundled_models_load_by_name(name: str, family: str) -> None:
    lm = tad.load(name, device="cpu")
    assert lm.family.name == family
    assert sum(weight.numel() for weight in lm.model.parameters()) < 4_000_000
    assert lm.decode(lm.encode("Tom has 3 apples .")[-2:])


def test_a_directory_hides_a_bundled_model_only_if_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano-llada").mkdir()  # say, of a run
    assert locate("nano-llada") == BUNDLED / "nano-llada"
    assert locate("./nano-llada") == Path("nano-llada")
    (tmp_path / "nano-llada" / "config.json").write_text("{}")
    assert locate("nano-llada") == Path("nano-llada")


def test_under_torchrun_the_default_device_is_the_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tad.models import lm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert lm._default_device() == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert lm._default_device() == "cuda:3"


def test_of_a_whole_file_and_shards_the_one_that_is_checked_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada", shard="60KB")
    tiny_model("llada", seed=7).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    assert torch.equal(tad.load(folder).model(IDS).logits, tiny_model("llada", seed=7)(IDS).logits)
    whole = folder / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-8])
    with pytest.raises(TadError, match=r"model.safetensors: is truncated"):
        tad.load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_parameters_in_the_newer_form_are_read_or_refused(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path / "model", family, rope_theta=100.0)
    wanted = tad.load(folder).model(IDS).logits
    edit_json(
        folder / "config.json", rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 100.0}
    )
    assert torch.equal(tad.load(folder).model(IDS).logits, wanted)
    edit_json(
        folder / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
    )
    with pytest.raises(TadError, match=r"rope_parameters of type 'yarn'"):
        tad.load(folder)
