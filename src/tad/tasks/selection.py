"""Which examples of a task are used: the first ones or a sample, without those that another task asks."""

from __future__ import annotations

from collections.abc import Iterable

from tad.errors import TadError
from tad.runs.fingerprint import short_digest
from tad.tasks.task import Example


def choose_examples(
    examples: list[Example], limit: int | None = None, sample: int | None = None, name: str = "task"
) -> list[Example]:
    """The first `limit` examples, or `sample` of them drawn by a hash of their ids, in the order of the data. A smaller
    sample is part of a larger one."""
    if sample is None:
        return examples[:limit]
    if sample > len(examples):
        raise TadError(f"task '{name}' has {len(examples)} examples; sample {sample} is too many")
    drawn = sorted(examples, key=lambda example: short_digest(example.id))[:sample]
    chosen = {example.id for example in drawn}
    return [example for example in examples if example.id in chosen]


def exclude_questions(examples: Iterable[Example], asked: Iterable[Example]) -> list[Example]:
    """The examples whose question is none of those asked, whatever their case and spacing."""
    taken = {_plain(example.question) for example in asked}
    return [example for example in examples if _plain(example.question) not in taken]


def _plain(question: str) -> str:
    return " ".join(question.lower().split())
