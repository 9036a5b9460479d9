"""What the tests of the harness plugin share: tiny models with room for real prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tad.evaluation.lm_eval import TASKS
from tad.models import LM, Family, load
from tiny_lm import write_checkpoint

NEEDS_HARNESS = "needs lm-evaluation-harness: pip install 'tad-dllm[eval]'"


def write_roomy(folder: Path, family: Family, scale: float = 8.0) -> Path:
    """A tiny checkpoint whose context holds a few thousand bytes of prompt."""
    write_checkpoint(folder, family, scale=scale)
    config = json.loads((folder / "config.json").read_text())
    for key in ("max_sequence_length", "max_position_embeddings"):
        if key in config:
            config[key] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_lm(folder: Path, family: Family, scale: float = 8.0) -> LM:
    return load(write_roomy(folder, family, scale), device="cpu")


def known_tasks(data_dir: Path) -> Any:
    """A manager that knows our tasks and nothing else."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"data_dir": str(data_dir)})


def run_harness(model: Any, names: list[str], manager: Any, limit: int) -> dict[str, Any]:
    """The harness's results with their samples, prompts in the model's chat format."""
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model, tasks=names, task_manager=manager, limit=limit, apply_chat_template=True, log_samples=True
    )
    assert found is not None
    return dict(found)
