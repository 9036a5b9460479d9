"""The paper's protocol on one layer of the released shapes: what only large matrices break. Needs 12 GB of memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_world import write_repositories

import tad
from tad.config import load_recipe
from tad.models.export import export
from tad.models.family import FAMILIES
from tad.models.source import locate
from tad.pipeline import Chain, RunRecipe

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]

WIDTHS: dict[str, dict[str, Any]] = {
    "llada": {
        "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 1, "mlp_hidden_size": 12288,
        "embedding_size": 126464, "vocab_size": 126464, "weight_tying": False,
        "max_sequence_length": 4096,
    },
    "dream": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 1,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
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
def test_the_protocol_works_at_the_released_widths(tmp_path: Path, family: str) -> None:
    """`run-llada` and `run-dream`, a problem of every dataset. With these thresholds a forward reveals everything."""
    model = write_wide(tmp_path / "model", family)
    assert len(list(model.glob("*.safetensors"))) > 1
    small = [
        f"model={model}", f"data_dir={write_repositories(tmp_path / 'data')}", "device=cpu", "dtype=fp32",
        "collect.gen_length=4", "collect.block=4", "collect.batch_size=1", "collect.keep=all", "collect.tasks.0.limit=1",
        "collect.tasks.1.limit=1", "collect.tasks.2.sample=1", "window={limit: 3, states: 1}", "distill.states=1",
        "distill.adapter.rank=4", "distill.learning.lr=0.001", "distill.batch={size: 3, micro: 1}", "distill.precision=fp32",
        "evaluate.batch_size=1", "evaluate.settings={block: 4}", *(f"evaluate.tasks.{i}.limit=1" for i in range(4)),
        "evaluate.thresholds={entropy: [20.0], confidence: [0.0]}", "student_first=false", "decoders=[fast-dllm-dual]",
    ]  # fmt: skip
    out = tmp_path / "out"
    assert Chain(load_recipe(RunRecipe, f"run-{family}", small), out).run()
    table = json.loads((out / "tables" / "main.json").read_text())
    assert list(table["tasks"].values()) == [1, 1, 1, 1]
    assert len(table["rows"]) == 4
    assert all(row["scopes"]["mean over tasks"]["n"] == 4 for row in table["rows"])
    assert (out / "report" / "report.html").is_file()
    export(model, tmp_path / "merged", adapter=out / "students" / "quality" / "adapter")
    assert tad.load(tmp_path / "merged", device="cpu").model.shape.vocab == WIDTHS[family]["vocab_size"]
    shutil.rmtree(tmp_path)  # 8 GB
