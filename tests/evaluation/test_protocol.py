"""The paper's protocol, `run-llada` and `run-dream`, whole: a tiny model, a handful of problems per benchmark, and datasets as
their repositories on the hub lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from lm_eval_setup import write_roomy
from pyarrow import parquet

from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation import Results
from tad.evaluation.study import Chain, RunRecipe
from tad.models import DREAM, LLADA, Family
from tad.trajectories.store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]
SHARED = {
    "problem": "Compute $9 + 9$.",
    "solution": r"It is $\boxed{18}$.",
    "level": "Level 1",
    "type": "Algebra",
}


def write_repositories(root: Path) -> Path:
    """The datasets, three problems a split; one of MATH's is in both of its splits."""
    files: dict[str, list[dict[str, Any]]] = {}
    for split, first in (("train", 1), ("test", 4)):
        numbers = range(first, first + 3)
        files[f"gsm8k/main/{split}"] = [
            {"question": f"{n} + {n}?", "answer": f"So. #### {2 * n}"} for n in numbers
        ]
        sums = [
            {**SHARED, "problem": f"Compute ${n} + {n}$.", "solution": rf"$\boxed{{{2 * n}}}$"}
            for n in numbers
        ]
        files[f"math/algebra/{split}"] = [*sums[:2], SHARED]
    files["humaneval/openai_humaneval/test"] = [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n", "canonical_solution": "    return x\n",
         "test": "def check(candidate):\n    assert candidate(1) == 1\n", "entry_point": f"f{n}"}
        for n in range(2)
    ]  # fmt: skip
    files["mbpp/full/test"] = [
        {"task_id": n, "text": f"Write f{n}.", "code": f"def f{n}(x): return x", "test_list": [f"assert f{n}({x}) == {x}" for x in range(3)],
         "test_setup_code": ""}
        for n in (11, 12)
    ]  # fmt: skip
    files["kodcode/data/train"] = [
        {"question_id": f"k{n}", "question": f"Write g{n}.", "solution": f"def g{n}(x):\n    return x",
         "test": f"from solution import g{n}\n\ndef test_g():\n    assert g{n}(1) == 1\n"}
        for n in range(8)
    ]  # fmt: skip
    for name, rows in files.items():
        path = root / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return root


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=lambda family: family.name)
def test_the_whole_protocol_runs_from_repositories_to_page(family: Family, tmp_path: Path) -> None:
    model = write_roomy(tmp_path / "model", family)
    small = [
        f"model={model}", f"data_dir={write_repositories(tmp_path / 'data')}", "device=cpu", "dtype=fp32",
        "collect.gen_length=16", "collect.block=16", "collect.keep=all", "collect.tasks.2.sample=3", "window.limit=4",
        "window.states=2", "distill.states=2", "distill.adapter.rank=2", "distill.batch={size: 4, micro: 4}",
        "distill.precision=fp32", "evaluate.settings={block: 16}", "evaluate.tasks.1.limit=2", "student_first=false",
        "evaluate.thresholds={entropy: [0.5], confidence: [0.9]}",
    ]  # fmt: skip
    recipe = load_recipe(RunRecipe, f"run-{family.name}", small)
    out = tmp_path / "out"
    assert Chain(recipe, out).run()
    store = TrajectoryStore.open(out / "trajectories")
    assert (
        store.meta.examples == 3 + 2 + 3
    )  # without the problem that MATH's test split asks, and a sample of KodCode
    names = ["gsm8k", "math", "humaneval", "mbpp"]
    if family is DREAM:
        names = ["gsm8k (cot-zeroshot)", "math", "humaneval-instruct", "mbpp-instruct"]
    table = json.loads((out / "tables" / "main.json").read_text())
    assert table["tasks"] == dict(zip(names, (3, 2, 2, 2), strict=True))
    assert [row["method"] for row in table["rows"]] == [
        "base, one-by-one",
        "base, fast-dllm",
        "quality, tad",
        "speed, tad",
    ]
    for row in table["rows"]:
        found = row["scopes"]["mean over tasks"]
        each = [row["scopes"][name]["accuracy"]["value"] for name in names]
        assert found["accuracy"]["value"] == pytest.approx(sum(each) / 4)
    assert (out / "report" / "report.html").is_file()
    prompts = {
        row.task: row.prompt
        for row in Results.open(out / "evaluation" / "base" / "one-by-one,block=16").rows()
    }
    assert prompts["math"].count("Problem:") == 5  # four shots
    every = [
        *small,
        "collect.tasks.1.exclude=[]",
        "evaluate.tasks.1.limit=3",
    ]  # the third stands in both splits
    with pytest.raises(TadError, match=r"collect\.tasks: 1 of"):
        Chain(load_recipe(RunRecipe, f"run-{family.name}", every), tmp_path / "other").run(("collect",))
