"""What a task is: examples, the prompt put to a model, the reference a privileged teacher sees, and a verdict on a text.

Covers the vocabulary every task shares. Knows no model, no tokenizer and no chat template: a prompt is a list of
messages, an optional opening of the assistant's turn, and the strings at which an answer ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tad.errors import TadError

Progress = Callable[[int], None]
"""Called with the number of verdicts that just became available."""


@dataclass(frozen=True)
class Example:
    """One question. `answer` is the gold the grader compares with; `reference` the worked solution a teacher may read."""

    id: str
    question: str
    reference: str
    answer: Any
    level: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether a text answers an example, why, and what was taken from the text as its answer."""

    correct: bool
    reason: str
    extracted: str | None = None

    @property
    def unjudged(self) -> bool:
        """Whether it is only not right because the tests could not judge the text."""
        return is_unjudged(self.correct, self.reason)


CANNOT_JUDGE = "cannot judge"


def is_unjudged(correct: bool | None, reason: str | None) -> bool:
    """Whether a stored verdict is the third one, which is counted as not right."""
    return correct is False and reason is not None and reason.startswith(CANNOT_JUDGE)


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """A chat turn to complete, or with `raw` a text to continue without a chat around it.

    `prefix` opens the assistant's turn (empty: the model starts it). `stop` lists the strings that end an answer.
    """

    messages: tuple[Message, ...]
    prefix: str = ""
    stop: tuple[str, ...] = ()
    raw: bool = False

    @classmethod
    def from_user(cls, content: str, prefix: str = "", stop: Sequence[str] = (), raw: bool = False) -> Prompt:
        return cls((Message("user", content),), prefix, tuple(stop), raw)

    @property
    def text(self) -> str:
        """The contents of the messages, without any chat markup: what a base model would be shown."""
        return "\n\n".join(message.content for message in self.messages)

    def as_chat(self) -> list[dict[str, str]]:
        """The messages as chat templates expect them; the prefix is the last one, to be continued."""
        chat = [{"role": message.role, "content": message.content} for message in self.messages]
        return [*chat, {"role": "assistant", "content": self.prefix}] if self.prefix else chat

    def cut(self, text: str) -> str:
        """The answer up to its stop strings, taken one after the other as the published evaluations do."""
        for stop in self.stop:
            text = text.split(stop, 1)[0]
        return text


EXPLAIN = "Make sure you understand the reference answer, then solve the question yourself and write down every step in detail."
CODE_ONLY = "Make sure you understand the reference answer, then solve the question yourself. Write only the code, no explanation."


def privileged_prompt(question: str, reference: str, instruction: str = EXPLAIN) -> Prompt:
    """What only a teacher sees: one user turn of question, reference answer, and what to do with it.

    One form for every task, so that collection, training and evaluation of the teacher agree word for word.
    """
    return Prompt.from_user(f"Question: {question}\nReference Answer: {reference}\n{instruction}")


class Task(ABC):
    """A benchmark or a training set. Subclasses say how rows become examples, prompts and verdicts."""

    name: ClassVar[str]
    splits: ClassVar[tuple[str, ...]]
    default_split: ClassVar[str] = "test"
    templates: ClassVar[tuple[str, ...]] = ("tad",)
    instruction: str = ""  # what a privileged prompt asks for; empty for the usual one
    comparable: ClassVar[bool] = False  # answers are short and equal as strings, so that samples can vote

    @abstractmethod
    def examples(self, split: str | None = None) -> list[Example]:
        """All examples of a split, in the order of the data; never empty."""

    @abstractmethod
    def prompt(self, example: Example, template: str = "tad") -> Prompt:
        """The question as put to the model under evaluation; it never contains the answer."""

    def grade(self, example: Example, text: str) -> Verdict:
        """Judge one text. Tasks override this, or `grade_many` where their grader is slow."""
        return self.grade_many([(example, text)], workers=1)[0]

    def reference(self, example: Example) -> str:
        """What the privileged teacher is shown."""
        return example.reference

    def grade_many(
        self,
        pairs: Iterable[tuple[Example, str]],
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> list[Verdict]:
        """Judge many texts, in order, on `workers` cores (default: all) where the grader is slow."""
        verdicts = []
        for example, text in pairs:
            verdicts.append(self.grade(example, text))
            if progress is not None:
                progress(1)
        return verdicts

    def count(self, split: str | None = None) -> int:
        """How many examples a split has; tasks that know it without making them override this."""
        return len(self.examples(split))

    def where(self, split: str | None = None) -> str:
        """Where the data of a split comes from, in words, without fetching it."""
        return "built in"

    def can_vote(self, example: Example) -> bool:
        """Whether answers to this example are short enough that equal ones can be counted."""
        return self.comparable

    def check_template(self, template: str) -> None:
        if template not in self.templates:
            raise TadError(
                f"task '{self.name}' has no prompt template '{template}'; it has: {', '.join(self.templates)}"
            )

    def check_split(self, split: str | None) -> str:
        split = split or self.default_split
        if split not in self.splits:
            raise TadError(f"task '{self.name}' has no split '{split}'; it has: {', '.join(self.splits)}")
        return split


@dataclass(frozen=True)
class Score:
    """Accuracy over verdicts with its standard error (of a mean of independent 0/1 outcomes)."""

    count: int
    correct: int

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Score:
        return cls(len(verdicts), sum(verdict.correct for verdict in verdicts))

    @property
    def accuracy(self) -> float:
        return self.correct / self.count if self.count else math.nan

    @property
    def standard_error(self) -> float:
        """sqrt(p (1 - p) / (n - 1)), the unbiased estimate; undefined below two verdicts."""
        if self.count < 2:
            return math.nan
        return math.sqrt(self.accuracy * (1 - self.accuracy) / (self.count - 1))
