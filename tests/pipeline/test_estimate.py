"""`--list`: hours and memory of the bundled protocols by plain arithmetic, with neither weights nor data at hand."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tad.cli import app
from tad.config import bundled_recipes, load_recipe
from tad.pipeline import rates
from tad.pipeline.estimate import StageEstimate, estimate_run
from tad.pipeline.recipe import RatesSection, RunRecipe
from tad_lab.study.estimate import estimate_study
from tad_lab.study.plan import StudyPlan
from tad_lab.study.recipe import StudyRecipe

PROBLEMS = 1319 + 5000 + 164 + 500
ROLLOUTS = 7473 + 7500 + 10000


@pytest.mark.parametrize("name", ["run-llada", "run-dream", "run-llada-paper", "run-dream-paper"])
def test_the_stages_of_a_protocol_are_its_counts_times_its_rates(name: str) -> None:
    recipe = load_recipe(RunRecipe, name)
    recipe.check()
    assert recipe.rates is not None
    stages = {one.stage: one for one in estimate_run(recipe)}
    rollouts = ROLLOUTS + (4500 if name.endswith("paper") else 0)
    states = rollouts * (256 if name.endswith("paper") else 8)
    assert stages["collect"].hours == pytest.approx(rollouts * 256 * recipe.rates.rollout_ms / 3.6e6)
    assert stages["distill 'speed'"].hours == pytest.approx(states * recipe.rates.state_ms / 3.6e6)
    forwards = PROBLEMS * (256 + 6 * 64)  # one token at a time, and six settings at four tokens per forward
    assert stages["evaluate 'quality'"].hours == pytest.approx(forwards * recipe.rates.forward_ms / 3.6e6)
    assert stages["distill 'quality'"].gigabytes == recipe.rates.train_gb


@pytest.mark.parametrize("name", ["study-llada", "study-dream"])
def test_a_study_makes_its_store_its_students_and_the_base_s_answers_once(name: str, tmp_path) -> None:
    stages = [
        one.stage for one in estimate_study(StudyPlan(load_recipe(StudyRecipe, name), tmp_path), ["main"])
    ]
    rivals = ["dparallel", "d2f", "d3llm", "sft", "tad-quality", "tad-speed"]
    assert stages == [
        "collect 'teacher'",
        *(f"distill '{method}, seed 0'" for method in rivals),
        "evaluate 'base'",
        *(f"evaluate '{method}, seed 0'" for method in rivals),
    ]


def test_a_study_estimates_what_only_names(tmp_path) -> None:
    plan = StudyPlan(load_recipe(StudyRecipe, "study-llada"), tmp_path)
    stages = {one.stage for one in estimate_study(plan, ["lambda"])}
    assert "distill 'lambda/lambda=0.5, seed 0'" in stages
    assert not any("windows" in stage or "dparallel" in stage for stage in stages)
    assert len(stages) < len(estimate_study(plan)) / 2


@pytest.mark.parametrize("words", [["run", "run-llada"], ["study", "study-dream"]])
def test_the_commands_list_their_estimates_and_what_they_assume(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [*words, "--list"], catch_exceptions=False).stdout
    for text in ("collect", "distill", "evaluate", "hours", "GB", "18.3 ms", "Assumed"):
        assert text in shown


def hours(name: str, *overrides: str) -> dict[str, StageEstimate]:
    recipe = load_recipe(RunRecipe, name, overrides)
    return {one.stage: one for one in estimate_run(recipe)}


def test_an_estimate_follows_what_overrides_change() -> None:
    plain = hours("run-llada")
    lean = hours(
        "run-llada", "collect.cache=dual", "distill.batch.micro=1", "distill.gradient_checkpointing=half"
    )
    assert lean["collect"].hours < plain["collect"].hours / 5
    assert (
        plain["distill 'speed'"].hours < lean["distill 'speed'"].hours < 1.3 * plain["distill 'speed'"].hours
    )
    held = lean["distill 'speed'"].gigabytes
    assert held is not None
    assert held == pytest.approx(22.6, abs=1.0)  # docs/guide/llada-8b.md, by memory: it fits 24 GiB
    assert (
        hours("run-llada", "distill.compile=true")["distill 'speed'"].hours < plain["distill 'speed'"].hours
    )


@pytest.mark.parametrize("name", ["run-llada-small", "run-dream-small"])
def test_the_small_first_run_takes_under_three_hours_by_its_rates(name: str) -> None:
    recipe = load_recipe(RunRecipe, name)
    recipe.check()
    assert sum(one.hours for one in estimate_run(recipe)) < 3


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if name.startswith("run-")])
def test_every_run_has_an_estimate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = RatesSection(machine="here", rollout_ms=1, state_ms=1, forward_ms=1)
    monkeypatch.setattr(rates, "measure_rates", lambda _: measured)
    recipe = load_recipe(RunRecipe, name)
    found = estimate_run(recipe, rates.find_rates(recipe))
    assert len(found) >= 4
    assert all(one.hours > 0 for one in found)


def test_a_small_model_is_measured_where_its_recipe_has_no_rates() -> None:
    recipe = load_recipe(
        RunRecipe, "run-nano-llada", ["collect.gen_length=32", "collect.batch_size=2", "device=cpu"]
    )
    found = rates.find_rates(recipe)
    assert found.state_ms > found.rollout_ms > 0
    assert found.decode_gb == pytest.approx(0.0125, rel=0.01)  # 3.1M parameters in fp32
