"""What decoding hands out: a finished row, and what one forward revealed in one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Drafting:
    """What became of drafts. A draft's position 0 is its first guess, behind the token that the same forward made known."""

    cycles: int = 0  # forwards that verified a draft
    proposed: list[int] = field(default_factory=list)  # by position: drafts that were so long
    kept: list[int] = field(default_factory=list)  # by position: drafts of which so much was kept

    def count(self, proposed: int, kept: int) -> None:
        """One more draft was verified; an empty one is none."""
        self.cycles += proposed > 0
        for counts, length in ((self.proposed, proposed), (self.kept, kept)):
            counts += [0] * (proposed - len(counts))
            for position in range(length):
                counts[position] += 1

    @property
    def drafted(self) -> int:
        """Tokens that were proposed."""
        return sum(self.proposed)

    @property
    def accepted(self) -> int:
        """Tokens of drafts that were kept."""
        return sum(self.kept)


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
    drafting: Drafting | None = None  # where drafts were verified

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
    def kept_per_cycle(self) -> float | None:
        """Tokens per draft that was verified, the one that the drafting forward itself makes known included; None without drafts."""
        if self.drafting is None or not self.drafting.cycles:
            return None
        return len(self.content) / self.drafting.cycles

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
    drafted: int = field(
        default=0, kw_only=True
    )  # tokens that this forward verified; all it reveals but one were among them


StepCallback = Callable[[Step], None]
