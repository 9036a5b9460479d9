"""How long the stages of a run take and what they hold in memory, before anything starts.

Plain arithmetic: how many problems, steps, states and forwards the recipe asks for, times the rates of its model (`rates`).
Every answer is taken to fill its canvas, so stages that stop at the end of an answer are faster. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tad.evaluation.recipe import EvalTask
from tad.evaluation.sweep import FIRST, Setting
from tad.pipeline.recipe import ModelRecipe, RatesSection, RunRecipe
from tad.tasks import get_task
from tad.training.recipe import DistillRecipe
from tad.trajectories.recipe import CollectRecipe, TaskSection

# Problems of published splits, so that an estimate needs no data.
_SIZES = {
    ("gsm8k", "train"): 7473,
    ("gsm8k", "test"): 1319,
    ("math", "train"): 7500,
    ("math", "test"): 5000,
    ("prm12k", "train"): 12000,
    ("humaneval", "test"): 164,
    ("humaneval-instruct", "test"): 164,
    ("mbpp", "test"): 500,
    ("mbpp-instruct", "test"): 500,
}
# Measured at 8B shape (docs/lab/performance.md, a training step): of the time, and of what a sequence holds.
_COMPILED_TIME, _RECOMPUTED_TIME, _RECOMPUTED_MEMORY = 0.75, 1.16, 0.41
ANY_FAMILY = "llada"  # families differ in thresholds, not in how many settings there are


@dataclass(frozen=True)
class StageEstimate:
    """`gigabytes`: of memory on the device."""

    stage: str
    work: str
    hours: float
    gigabytes: float | None


def estimate_run(recipe: RunRecipe, rates: RatesSection | None = None) -> list[StageEstimate]:
    """The stages of `tad run`, at the recipe's own rates unless others are given."""
    rates = rates or recipe.rates
    if rates is None:
        return []
    found: list[StageEstimate] = []
    for one in recipe.trainings():
        collect = recipe.collect_recipe(one.collect, one.part)
        stage = "collect" if one.before is None else f"collect '{one.name}'"
        if all(known.stage != stage for known in found):
            found.append(estimate_collect(recipe, stage, collect, rates))
        training = recipe.distill_recipe(one.name, "store", one.values)
        rollouts = count_rollouts(recipe, collect)
        found.append(estimate_distill(one.name, training, rollouts, collect.gen_length, rates))
    tasks = recipe.evaluate.tasks
    length = recipe.eval_recipe(tasks).gen_length
    found += [
        estimate_answers(recipe, name, recipe.settings_of(name, ANY_FAMILY), tasks, length, rates)
        for name in ("base", *(one.name for one in recipe.trainings()), *recipe.adapters)
    ]
    return found


def estimate_collect(
    recipe: ModelRecipe, stage: str, collect: CollectRecipe, rates: RatesSection
) -> StageEstimate:
    rollouts, steps = count_rollouts(recipe, collect), collect.gen_length
    each = rates.rollout_cached_ms if collect.cache != "none" else None
    hours = rollouts * steps * (each or rates.rollout_ms) / 3.6e6
    return StageEstimate(stage, f"{rollouts:,} rollouts of {steps} steps", hours, rates.decode_gb)


def estimate_distill(
    name: str, recipe: DistillRecipe, trajectories: int, length: int, rates: RatesSection
) -> StageEstimate:
    """All rollouts are taken to be kept."""
    learning = recipe.learning
    if learning.steps:
        states = learning.steps * recipe.batch.size
    else:
        each = length if recipe.states == "all" else int(recipe.states)
        states = round(trajectories * each * learning.epochs)
    recomputed, adapter = recipe.gradient_checkpointing, recipe.adapter
    hours = states * rates.state_ms / 3.6e6
    hours *= (_RECOMPUTED_TIME if recomputed else 1.0) * (_COMPILED_TIME if recipe.compile else 1.0)
    held = rates.train_gb
    if held is not None:
        share = _RECOMPUTED_MEMORY if recomputed else 1.0
        held += rates.sequence_gb * ((recipe.batch.micro or recipe.batch.size) * share - rates.train_micro)
        held += rates.adapter_gb * ((adapter.rank if adapter else 128) / 128 - 1)
    return StageEstimate(f"distill '{name}'", f"{states:,} states", hours, held)


def estimate_answers(
    recipe: ModelRecipe,
    name: str,
    settings: Sequence[Setting],
    tasks: Sequence[EvalTask],
    length: int,
    rates: RatesSection,
) -> StageEstimate:
    """One token at a time a canvas takes a forward for each position, at other settings one for so many tokens."""
    runs = {one.name: one for one in settings}.values()
    problems = sum(count_problems(recipe, task, "test") * len(task.templates) for task in tasks)
    forwards = sum(length if one.decoder == FIRST else length / rates.tokens_per_forward for one in runs)
    work = f"{problems:,} problems at {len(runs)} settings, {problems * forwards:,.0f} forwards"
    return StageEstimate(
        f"evaluate '{name}'", work, problems * forwards * rates.forward_ms / 3.6e6, rates.decode_gb
    )


def count_rollouts(recipe: ModelRecipe, collect: CollectRecipe) -> int:
    _, parts = collect.part or (1, 1)
    return sum(count_problems(recipe, task, "train") for task in collect.tasks) * collect.samples // parts


def count_problems(recipe: ModelRecipe, task: TaskSection | EvalTask, split: str) -> int:
    """As the section says, else the split's published size, else as many as the data at hand has."""
    split = task.split or split
    given = task.sample or task.limit
    if given is not None:
        return min(given, _SIZES.get((task.name, split), given))
    if (task.name, split) in _SIZES:
        return _SIZES[task.name, split]
    found = get_task(task.name, recipe.data_dir, **task.options)
    return found.count(split if split in found.splits else found.default_split)
