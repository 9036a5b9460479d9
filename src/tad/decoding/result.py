"""What decoding hands out: a finished row, and what one forward revealed in one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Decoded:
    """One finished row."""

    tokens: list[int]  # the generated part, gen_length long
    steps: list[int]  # forward (1, 2, ...) that revealed each position; 0 where the end was filled
    confidence: list[float]  # probability of each token when it was revealed; 0 where filled
    forwards: int
    seconds: float  # from the moment it joined its batch to its own end
    ends: tuple[int, ...] = field(repr=False, default=())
    scorer: list[float] | None = (
        None  # probability of each token by a second prompt or model, where one scored
    )

    @property
    def content(self) -> list[int]:
        """The tokens up to and including the first end token."""
        for i, token in enumerate(self.tokens):
            if token in self.ends:
                return self.tokens[: i + 1]
        return self.tokens

    @property
    def answer(self) -> list[int]:
        """The tokens before the first end token."""
        content = self.content
        return content[:-1] if content and content[-1] in self.ends else content

    @property
    def tpf(self) -> float:
        """Tokens per forward: content tokens, the first end token included, over forwards."""
        return len(self.content) / self.forwards

    @property
    def tpf_all(self) -> float:
        """All positions of the generated part, end filler included, over forwards."""
        return len(self.tokens) / self.forwards


@dataclass(frozen=True)
class Step:
    """What one forward revealed in one row; handed to the callback."""

    row: int  # index into the prompts of this call; of a scheduler, the request's name
    forward: int  # 1, 2, ...
    positions: list[int]  # in the generated part
    tokens: list[int]
    confidence: list[float]
    queries: int  # positions of this row that were computed
    created: int  # blocks that exist


StepCallback = Callable[[Step], None]
