"""How a model is decoded where the user does not say: what its directory and its adapter's say, and who listens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_checkpoint as write_released
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.decoding import DECODERS
from tad.decoding.decoders import parameters
from tad.errors import TadError
from tad.models import DecodingDefaults, find_defaults
from tad.models.export import export
from tad.models.lora import CONFIG
from tad.models.source import BUNDLED, bundled_adapters, bundled_models
from tad.serving.card import describe_decoder
from tad.serving.settings import Settings
from tad.serving.validation import RequestValidator
from tiny_lm import write_checkpoint


def say(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"tad": values}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "model")
    say(folder, gen_length=64, decoder="fast-dllm", threshold=0.7)
    return folder


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    tad.load(model, device="cpu").attach(rank=2).save_pretrained(tmp_path / "adapter")
    say(tmp_path / "adapter", decoder="tad")
    return tmp_path / "adapter"


def test_a_directory_says_them_and_an_adapter_comes_first(model: Path, adapter: Path) -> None:
    assert find_defaults(model) == DecodingDefaults(64, "fast-dllm", 0.7)
    both = DecodingDefaults(64, "tad", None)  # another decoder, so its own threshold
    assert find_defaults(model, adapter) == both
    assert tad.load(model, adapter=adapter, device="cpu").defaults == both


def test_what_is_asked_for_comes_before_them() -> None:
    own = DecodingDefaults(64, "fast-dllm", 0.7)
    assert own.fill(None, None, {"block": 8}) == ("fast-dllm", 64, {"threshold": 0.7, "block": 8})
    assert own.fill(None, 32, {"threshold": 0.9}) == ("fast-dllm", 32, {"threshold": 0.9})
    assert own.fill("fast-dllm", None, {}) == ("fast-dllm", 64, {})  # a named decoder is the published one


def test_python_commands_and_server_use_them(model: Path) -> None:
    lm = tad.load(model, device="cpu")
    asked = tad.generate(lm, "hi", decoder="fast-dllm", gen_length=64, threshold=0.7)
    assert tad.generate(lm, "hi").decoded.steps == asked.decoded.steps
    words = ["generate", str(model), "hi", "--json", "--device", "cpu"]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert (found["steps"], found["gen_length"]) == (asked.decoded.steps, 64)
    assert (found["decoder"]["name"], found["decoder"]["threshold"]) == ("fast-dllm", 0.7)
    server = RequestValidator(lm, Settings(max_tokens=128))
    assert (server.decoder, server.default_tokens) == ("fast-dllm", 64)
    assert server.decoders["fast-dllm"].rule.threshold == 0.7  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("fastdllm_v2", "fast-dllm-v2"), ("sdar", "sdar"), ("sdar_moe", "sdar"), ("llada2", "llada2")],
)
def test_a_block_diffusion_model_is_decoded_by_its_own_method(
    tmp_path: Path, family: str, decoder: str
) -> None:
    assert find_defaults(write_released(tmp_path / "model", family)).decoder == decoder


def test_the_playground_describes_every_decoder() -> None:
    for name, decoder in DECODERS.items():
        found = describe_decoder(decoder)["threshold"]
        assert (found is None) == (parameters(decoder).get("threshold") is None), name
        assert found is None or found["min"] <= found["default"] <= found["max"]


def test_a_merged_student_keeps_what_its_adapter_said(model: Path, adapter: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "merged", adapter=adapter)
    assert find_defaults(tmp_path / "merged") == DecodingDefaults(64, "tad", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gen_length", 0), ("gen_length", 10**6), ("gen_length", True), ("decoder", 3), ("threshold", "high"), ("length", 3)],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_file(model: Path, name: str, value: Any) -> None:
    say(model, **{name: value})
    with pytest.raises(TadError, match=rf"generation_config\.json: tad\.{name}"):
        find_defaults(model)


def test_bundled_models_and_students_say_the_length_they_were_made_for() -> None:
    for name in bundled_models():
        assert find_defaults(name).gen_length == 96
        for student in bundled_adapters():
            if student.startswith(name):
                lm = tad.load(name, student, "cpu")
                assert find_defaults(name, student) == lm.defaults
                own = {"nano-fast-dllm-v2": ("fast-dllm-v2",)}.get(name, ("tad", "tad-leftmost"))
                assert lm.defaults.decoder in own
                assert json.loads((BUNDLED / student / CONFIG).read_text())["base_model_name_or_path"] == name
