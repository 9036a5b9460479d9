"""Recipes of studies on the tiny model of the evaluation tests, seconds on a CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from run_world import shared_sections

from tad.config import parse_recipe
from tad.evaluation.methods import read_outcomes
from tad.pipeline.recipe import lay_over
from tad_lab.study import Study, StudyRecipe
from tad_lab.study.cells import Base

BASE = Base("model", "tokenizer", "llada", "float32")


def study_values(world: Path) -> dict[str, Any]:
    own = {
        "seeds": [0, 1],
        "stores": {
            "teacher": {},
            "plain": {"privileged": False},
        },
        "methods": {
            "base": {"decoder": "one-by-one"},
            "fast-dllm": {"decoder": "fast-dllm"},
            "tad": {"store": "teacher", "distill": {"objective": {"name": "tad", "window": 2}}},
            "windows": {"like": "tad", "vary": {"distill.objective.window": [1, "all"]}, "seeds": [0]},
            "plain": {
                "like": "tad",
                "store": "plain",
                "distill": {"objective": {"teacher": "plain"}},
                "seeds": [0],
            },
            "cached": {"like": "tad", "decoder": "tad-cached", "seeds": [0]},
            "v2": {"title": "Fast-dLLM v2", "absent": "another base model; not built"},
        },
        "tables": {
            "main": {"title": "Main", "methods": ["base", "fast-dllm", "tad", "v2"]},
            "windows": {"title": "Windows", "methods": ["base", "windows/*"]},
        },
        "baseline": "fast-dllm",
    }
    return shared_sections(world) | own


def study_recipe(world: Path, **changes: Any) -> StudyRecipe:
    return parse_recipe(StudyRecipe, lay_over(copy.deepcopy(study_values(world)), changes))


def rounds_recipe(world: Path, **changes: Any) -> StudyRecipe:
    """Left to right in three rounds, each on its own prompts; a method after the second one; one trained whole."""
    objective = {"objective": {"name": "tad", "window": 2, "teacher": "plain"}}
    methods = {
        "base": {"decoder": "one-by-one"},
        "ltr": {
            "title": "round {round}",
            "store": "ltr",
            "rounds": 3,
            "split_prompts": True,
            "distill": objective,
        },
        "blocks": {"like": "ltr", "decoder": "dparallel"},
        "last": {
            "like": "ltr", "title": "last", "store": "teacher", "after": "ltr/round=2", "seeds": [0],
            "distill": {"objective": {"block_causal": 8}},
            "decoder": "d2f", "settings": {"rule": "entropy", "block_add": 1.0},
        },
        "whole": {"store": "ltr", "rounds": 2, "distill": {**objective, "full": True}, "seeds": [0]},
    }  # fmt: skip
    tables = {"main": {"title": "Main", "methods": ["base", "ltr/*", "last", "blocks/round=3", "whole/*"]}}
    values = study_values(world) | {"methods": methods, "tables": tables, "baseline": None, "seeds": [0]}
    values["stores"] = {"teacher": {}, "ltr": {"order": "left-to-right", "reference": "where-needed"}}
    values["evaluate"]["thresholds"] = {"entropy": [0.5]}
    return parse_recipe(StudyRecipe, lay_over(values, changes))


def assert_same_answers(mine: Path, theirs: Path) -> None:
    """Of two directories of a study, but for the decoder that one of its tests adds."""
    for path in (theirs / "answers").rglob("rows.jsonl"):
        folder = path.parent.relative_to(theirs)
        if not folder.name.startswith("tad-cached"):
            one, other = (read_outcomes(root / folder) for root in (mine, theirs))
            assert np.array_equal(one.correct, other.correct)
            assert np.array_equal(one.forwards, other.forwards)


def write_tuned_study(world: Path, out: Path) -> Path:
    """A study of two seeds, worked through, with a method tuned by two trials; the table of windows has been begun."""
    task = {"name": f"jsonl:{world / 'questions.jsonl'}", "split": "all", "limit": 6}
    trials = [{"learning": {"lr": 1e-2}}, {"learning": {"lr": 1e-4}}]
    recipe = study_recipe(
        world,
        methods={"fast-dllm": {"title": "Fast-dLLM"}, "tad": {"title": "TAD-Q"}},
        tuning={"tasks": [task], "trials": trials, "methods": {"tad": None}},
    )
    assert Study(recipe, out).run(["main", "windows/window=1"])
    return out
