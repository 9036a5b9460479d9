"""bench/bundle.py: cards say what the runs measured, an adapter of rounds is cut to the nearest one that is bundled, and the
fastest setting near the base is the default."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_world import write_run, write_store
from study_world import rounds_recipe

import bundle
import tad
from tad.config import load_recipe
from tad.errors import TadError
from tad.trajectories.store import TrajectoryStore
from tad_lab.pretraining.pretrain import pretrain
from tad_lab.pretraining.recipe import PretrainRecipe
from tad_lab.study import Study


def test_a_card_of_a_base_has_its_trainings_accuracy_and_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "log_every=1",
        "optimization.steps=2",
        "data.chunk=8",
        "data.examples=16",
        "optimization.tokens_per_step=256",
    ]
    monkeypatch.setattr(sys, "argv", ["tad", "pretrain", "pretrain-tiny", *words, "--out", "somewhere"])
    pretrain(load_recipe(PretrainRecipe, "pretrain-tiny", words), tmp_path / "run", quiet=True)
    plain = write_run(tmp_path / "eval", "one-by-one", 0.8, 0.75, tasks=["nano-word"])
    store = TrajectoryStore.open(write_store(tmp_path / "store", count=24))
    card = bundle.base_card(plain.folder, store.folder, [tmp_path / "run"], tmp_path / "model")
    assert f"`tad pretrain pretrain-tiny {' '.join(words)}`" in card  # not where it was written
    right = 100 * sum(bool(row.correct) for row in plain.rows()) / 24
    shown = {tuple(line.split(" | ")[:2]): line for line in card.splitlines() if line.startswith("| nano")}
    assert f"{right:.1f} ± " in shown["| nano-word", "plain"]
    assert "100.0 ± 0.0" in shown["| nano-word", "with reference"]  # the store keeps right ones
    assert "| confidence | 0.99 | " in card
    rows, (_, stats) = list(store.rows()), next(iter(store.shards()))
    store.write(0, [replace(rows[0], correct=None), *rows[1:]], stats)
    with pytest.raises(TadError, match=f"{store.folder}: .*tad regrade"):
        bundle.read_rollouts(store.folder)


@pytest.mark.parametrize("rank", [3, 6])
def test_a_truncated_adapter_is_the_nearest_of_its_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(bundle, "RANK", 3)
    down, up = torch.randn(rank, 8), torch.randn(10, rank)
    found = bundle.truncate({"q.lora_A.weight": down, "q.lora_B.weight": up}, scale=2.0)
    small = found["q.lora_B.weight"] @ found["q.lora_A.weight"]
    assert found["q.lora_A.weight"].shape == (3, 8)
    lost = torch.linalg.svdvals(2.0 * up.double() @ down.double())[3:]
    assert torch.dist(small, 2.0 * up.double() @ down.double()) == pytest.approx(float(lost.norm()), abs=1e-5)


@pytest.mark.parametrize(
    ("accuracies", "threshold", "words"),
    [
        ({0.1: 0.90, 0.3: 0.86, 0.5: 0.70}, 0.3, "the fastest within 1.5 points"),
        ({0.1: 0.60, 0.3: 0.50}, 0.1, "the most accurate; none is within 1.5 points"),
    ],
)
def test_the_default_decoder_is_the_fastest_near_the_base_else_the_most_accurate(
    tmp_path: Path, accuracies: dict[float, float], threshold: float, words: str
) -> None:
    base = write_run(tmp_path / "base", "one-by-one", 0.8, 0.8, examples=300, split="validation").folder
    runs = [
        write_run(
            tmp_path / f"tad,threshold={one}",
            "tad",
            4 + 10 * one,
            right,
            adapter="students/ltr/adapter",
            examples=300,
            split="validation",
            threshold=one,
        ).folder
        for one, right in accuracies.items()
    ]
    student = tmp_path / "student"
    student.mkdir()
    (student / "README.md").write_text("# student\n\n## Measured\nolder words\n\n| method | TPF |\n")
    for _ in range(2):  # a second choice takes the place of the first
        bundle.choose_decoder(student, base, runs, [base, runs[0]])
    saved = json.loads((student / "generation_config.json").read_text())["tad"]
    assert (saved["decoder"], saved["threshold"]) == ("tad", threshold)
    head, _, rest = (student / "README.md").read_text().partition("## Measured\n")
    assert head == "# student\n\n"
    assert rest.startswith(f"`tad` at {threshold:g} is its default decoder: of {len(runs)} settings")
    assert words in rest.splitlines()[0]
    assert "600 validation problems" in rest.splitlines()[0]
    assert rest.splitlines()[1].startswith("The truncation of its rank: ")
    assert rest.endswith("\n\n| method | TPF |\n")


def test_the_student_of_a_study_is_bundled_with_its_record_and_its_card(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "BUNDLED", tmp_path)
    monkeypatch.setattr(bundle, "RANK", 4)  # four rounds of rank 2 are 8
    base = str(world / "llada")
    changes = {
        "name": "study-rounds-tiny",
        "stores": {"parallel": {"order": "parallel", "part": [4, 4]}},
        "methods": {
            "ltr": {"rounds": 4},
            "ltr-parallel": {"like": "ltr", "title": "parallel", "store": "parallel", "after": "ltr/round=3"},
        },
        "tables": {"main": {"methods": ["base", "ltr/*", "ltr-parallel"]}},
    }
    study = Study(rounds_recipe(world, **changes), tmp_path / "study")
    with pytest.raises(TadError, match="ltr-parallel: seed 0 has no adapter"):
        bundle.bundle_students(study, 0, "tad study study-rounds")
    assert study.run(only=["base", "ltr-parallel"])
    study.recipe = study.recipe.model_copy(update={"model": "tiny"})  # the base's name where it is bundled
    bundle.bundle_students(study, 0, "tad study study-rounds")
    folder = tmp_path / "tiny-ltr"
    lm = tad.load(base, adapter=folder, device="cpu")
    assert lm.peft.peft_config["default"].r == 4
    record = (folder / "run.json").read_text()
    assert str(tmp_path) not in record
    assert str(world) not in record
    assert json.loads(record)["recipe"]["model"] == "tiny"
    card = (folder / "README.md").read_text()
    assert "a LoRA adapter of rank 4 on all seven projections, the nearest to that of rank 8" in card
    assert [line.split(" ")[1] for line in card.splitlines() if line.startswith("| ")] == [
        "method",
        "---",
        "base",
        "parallel",
    ]
    assert "Three rounds from left to right and a last one of parallel rollouts, " in card
