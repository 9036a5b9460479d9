"""The whole chain on one layer of the released shapes: what only large matrices break. Needs 12 GB of memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tad
from tad.config import parse_recipe
from tad.evaluation.study import Chain, RunRecipe
from tad.models.export import export
from tad.models.family import FAMILIES
from tad.models.source import locate

pytestmark = pytest.mark.slow

WIDTHS: dict[str, dict[str, Any]] = {
    "llada": {
        "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 1, "mlp_hidden_size": 12288,
        "embedding_size": 126464, "vocab_size": 126464, "weight_tying": False,
    },
    "dream": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip


def write_wide(folder: Path, family: str) -> Path:
    """A checkpoint of random weights in shards, with the tokenizer of the bundled small model."""
    small = Path(locate(f"nano-{family}"))
    folder.mkdir()
    for file in small.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    values = json.loads((small / "config.json").read_text()) | WIDTHS[family]
    values = {key: value for key, value in values.items() if key not in ("dtype", "architectures")}
    kind = next(one for one in FAMILIES.values() if one.name == family).model_class
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = kind(kind.config_class(**values))
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else weight.fill_(1)
    model.save_pretrained(folder, max_shard_size="1GB")
    return folder


@pytest.mark.parametrize("family", list(WIDTHS))
def test_every_stage_works_at_the_released_widths(tmp_path: Path, family: str) -> None:
    model = write_wide(tmp_path / "model", family)
    assert len(list(model.glob("*.safetensors"))) > 1
    values = {
        "name": "wide", "model": str(model), "device": "cpu", "dtype": "fp32",
        "collect": {
            "tasks": [{"name": "nano-word", "split": "train", "options": {"size": 2}}],
            "gen_length": 8, "block": 8, "batch_size": 2, "keep": "all",
        },
        "window": {"limit": 2, "states": 2},
        "distill": {
            "states": 2, "adapter": {"rank": 4}, "learning": {"lr": 1e-3, "steps": 2},
            "batch": {"size": 2, "micro": 1}, "precision": "fp32",
        },
        "students": {"quality": {"objective": {"name": "tad", "window": "quality"}}},
        "evaluate": {
            "tasks": [{"name": "nano-word", "split": "test", "options": {"size": 2}}],
            "batch_size": 2, "settings": {"block": 8}, "thresholds": {"entropy": [0.5], "confidence": [0.9]},
        },
        "decoders": ["fast-dllm-dual"],
    }  # fmt: skip
    out = tmp_path / "out"
    assert Chain(parse_recipe(RunRecipe, values), out).run(("collect", "window", "distill", "evaluate"))
    rows = json.loads((out / "tables" / "main.json").read_text())["rows"]
    assert [row["scopes"]["nano-word"]["n"] for row in rows] == [2, 2, 2]
    export(model, tmp_path / "merged", adapter=out / "students" / "quality" / "adapter")
    assert tad.load(tmp_path / "merged", device="cpu").model.shape.vocab == WIDTHS[family]["vocab_size"]
    shutil.rmtree(tmp_path)  # 8 GB
