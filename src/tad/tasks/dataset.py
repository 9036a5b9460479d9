"""A task whose examples are the rows of a dataset: reading, caching, and refusing an empty one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from tad.errors import TadError
from tad.tasks.source import Row, Source
from tad.tasks.task import Example, Task


class DatasetTask(Task):
    """Subclasses name a `source` and build an example from a row."""

    source: ClassVar[Source]

    def __init__(self, data_dir: str | Path | None = None) -> None:
        self.data_dir = data_dir
        self._examples: dict[str, list[Example]] = {}

    @abstractmethod
    def build(self, row: Row, split: str, index: int) -> Example:
        """An example from a row, the `index`-th of its split."""

    def select(self, row: Row, split: str) -> bool:
        """Whether a row belongs to a split, for data that keeps all splits in one file."""
        return True

    def examples(self, split: str | None = None) -> list[Example]:
        split = self.check_split(split)
        if split not in self._examples:
            rows = (row for row in self.source.read(split, self.data_dir) if self.select(row, split))
            self._examples[split] = self.collect(rows, split)
        return self._examples[split]

    def collect(self, rows: Iterable[Row], split: str) -> list[Example]:
        """Examples of rows; none at all, or two with one name, is an error."""
        examples: dict[str, Example] = {}
        for index, row in enumerate(rows):
            example = self.build(row, split, index)
            if example.id in examples:
                raise TadError(f"{row.place}: the id '{example.id}' occurs twice")
            examples[example.id] = example
        if not examples:
            raise TadError(f"task '{self.name}' split '{split}' is empty ({self.where(split)})")
        return list(examples.values())

    def where(self, split: str | None = None) -> str:
        return self.source.where(self.check_split(split), self.data_dir)
