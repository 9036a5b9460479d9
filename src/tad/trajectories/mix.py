"""What a collection asks: the examples of a recipe's tasks, and the reference that the teacher is shown of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tad.errors import TadError
from tad.tasks import Example, Task, get_task
from tad.tasks.selection import choose_examples, exclude_questions
from tad.trajectories.recipe import CollectRecipe


@dataclass(frozen=True)
class Item:
    """One example of the mix, with its task; `reference` is what the teacher will be shown."""

    task: Task
    example: Example
    template: str
    reference: str
    origin: str  # gold, majority, none
    graded: bool = True  # while collecting
    later: bool = False  # graded after collecting
    voted: str | None = None  # the answer of the majority


def mix_tasks(recipe: CollectRecipe) -> Iterator[Item]:
    """The examples of all sections, one section after the other."""
    for section in recipe.tasks:
        if recipe.reference == "majority" and not section.graded:
            raise TadError(f"task '{section.name}': graded: false; reference: majority needs the grader")
        task = get_task(section.name, data_dir=recipe.data_dir, **section.options)
        examples = task.examples(section.split or ("train" if "train" in task.splits else None))
        for name in section.exclude:
            asked = get_task(name, data_dir=recipe.data_dir).examples()
            examples = exclude_questions(examples, asked)
        chosen = choose_examples(examples, section.limit, section.sample, section.name)
        first, parts = recipe.part or (1, 1)
        if first > parts:
            raise TadError(f"part [{first}, {parts}]: there is no part {first} of {parts}")
        for example in chosen[first - 1 :: parts]:
            reference = task.reference(example)
            if recipe.privileged and recipe.reference != "majority" and not reference:
                raise TadError(
                    f"task '{section.name}': example {example.id} has no reference; use reference: majority"
                )
            if recipe.reference == "majority" and not task.can_vote(example):
                raise TadError(
                    f"task '{section.name}': its answers cannot vote; reference: majority is not for it"
                )
            origin = "gold" if recipe.privileged else "none"
            now, later = section.graded is True, section.graded == "later"
            yield Item(task, example, section.template, reference, origin, now, later)


def list_examples(recipe: CollectRecipe) -> list[Example]:
    """What a collection asks, in order."""
    return [item.example for item in mix_tasks(recipe)]


def list_references(recipe: CollectRecipe) -> dict[str, str]:
    """What the teacher is shown of each example."""
    return {item.example.id: item.reference for item in mix_tasks(recipe)}
