"""Recipes of small collections, seconds on a CPU, and their rows."""

from __future__ import annotations

from pathlib import Path

from tad.config import parse_recipe
from tad.models import load
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.store import TrajectoryStore
from tad.trajectories.workers import collect_here

EXAMPLES = 12


def values(world: Path, family: str = "llada", **changes: object) -> dict:
    return {
        "model": str(world / family),
        "tasks": [{"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}}],
        "gen_length": 16,
        "block": 8,
        "keep": "all",
        "shard_size": 4,
        "batch_size": 3,
        "device": "cpu",
        **changes,
    }


def run(world: Path, out: Path, family: str = "llada", **changes: object) -> TrajectoryStore:
    recipe = parse_recipe(CollectRecipe, values(world, family, **changes))
    return collect_here(recipe, out, load(recipe.model, device="cpu"))


def content(store: TrajectoryStore) -> list[str]:
    return [str(row) for row in store.rows()]
