"""A look at a few questions before a collection: whether the reference helps, and what is wrong where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tad.trajectories.collect import Collector

PREVIEW = 8  # questions


@dataclass(frozen=True)
class Preview:
    """How a few questions went before a collection: right with the reference, right without, and wrong texts."""

    asked: int
    right: int
    right_without: int
    wrong: tuple[str, ...]

    def describe(self) -> Iterator[str]:
        """Lines to be read; more than one where something is wrong."""
        yield (
            f"a look at {self.asked} questions: {self.right} right with the reference, {self.right_without} without"
        )
        if self.right < self.right_without:
            yield (
                "WARNING: the reference makes the teacher worse. `tad collect RECIPE --show` prints its prompt; give the task "
                "an instruction its model knows (tasks: options: {instruction: ...}), or set reference: where-needed"
            )
        elif 2 * self.right < self.asked:
            yield "WARNING: fewer than half are right, and only right ones are kept (keep: correct)"
        else:
            return
        yield from (f"  wrong: {text}" for text in self.wrong)


def take_preview(collector: Collector) -> Preview | None:
    """A few questions with the reference and without; None where there is no such choice, or no grader."""
    recipe = collector.recipe
    items = [item for item in collector.items if item.graded]
    if not recipe.privileged or recipe.reference != "gold" or recipe.tokens != "teacher" or not items:
        return None
    chosen = items[:: max(1, len(items) // PREVIEW)][:PREVIEW]
    shown = [next(collector.requests(item)) for item in chosen]
    right = {}
    with torch.inference_mode():
        for name in ("plain", "privileged"):  # the wrong texts that are left are the teacher's
            collector.wrong.clear()
            requests = [replace(request, privileged=getattr(request, name)) for request in shown]
            right[name] = collector.grade(collector.roll_fitting(requests))[1].correct
    found = Preview(len(chosen), right["privileged"], right["plain"], tuple(collector.wrong))
    collector.wrong.clear()
    return found
