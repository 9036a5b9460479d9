"""Methods and cells of a study: what is inherited and varied, what a hash is made of, and which recipes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from study_world import BASE, study_recipe

from tad.errors import TadError
from tad_lab.study import Study, StudyRecipe
from tad_lab.study.cells import Base, Hashes, Source, resolve_methods


def test_varied_and_inherited_methods_are_written_out(world: Path) -> None:
    found = resolve_methods(study_recipe(world))
    assert list(found) == [
        "base",
        "fast-dllm",
        "tad",
        "windows/window=1",
        "windows/window=all",
        "plain",
        "cached",
        "v2",
    ]
    assert found["windows/window=1"].distill() == {"objective": {"name": "tad", "window": 1}}
    assert found["plain"].distill() == {"objective": {"name": "tad", "window": 2, "teacher": "plain"}}
    assert (found["plain"].store, found["cached"].store, found["base"].store) == ("plain", "teacher", None)
    assert found["v2"].absent


def titles_of(world: Path, title: str | None) -> list[str]:
    varied = {"title": title, "like": "tad", "vary": {"distill.objective.window": [1, "all"]}}
    methods = study_recipe(world).model_dump(exclude_defaults=True)["methods"]
    found = resolve_methods(study_recipe(world, methods={**methods, "windows": varied}))
    return [one.title for name, one in found.items() if name.startswith("windows/")]


def test_a_title_says_what_is_varied_in_its_braces_or_behind_it(world: Path) -> None:
    assert titles_of(world, "near: {window} steps") == ["near: 1 steps", "near: all steps"]
    assert titles_of(world, "TAD") == ["TAD, window 1", "TAD, window all"]
    assert titles_of(world, None) == ["windows, window 1", "windows, window all"]


def test_no_store_may_be_of_problems_that_are_evaluated(world: Path, tmp_path: Path) -> None:
    Study(study_recipe(world), tmp_path)
    with pytest.raises(TadError, match="is also what trajectories are collected of"):
        Study(study_recipe(world, allow_contamination=False), tmp_path)
    others = {"tasks": [{"name": "nano-word", "options": {"size": 4}}]}
    stores = {"teacher": others, "plain": others}
    Study(study_recipe(world, stores=stores, allow_contamination=False), tmp_path)


def test_a_recipe_that_was_written_out_and_read_again_is_the_same(world: Path) -> None:
    recipe = study_recipe(world)
    again = StudyRecipe.model_validate(recipe.model_dump(mode="json"))
    assert resolve_methods(again) == resolve_methods(recipe)


def test_a_trial_stands_between_the_tuned_method_and_what_is_changed_in_its_like(world: Path) -> None:
    recipe = study_recipe(
        world,
        tuning={
            "tasks": [{"name": "x", "split": "validation"}],
            "trials": [{"objective": {"window": 5, "lambda": 9.0}}],
            "methods": {"tad": None},
        },
    )
    found = resolve_methods(recipe)
    trial = {"objective": {"window": 5, "lambda": 9.0}}
    assert found["tad"].distill(trial)["objective"] == {"name": "tad", "window": 5, "lambda": 9.0}
    assert found["windows/window=1"].distill(trial)["objective"] == {
        "name": "tad",
        "window": 1,
        "lambda": 9.0,
    }
    assert found["windows/window=1"].tuned_as == "tad"
    assert found["base"].tuned_as is None


def cell_hashes(world: Path, base: Base = BASE, **changes: object) -> dict[str, str | None]:
    study = Study(study_recipe(world, **changes), world / "nowhere")
    hashes = Hashes(study.recipe, base)
    cell = study.cell("tad", 0)
    assert cell is not None
    return {
        "store": hashes.store(Source("teacher")),
        "student": hashes.student(cell),
        "answers": hashes.answers(cell),
        "cell": hashes.cell(cell),
    }


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"collect": {"seed": 3}}, {"store", "student", "answers", "cell"}),
        ({"window": {"states": 3}}, {"store", "student", "answers", "cell"}),
        ({"distill": {"learning": {"steps": 4}}}, {"student", "answers", "cell"}),
        ({"dtype": "bf16"}, {"store", "student", "answers", "cell"}),
        ({"evaluate": {"gen_length": 24}}, {"answers", "cell"}),
        ({"evaluate": {"thresholds": {"entropy": [0.5]}}}, {"cell"}),
        ({"evaluate": {"batch_size": 3}}, set()),
        ({"collect": {"batch_size": 3}}, set()),
        ({"distill": {"batch": {"micro": 2}}}, set()),
        ({"device": "cuda", "name": "other", "seeds": [5]}, set()),
    ],
)
def test_a_change_makes_new_what_it_decides_and_nothing_else(
    world: Path, changes: dict, changed: set[str]
) -> None:
    before, after = cell_hashes(world), cell_hashes(world, **changes)
    assert {name for name in before if before[name] != after[name]} == changed


def test_another_base_or_seed_is_another_cell(world: Path) -> None:
    before, after = cell_hashes(world), cell_hashes(world, Base("other", "tokenizer", "llada", "float32"))
    assert not set(before.values()) & set(after.values())
    study = Study(study_recipe(world), world / "nowhere")
    hashes = Hashes(study.recipe, BASE)
    assert len({hashes.student(study.cell("tad", seed)) for seed in (0, 1)}) == 2


# Bad recipes

HELD_OUT = {"name": "nano-word", "split": "validation"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"tad": {"store": "nowhere"}}}, "'nowhere' is not one of the stores: teacher, plain"),
        ({"methods": {"plain": {"like": "tda"}}}, "like: 'tda' is not one of the methods"),
        ({"methods": {"tad": {"like": "plain"}}}, "is like itself"),
        ({"tables": {"main": {"methods": ["nothing*"]}}}, "'nothing\\*' is none of the methods"),
        ({"base": "tad"}, "base: 'tad' should be a method without a store"),
        ({"base": "bass"}, "base: 'bass' should be one of the methods"),
        ({"baseline": "v2"}, "baseline: 'v2' should be one of the methods"),
        (
            {"tables": {"main": {"baseline": "ted"}}},
            "tables.main.baseline: 'ted' should be one of the methods",
        ),
        ({"validation": "nowhere"}, "'nowhere' is not one of the stores"),
        ({"methods": {"tad": {"distill": {"learning": {"lr": -1}}}}}, "'learning.lr'"),
        ({"collect": {"order": "best"}}, "collect: 'order'"),
        *(
            ({"methods": {"windows": {"title": title}}}, r"methods\.windows\.title: .*\{window\}")
            for title in ("{lambda}", "{window.x}", "{window", "{0}")
        ),
        (
            {
                "methods": {
                    "both": {"like": "tad", "vary": {"distill.objective.floor": [1], "settings.floor": [1]}}
                }
            },
            r"methods\.both\.vary",
        ),
        ({"tuning": {"tasks": [HELD_OUT], "methods": {"tad": [{}], "plain": [{}, {}]}}}, "number of trials"),
        (
            {"tuning": {"tasks": [{"name": "nano-word"}], "trials": [{}], "methods": {"tad": None}}},
            "the test's",
        ),
    ],
)
def test_bad_studies_are_refused_before_anything_is_loaded(
    world: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(TadError, match=message):
        Study(study_recipe(world, **changes), tmp_path)
