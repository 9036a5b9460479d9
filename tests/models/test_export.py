"""Export: a checkpoint that looks like the original, and nothing half-written."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import ALL, edit_json, write_adapter, write_checkpoint

import tad
from tad.errors import TadError
from tad.models.export import export
from tad.models.transformer import MaskedDiffusionModel

FAMILIES = ("llada", "dream")
IDS = torch.arange(20)[None]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if ".partial" in file.name or ".old" in file.name]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_without_an_adapter_is_bit_equal(tmp_path: Path, family: str) -> None:
    source = write_checkpoint(tmp_path / "source", family, tokenizer=True)
    out = export(source, tmp_path / "out", max_shard_size="60KB")
    first, second = weights_of(source), weights_of(out)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(list(out.glob("*.safetensors"))) > 1
    (tmp_path / "new").write_text("")
    usual = (tmp_path / "new").stat().st_mode
    assert {file.stat().st_mode for file in out.iterdir()} == {usual}  # whom a new file lets read, these do
    again = export(out, tmp_path / "again")
    assert all(torch.equal(first[name], value) for name, value in weights_of(again).items())


@pytest.mark.parametrize("family", ALL)
def test_a_merged_export_equals_the_adapted_model(tmp_path: Path, family: str) -> None:
    source = write_checkpoint(tmp_path / "source", family)
    adapter = write_adapter(source, tmp_path / "adapter")
    out = export(source, tmp_path / "out", adapter=adapter, max_shard_size="200KB")
    adapted, merged = tad.load(source, adapter=adapter), tad.load(out)
    expected = adapted.model(IDS).logits
    assert (merged.model(IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    stored, wanted = weights_of(out), weights_of(source)
    assert {name: (value.dtype, value.shape) for name, value in stored.items()} == {
        name: (value.dtype, value.shape) for name, value in wanted.items()
    }
    in_memory = adapted.peft.merge_and_unload().state_dict()
    assert all(torch.equal(in_memory[name], value) for name, value in weights_of(out).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_config_tokenizer_and_code_travel_along(tmp_path: Path, family: str) -> None:
    source = write_checkpoint(tmp_path / "source", family, tokenizer=True)
    edit_json(source / "config.json", a_field_of_another_tool=[1, 2])
    (source / f"modeling_{family}.py").write_text("raise RuntimeError('must not run')\n")
    (source / "helper_it_imports.py").write_text("\n")
    (source / "generation_config.json").write_text('{"steps": 512}')
    out = export(source, tmp_path / "out", dtype="bf16")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert after == {**before, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    weights = ("config.json", "model.safetensors")
    for file in source.iterdir():
        if file.name not in weights:
            assert (out / file.name).read_bytes() == file.read_bytes()
    assert {file.name for file in out.iterdir()} == {file.name for file in source.iterdir()}
    assert all(value.dtype == torch.bfloat16 for value in weights_of(out).values())
    assert tad.load(out).encode("hi") == tad.load(source).encode("hi")


def test_the_dtype_stays_the_checkpoints_own_by_default(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    half = export(source, tmp_path / "half", dtype="fp16")
    assert tad.load(export(half, tmp_path / "again")).dtype == torch.float16


def test_a_directory_that_is_not_empty_needs_overwrite(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(TadError, match=f"{out}: "):
        export(source, out)
    assert [file.name for file in out.iterdir()] == ["precious"]
    export(source, out, overwrite=True)
    assert not (out / "precious").exists()
    assert not leftovers(tmp_path)


def test_an_empty_directory_is_fine_and_parents_are_made(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    (tmp_path / "empty").mkdir()
    assert tad.load(export(source, tmp_path / "empty")).family.name == "llada"
    assert tad.load(export(source, tmp_path / "a" / "b")).family.name == "llada"


def test_targets_that_would_hurt_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    (tmp_path / "file").write_text("x")
    for target in (
        source,
        source / "inside",
        tmp_path,
        tmp_path / "file",
    ):
        with pytest.raises(TadError, match=f"^{target}: "):
            export(source, target, overwrite=True)
    assert tad.load(source).family.name == "llada"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, error: BaseException
) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / "precious").write_text("x")

    def fail(self: MaskedDiffusionModel, folder: Path, **options: object) -> None:
        (Path(folder) / "model-00001-of-00002.safetensors").write_text("half")
        raise error

    monkeypatch.setattr(MaskedDiffusionModel, "save_pretrained", fail)
    with pytest.raises(TadError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        export(source, out, overwrite=overwrite)
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
    assert out.exists() == overwrite
    assert not overwrite or (out / "precious").exists()
    assert not leftovers(tmp_path)


def test_a_disk_that_is_too_small_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "source", "llada")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(TadError, match="/out: "):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("size", ["big", "5", "-1GB", ""])
def test_a_shard_size_without_meaning_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(TadError, match="shard size"):
        export(write_checkpoint(tmp_path / "source", "llada"), tmp_path / "out", max_shard_size=size)


def test_a_wrong_adapter_writes_nothing(tmp_path: Path) -> None:
    dream = write_checkpoint(tmp_path / "dream", "dream")
    adapter = write_adapter(dream, tmp_path / "adapter")
    with pytest.raises(TadError, match="adapter for dream"):
        export(write_checkpoint(tmp_path / "llada", "llada"), tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()
