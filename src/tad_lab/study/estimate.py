"""How long a study takes and what it holds in memory: the arithmetic of `tad.pipeline.estimate` over its cells."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tad.evaluation.recipe import EvalTask
from tad.evaluation.sweep import Setting
from tad.pipeline.estimate import (
    ANY_FAMILY,
    StageEstimate,
    count_rollouts,
    estimate_answers,
    estimate_collect,
    estimate_distill,
)
from tad.pipeline.recipe import Values
from tad.training.recipe import DistillRecipe
from tad.trajectories.recipe import CollectRecipe
from tad_lab.study.cells import ResolvedMethod, as_folder
from tad_lab.study.plan import StudyPlan


def estimate_study(plan: StudyPlan, only: Sequence[str] = ()) -> list[StageEstimate]:
    """The stores, trainings and answers of a study's tables, each once: the decoders of a model share its answers, under the
    name of the first. Trials of tuning are trainings too. `only`: patterns of tables or methods, as in a run."""
    plan.check_only(only)
    recipe, rates = plan.recipe, plan.recipe.rates
    if rates is None:
        return []
    length = recipe.eval_recipe(recipe.evaluate.tasks).gen_length
    stores: dict[str, CollectRecipe] = {}
    trainings: dict[str, tuple[str, DistillRecipe, str]] = {}
    answers: dict[str, tuple[str, list[Setting], list[EvalTask]]] = {}

    def add(
        label: str, method: ResolvedMethod, seed: int | None, changes: Values | None, tasks: list[EvalTask]
    ) -> None:
        values = method.distill(changes)
        key = json.dumps([method.store, method.before, values, seed])
        if method.store is not None:
            store = (
                method.store if method.before is None else f"{method.store} by {method.before}, seed {seed}"
            )
            collect = recipe.collect_recipe(recipe.stores[method.store], method.part)
            stores.setdefault(store, collect)
            trainings.setdefault(
                key, (label, recipe.distill_recipe(as_folder(method.name), "store", values), store)
            )
        settings = recipe.evaluate.plan(method.decoder, ANY_FAMILY, length, method.settings)
        found = answers.setdefault(
            json.dumps([key, [task.model_dump() for task in tasks]]), (label, [], tasks)
        )
        found[1].extend(settings)

    tuning = recipe.tuning
    places = plan.places(only)
    asked, wanted = {place[:2] for place in places}, {plan.methods[name].tuned_as for _, name, _ in places}
    for name in tuning.methods if tuning else ():
        if name not in wanted:
            continue
        assert tuning is not None
        for number, changes in enumerate(tuning.trials_of(name)):
            tried = plan.methods[plan.tuned_method(name)]
            add(f"{name}, trial {number}", tried, tuning.seed, changes, tuning.tasks)
    for table in recipe.tables:
        for method in (plan.methods[name] for name in plan.rows_of(table)):
            if (table, method.name) not in asked:
                continue
            for seed in [] if method.absent else plan.seeds_of(method, table):
                label = method.name if seed is None else f"{method.name}, seed {seed}"
                add(label, method, seed, None, recipe.evaluate.tasks)
    found = [estimate_collect(recipe, f"collect '{name}'", one, rates) for name, one in stores.items()]
    for label, training, store in trainings.values():
        rollouts = count_rollouts(recipe, stores[store])
        found.append(estimate_distill(label, training, rollouts, stores[store].gen_length, rates))
    for label, settings, tasks in answers.values():
        found.append(estimate_answers(recipe, label, settings, tasks, length, rates))
    return found
