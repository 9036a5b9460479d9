"""Recipes of a chain and a study on the tiny model of the evaluation tests: seconds on a CPU."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tad.config import parse_recipe
from tad.evaluation.study import RunRecipe, StudyRecipe
from tad.evaluation.study.listener import Silent
from tad.evaluation.study.recipe import lay_over

GEN_LENGTH = 16


def _shared(world: Path) -> dict[str, Any]:
    task = f"jsonl:{world / 'questions.jsonl'}"
    return {
        "name": "tiny",
        "model": str(world / "llada"),
        "device": "cpu",
        "allow_contamination": True,  # there are twelve questions
        "collect": {
            "tasks": [{"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}}],
            "gen_length": GEN_LENGTH, "block": 8, "keep": "all", "shard_size": 6, "batch_size": 6,
        },
        "window": {"limit": 8, "states": 2},
        "distill": {
            "states": 2, "adapter": {"rank": 2, "dropout": 0.0}, "learning": {"lr": 1e-2, "steps": 3},
            "batch": {"size": 4, "micro": 4}, "precision": "fp32",
        },
        "evaluate": {
            "tasks": [{"name": task}], "batch_size": 12, "settings": {"block": 8},
            "thresholds": {"entropy": [0.5, 3.0], "confidence": [0.9, 0.1]},
        },
    }  # fmt: skip


def run_recipe(world: Path, **changes: Any) -> RunRecipe:
    own = {
        "students": {
            "quality": {"objective": {"name": "tad", "window": "quality"}},
            "speed": {"objective": {"name": "tad", "window": 2}},
        }
    }
    return parse_recipe(RunRecipe, lay_over(_shared(world) | own, changes))


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
    return _shared(world) | own


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


class Listener(Silent):
    """Keeps what it is told; asks to stop before the n-th piece of work."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.lines: list[str] = []
        self.stages: list[str] = []
        self.settings: list[str] = []
        self.stop_after = stop_after

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def stage(self, title: str):
        self.stages.append(title)
        yield

    def decoding(self, setting):
        self.settings.append(setting.name)

    def stopping(self) -> bool:
        return self.stop_after is not None and len(self.settings) + len(self.stages) > self.stop_after
