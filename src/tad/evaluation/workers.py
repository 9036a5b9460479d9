"""One run on a Ray cluster: actors decode, this process grades and writes. The rows are those of a single process.

Under torchrun or accelerate nothing is needed: `evaluate` takes its share by RANK and WORLD_SIZE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tad.errors import MissingExtraError
from tad.evaluation.questions import Item, Questions
from tad.evaluation.recipe import EvalRecipe
from tad.evaluation.results import Results
from tad.evaluation.row import Row
from tad.evaluation.run import Identity, OnProgress, Runner, evaluate
from tad.models import load

_CHUNK = 4  # batches per task handed to an actor


class _RayRunner:
    """A Ray Data actor: loads the model once, then turns numbers of items into rows."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = EvalRecipe.model_validate(recipe)
        self.items = Questions(self.recipe.tasks, self.recipe.data_dir).items
        lm = load(self.recipe.model, self.recipe.adapter, device=self.recipe.device, dtype=self.recipe.dtype)
        identity = Identity.of(lm)
        if lm.conversion is None:
            lm.merge()
        self.runner = Runner(lm, self.recipe, identity)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = []
        for numbers in batch["items"]:
            chosen = [self.items[int(number)] for number in json.loads(numbers)]
            rows = [row.as_record() for part in self.runner.run(chosen) for row in part]
            found.append(json.dumps(rows))
        return {"rows": found}


def evaluate_with_ray(
    recipe: EvalRecipe, out: str | Path, report: OnProgress | None = None, grade: bool = True
) -> Results:
    """Do what is missing of a run on the cluster this process is connected to: an actor per GPU, or two on CPUs."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("Ray, which --workers ray needs,", "ray") from None
    questions = Questions(recipe.tasks, recipe.data_dir)
    places = {item.key: number for number, item in enumerate(questions.items)}
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    resources: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 0.5}

    def decode_items(items: list[Item]) -> Iterator[list[Row]]:
        numbers, size = [places[item.key] for item in items], _CHUNK * recipe.batch_size
        chunks = [{"items": json.dumps(numbers[low : low + size])} for low in range(0, len(numbers), size)]
        found = ray.data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
            _RayRunner,
            fn_constructor_kwargs={"recipe": recipe.model_dump(mode="json")},
            batch_size=1,
            concurrency=gpus or 2,
            **resources,
        )
        for entry in found.iter_rows():
            yield [Row.from_record(values, "ray") for values in json.loads(entry["rows"])]

    lm = load(recipe.model, recipe.adapter, device="cpu", dtype=recipe.dtype)
    return evaluate(lm, recipe, out, report, grade=grade, questions=questions, decode_items=decode_items)
