"""One collection on several workers: processes started by torchrun or accelerate, or actors of a Ray cluster.

Workers share out whole shards, so the store is the same as one worker's, row for row. torchrun's processes write
their own shards into one directory; Ray's actors hand rows to the driver, which writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tad.errors import MissingExtraError
from tad.models import LM, load
from tad.models.source import locate
from tad.runs.identity import find_rank
from tad.trajectories.collect import Collector, fill
from tad.trajectories.listener import CollectListener
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.store import ShardStats, Trajectory, TrajectoryStore


def collect_here(
    recipe: CollectRecipe,
    out: str | Path,
    lm: LM,
    listener: CollectListener | None = None,
) -> TrajectoryStore:
    """Collect in this process; under torchrun, this process's share of the shards."""
    rank, world = find_rank()
    collector = Collector(lm, recipe, _student(recipe))
    store = TrajectoryStore.open_or_create(out, collector.meta())
    with store.writing(rank, world):
        fill(store, collector, store.missing(rank, world), listener)
    return store


def load_teacher(recipe: CollectRecipe, device: str | None) -> LM:
    """The model that rolls out: the recipe's, with its adapter in the weights."""
    if recipe.adapter is not None:
        locate(recipe.adapter)  # a wrong path is refused before minutes are spent on the weights
    lm = load(recipe.model, device=device, dtype=recipe.dtype)
    if recipe.adapter is not None:
        lm.start_from(recipe.adapter)
    return lm


def _student(recipe: CollectRecipe) -> LM | None:
    if recipe.student_adapter is None:
        return None
    return load(recipe.model, adapter=recipe.student_adapter, device=recipe.device, dtype=recipe.dtype)


class _RayShards:
    """A Ray Data actor: loads the model once, then turns shard numbers into graded rows."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = CollectRecipe.model_validate(recipe)
        lm = load_teacher(self.recipe, self.recipe.device)
        self.collector = Collector(lm, self.recipe, _student(self.recipe))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shards, found = [], []
        for shard in batch["id"]:
            rows, stats = self.collector.grade(self.collector.generate(int(shard)))
            shards.append(int(shard))
            found.append(json.dumps({"rows": [asdict(row) for row in rows], "stats": asdict(stats)}))
        return {"shard": shards, "found": found}


def collect_with_ray(
    recipe: CollectRecipe, out: str | Path, listener: CollectListener | None = None
) -> TrajectoryStore:
    """Collect with Ray Data on the cluster this process is connected to, one actor per GPU (or two on CPUs)."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("Ray, which --workers ray needs,", "ray") from None
    lm = load_teacher(recipe, "cpu")
    collector = Collector(lm, recipe)
    store = TrajectoryStore.open_or_create(out, collector.meta())
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    resources: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 0.5}
    with store.writing():
        missing = store.missing()
        if not missing:
            return store
        shards = ray.data.from_items([{"id": shard} for shard in missing], override_num_blocks=len(missing))
        done = shards.map_batches(
            _RayShards,
            fn_constructor_kwargs={"recipe": recipe.model_dump(mode="json")},
            batch_size=1,
            concurrency=gpus or 2,
            **resources,
        )
        for row in done.iter_rows():
            found = json.loads(row["found"])
            stats = ShardStats(**found["stats"])
            store.write(int(row["shard"]), [Trajectory(**values) for values in found["rows"]], stats)
            if listener is not None:
                listener.shard(int(row["shard"]), stats)
    return store
