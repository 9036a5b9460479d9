"""One line of a run: what an example was asked, what came out, whether that is right, and what it cost."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from tad.errors import TadError
from tad.tasks import Verdict

Key: TypeAlias = "tuple[str, str, str]"  # task, template, example
UNFIT = "the prompt does not fit the context"


@dataclass(frozen=True)
class Row:
    """A row. `seconds` and `share` are of the machine; everything else is the same in every run of the same recipe."""

    task: str
    template: str
    id: str
    level: str | None
    question: str  # digest of question and gold answer
    prompt: str  # as the model read it, special tokens included
    text: str  # what was graded: before the first end token, cut at the template's stop strings
    correct: bool | None  # None: not graded
    reason: str | None
    extracted: str | None
    tokens: int  # content: up to and including the first end token
    tokens_all: int  # every generated position
    forwards: int
    seconds: float  # from the start of its batch to its own end
    share: float  # the batch's time over its rows; their sum is the time spent decoding
    ids: list[int]  # the generated token ids
    steps: list[int]  # forward that revealed each position; 0: filled after the end
    drafting: dict[str, Any] | None = None  # where drafts were verified: `tad.decoding.Drafting`

    @property
    def key(self) -> Key:
        return (self.task, self.template, self.id)

    @property
    def answered(self) -> bool:
        """Whether the model was asked: a prompt longer than its context is wrong without an answer."""
        return self.forwards > 0

    def judged(self, verdict: Verdict) -> Row:
        return replace(self, correct=verdict.correct, reason=verdict.reason, extracted=verdict.extracted)

    def as_record(self) -> dict[str, Any]:
        values = asdict(self)
        if self.drafting is None:
            del values["drafting"]
        return values

    @classmethod
    def from_record(cls, values: dict[str, Any], where: str) -> Row:
        missing = [item.name for item in fields(cls) if item.name not in values and item.default is MISSING]
        if missing:
            raise TadError(
                f"{where}: a row without '{missing[0]}'; it is not a row of this version's `tad eval`"
            )
        return cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})
