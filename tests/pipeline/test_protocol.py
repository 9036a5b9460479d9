"""The paper's protocol, `run-llada` and `run-dream`, whole: a tiny model, a handful of problems per benchmark, and datasets as
their repositories on the hub lay them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval_setup import write_roomy
from run_world import write_repositories

from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation import Results
from tad.models import DREAM, LLADA, Family
from tad.pipeline import Chain, RunRecipe
from tad.runs.record import last_call, read_record
from tad.trajectories.store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]


SMALL = [
    "device=cpu", "dtype=fp32", "collect.gen_length=16", "collect.block=16", "collect.keep=all", "collect.tasks.2.sample=3",
    "window.limit=4", "window.states=2", "distill.adapter.rank=2", "distill.batch={size: 4, micro: 4}",
    "distill.precision=fp32",
]  # fmt: skip


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=lambda family: family.name)
def test_the_whole_protocol_runs_from_repositories_to_page(family: Family, tmp_path: Path) -> None:
    model = write_roomy(tmp_path / "model", family)
    small = [
        *SMALL, f"model={model}", f"data_dir={write_repositories(tmp_path / 'data')}", "distill.states=2",
        "evaluate.settings={block: 16}", "evaluate.tasks.1.limit=2", "student_first=false",
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


@pytest.mark.parametrize(("family", "windows"), [(LLADA, [8, 20]), (DREAM, [6, 12])])
def test_the_papers_literal_settings_train_on_every_state(
    family: Family, windows: list[int], tmp_path: Path
) -> None:
    small = [
        *SMALL,
        f"model={write_roomy(tmp_path / 'model', family)}",
        f"data_dir={write_repositories(tmp_path / 'data')}",
    ]
    out = tmp_path / "out"
    assert Chain(load_recipe(RunRecipe, f"run-{family.name}-paper", small), out).run(
        ("collect", "window", "distill")
    )
    store = TrajectoryStore.open(out / "trajectories")
    assert {row.task for row in store.rows()} == {"gsm8k", "prm12k", "kodcode"}
    calls = [last_call(read_record(out / "students" / name)) for name in ("quality", "speed")]
    assert [call["objective"]["window"] for call in calls] == windows
    assert {call["states_per_epoch"] for call in calls} == {16 * store.meta.examples}
