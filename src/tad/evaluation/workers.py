"""One run on a Ray cluster: actors decode, this process grades and writes. The rows are those of a single process.

Under torchrun or accelerate nothing is needed: `evaluate` takes its share by RANK and WORLD_SIZE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.evaluation.questions import Questions
from tad.evaluation.recipe import EvalRecipe
from tad.evaluation.results import Results
from tad.evaluation.row import Row
from tad.evaluation.run import Grading, Identity, OnProgress, Runner, RunProgress
from tad.models import load
from tad.training.record import write_record

_CHUNK = 4  # batches per task handed to an actor


class _RayRunner:
    """A Ray Data actor: loads the model once, then turns numbers of items into rows."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = EvalRecipe.model_validate(recipe)
        self.items = Questions(self.recipe.tasks, self.recipe.data_dir).items
        lm = load(self.recipe.model, self.recipe.adapter, device=self.recipe.device, dtype=self.recipe.dtype)
        identity = Identity.of(lm)
        lm.merge_on_gpu()
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
        raise TadError("workers 'ray' needs Ray: pip install 'tad-dllm[ray]'") from None
    questions = Questions(recipe.tasks, recipe.data_dir)
    if grade:
        questions.check_graders()
    lm = load(recipe.model, recipe.adapter, device="cpu", dtype=recipe.dtype)
    results = Results.open_or_create(out, Runner(lm, recipe).meta(questions))
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    resources: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 0.5}
    with results.writing():
        found = results.rows()
        done = {row.key for row in found}
        missing = [number for number, item in enumerate(questions.items) if item.key not in done]
        progress = RunProgress(len(questions.items))
        progress.take(found, new=False)
        size = _CHUNK * recipe.batch_size
        chunks = [{"items": json.dumps(missing[low : low + size])} for low in range(0, len(missing), size)]
        tasks = questions.labels if grade else ()
        with Grading(questions, results, progress, recipe.graders, tasks, report) as grading:
            if grade:
                grading.put([row for row in found if row.correct is None], new=False)
            if chunks:
                write_record(
                    results.folder,
                    recipe.model_dump(mode="json"),
                    rows_before=len(found),
                    processes=gpus or 2,
                )
                rows = ray.data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
                    _RayRunner,
                    fn_constructor_kwargs={"recipe": recipe.model_dump(mode="json")},
                    batch_size=1,
                    concurrency=gpus or 2,
                    **resources,
                )
                for entry in rows.iter_rows():
                    grading.put([Row.from_record(values, "ray") for values in json.loads(entry["rows"])])
        results.close([item.key for item in questions.items])
    return results
