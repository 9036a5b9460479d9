"""Block-diffusion models through every stage: trajectories with privileged prompts, window, students, evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import tad
from tad.config import load_recipe, parse_recipe
from tad.errors import TadError
from tad.evaluation import EvalRecipe
from tad.evaluation.run import evaluate
from tad.models import find_defaults
from tad.models.family import FAST_DLLM_V2, LLADA2, SDAR, Family
from tad.pipeline import Chain, RunRecipe
from tad.training.distill import distill
from tad.training.recipe import DistillRecipe
from tad.training.states import read_stores
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.rollout import ORDERS
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.window import measure_window
from tad.trajectories.workers import collect_here
from tiny_lm import write_checkpoint

LENGTH = 16
FAMILIES = [FAST_DLLM_V2, SDAR, LLADA2]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_stage_takes_a_block_diffusion_model(family: Family, tmp_path: Path) -> None:
    base = str(write_checkpoint(tmp_path / "base", family, scale=2.0))
    lines = [{"question": "q" * (3 + i), "reference": f"because {i}", "answer": str(i)} for i in range(4)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {"name": f"jsonl:{tmp_path / 'questions.jsonl'}"}

    def collect(order: str, **changes: Any) -> Path:
        values = {
            "model": base,
            "tasks": [task],
            "gen_length": LENGTH,
            "block": 8,
            "keep": "all",
            "device": "cpu",
        }
        recipe = parse_recipe(CollectRecipe, {**values, "order": order, **changes})
        out = tmp_path / "-".join([order, *changes])
        collect_here(recipe, out, tad.load(base, device="cpu"))
        return out

    for order in ORDERS:
        rows = read_stores([collect(order)], tad.load(base, device="cpu"))
        assert all(len(row.privileged_ids) > len(row.plain_ids) for row in map(rows.__getitem__, range(4)))
    with pytest.raises(TadError, match="cache 'prefix'"):
        collect("left-to-right", cache="prefix")
    store = tmp_path / "left-to-right"
    lm = tad.load(base, device="cpu")
    report = measure_window(lm, TrajectoryStore.open(store), states=4)
    assert all(0 < value < 1 for value in report.decay.mean)
    for name in ("tad", "dparallel", "sft"):
        values = {
            "name": name, "model": base, "trajectories": [str(store)], "objective": {"name": name}, "states": 2,
            "adapter": {"rank": 4}, "learning": {"steps": 2}, "batch": {"size": 4, "micro": 2}, "report_to": [],
            "device": "cpu",
        }  # fmt: skip
        done = distill(DistillRecipe.model_validate(values), tmp_path / name, quiet=True)
        log = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        assert all(math.isfinite(line["loss"]) for line in log if "loss" in line)
        assert find_defaults(base, done.path).decoder == find_defaults(base).decoder
    student = tad.load(base, adapter=done.path, device="cpu")
    for decoder in (family.name, "one-by-one"):
        asked = {"model": base, "tasks": [task], "decoder": decoder, "gen_length": LENGTH, "device": "cpu"}
        asked["settings"] = {"fast-dllm-v2": {"sub_block": 4}, "one-by-one": {"block": 8}}.get(decoder, {})
        found = evaluate(student, parse_recipe(EvalRecipe, asked), tmp_path / f"eval-{decoder}")
        assert len(list(found.rows())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", [FAST_DLLM_V2, SDAR], ids=lambda family: family.name)
def test_the_bundled_rounds_of_a_family_run_from_rollouts_to_page(family: Family, tmp_path: Path) -> None:
    tasks = {}
    for part, numbers in (("train", range(8)), ("test", range(8, 12))):
        tasks[part] = tmp_path / f"{part}.jsonl"
        lines = [{"question": "q" * (3 + i), "reference": f"so {i}", "answer": str(i)} for i in numbers]
        tasks[part].write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = [
        f"model={write_checkpoint(tmp_path / 'base', family, scale=2.0)}", "device=cpu", "rounds=2",
        f"collect.tasks=[{{name: 'jsonl:{tasks['train']}'}}]", "collect.gen_length=16", "collect.block=8",
        "collect.keep=all", "window.limit=4", "window.states=2", "distill.adapter.rank=2", "distill.learning.steps=2",
        "distill.batch={size: 4, micro: 4}", "distill.precision=fp32", "student_first=false",
        f"evaluate.tasks=[{{name: 'jsonl:{tasks['test']}'}}]", "evaluate.thresholds={confidence: [0.9]}",
        "evaluate.settings={block: 8}",
    ]  # fmt: skip
    chain = Chain(load_recipe(RunRecipe, f"run-{family.name}-ltr", small), tmp_path / "run")
    assert chain.run()
    second = TrajectoryStore.open(tmp_path / "run" / "trajectories-ltr-round2")
    assert second.meta.recipe["order"] == "left-to-right"
    assert len(list(second.rows())) == 4  # its half of the prompts
    names = [f"{name}, {family.name}" for name in ("base", "ltr-round1", "ltr-round2")]
    assert [row.method for row in chain.table().rows][1:] == names
    assert (tmp_path / "run" / "report" / "report.html").is_file()
