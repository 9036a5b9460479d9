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

    def rows(self, split: str) -> Iterable[Row]:
        """The rows of a split."""
        return self.source.read(split, self.data_dir)

    def examples(self, split: str | None = None) -> list[Example]:
        """Of all rows; none at all, or two with one name, is an error."""
        split = self.check_split(split)
        if split not in self._examples:
            examples: dict[str, Example] = {}
            for index, row in enumerate(self.rows(split)):
                example = self.build(row, split, index)
                if example.id in examples:
                    raise TadError(f"{row.place}: the id '{example.id}' occurs twice")
                examples[example.id] = example
            if not examples:
                raise TadError(f"task '{self.name}' split '{split}' is empty ({self.where(split)})")
            self._examples[split] = list(examples.values())
        return self._examples[split]

    def where(self, split: str | None = None) -> str:
        return self.source.where(self.check_split(split), self.data_dir)
