"""A quick look at a student while it is trained: accuracy and tokens per forward on a few examples."""

from __future__ import annotations

from tad.evaluation.questions import Questions
from tad.evaluation.recipe import EvalRecipe, list_tasks
from tad.evaluation.run import Identity, Runner
from tad.evaluation.summary import measure
from tad.models import LM
from tad.training.distill import Evaluate, student_decoder
from tad.training.recipe import DistillRecipe
from tad.trajectories.store import TrajectoryStore


def quick_evaluation(recipe: DistillRecipe) -> Evaluate | None:
    """What the recipe's `evaluation` section asks for: accuracy and tokens per forward on a few examples."""
    section = recipe.evaluation
    if section is None:
        return None
    tasks = list_tasks(section.tasks, section.split, section.limit)
    questions = Questions(tasks)
    values = section.model_dump(include={"batch_size", "settings"})
    length = section.gen_length or TrajectoryStore.open(recipe.trajectories[0]).meta.gen_length
    unnamed = Identity("", None, "")  # nothing is kept, so the weights need no fingerprint

    def evaluate(lm: LM, step: int) -> dict[str, float]:
        decoder = section.decoder or student_decoder(recipe, lm) or lm.defaults.decoder
        asked = EvalRecipe(model=recipe.model, tasks=tasks, decoder=decoder, gen_length=length, **values)
        rows = [row for batch in Runner(lm, asked, unnamed).run(questions.items) for row in batch]
        rows = questions.grade(rows)
        found: dict[str, float] = {}
        for label in questions.labels:
            numbers = measure([row for row in rows if row.task == label])
            found |= {f"{label}_accuracy": numbers["accuracy"] / 100, f"{label}_tpf": numbers["tpf"]}
        return found

    return evaluate
