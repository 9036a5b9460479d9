"""The questions of a run, and the grading of answers to them. Needs no model.

An item is one example under one prompt template. Which items a run has follows from its recipe; a digest of them tells
whether two runs, or a run and the data at hand, ask the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tad.errors import TadError
from tad.evaluation.recipe import ALL, EvalTask
from tad.evaluation.row import Key, Row
from tad.runs.fingerprint import short_digest
from tad.tasks import Example, Prompt, Task, Verdict, get_task
from tad.tasks.selection import choose_examples


@dataclass(frozen=True)
class Item:
    """One example, asked with one template."""

    task: Task
    example: Example
    template: str
    label: str  # the task's name, with its file for your own

    @property
    def key(self) -> Key:
        return (self.label, self.template, self.example.id)

    @property
    def prompt(self) -> Prompt:
        return self.task.prompt(self.example, self.template)

    @property
    def digest(self) -> str:
        """Of what is asked and what is right."""
        return short_digest([self.example.question, str(self.example.answer)])


class Questions:
    """The items of a recipe, in order."""

    def __init__(self, tasks: Sequence[EvalTask], data_dir: str | None = None) -> None:
        self.items: list[Item] = []
        self.facts: list[dict[str, Any]] = []  # per task, what decides the items, for the run's identity
        self._tasks: dict[str, Task] = {}
        self._known: dict[tuple[str, str, str], Verdict] = {}
        for section in tasks:
            if section.name in self._tasks:
                raise TadError(f"task '{section.name}' is named twice; rows are told apart by its name")
            self._add(section, data_dir)
        self.by_key = {item.key: item for item in self.items}

    def _add(self, section: EvalTask, data_dir: str | None) -> None:
        task = get_task(section.name, data_dir=data_dir, **section.options)
        split = task.check_split(section.split)
        templates = task.templates if ALL in section.templates else tuple(section.templates)
        for template in templates:
            task.check_template(template)
        examples = choose_examples(task.examples(split), section.limit, section.sample, section.name)
        items = [
            Item(task, example, template, section.name) for template in templates for example in examples
        ]
        self._tasks[section.name] = task
        self.items += items
        self.facts.append(
            {
                "name": section.name,
                "split": split,
                "limit": section.limit,
                "sample": section.sample,
                "templates": list(templates),
                "options": dict(section.options),
                "examples": len(examples),
                "digest": short_digest([[item.example.id, item.digest] for item in items]),
            }
        )

    @property
    def labels(self) -> list[str]:
        """The tasks' names, as rows have them."""
        return list(self._tasks)

    def check_graders(self, labels: Collection[str] | None = None) -> None:
        """Raise where answers could not be graded here, before an hour is spent on making them."""
        for label in labels or self.labels:
            # A file of your own may hold questions of several kinds.
            items = [item for item in self.items if item.label == label]
            one_of_each = {item.example.meta.get("grader"): item.example for item in items}
            self._tasks[label].grade_many([(example, "") for example in one_of_each.values()], 1)

    def gradable(self) -> set[str]:
        """Names of the tasks whose answers can be graded here: programs need a sandbox."""
        found = set()
        for label in self.labels:
            try:
                self.check_graders([label])
            except TadError:  # the same error meets whoever grades the run; here it only sorts tasks
                continue
            found.add(label)
        return found

    def grade(
        self, rows: Sequence[Row], workers: int | None = None, tasks: Collection[str] | None = None
    ) -> list[Row]:
        """The rows, those of `tasks` (default: all) with verdicts, in order; rows without an answer keep theirs. A text seen
        before is not graded again: the runs of a sweep answer many examples alike."""
        chosen = {id(row) for row in rows if row.answered and (tasks is None or row.task in tasks)}
        by_task: dict[str, dict[tuple[str, str], tuple[Example, str]]] = {}
        for row in rows:
            if id(row) in chosen and (row.task, row.id, row.text) not in self._known:
                example = self.by_key[row.key].example
                by_task.setdefault(row.task, {})[row.id, row.text] = (example, row.text)
        for label, pairs in by_task.items():
            verdicts = self._tasks[label].grade_many(pairs.values(), workers)
            self._known |= {(label, *key): verdict for key, verdict in zip(pairs, verdicts, strict=True)}
        return [
            row.judged(self._known[row.task, row.id, row.text]) if id(row) in chosen else row for row in rows
        ]


def sections_of(facts: Iterable[dict[str, Any]]) -> list[EvalTask]:
    """The recipe's tasks again, from a run's identity."""
    names = ("name", "split", "limit", "sample", "templates", "options")
    return [EvalTask(**{name: entry[name] for name in names}) for entry in facts]
