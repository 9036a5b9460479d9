"""The text of a row while its tokens appear in any order: what is final so far, and whether the answer is complete.

A position never changes once it is revealed (behind an end token it no longer matters), so text is final up to the
first mask. It is given out as far as no later token can change it: not a character whose bytes are incomplete, not the
beginning of a stop text. How the reveals are cut into steps has no influence on the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal

Reason = Literal["stop", "length"]
_BROKEN = "\ufffd"


class Transcript:
    """`spell` turns ids into text, without special tokens; `limit` is the number of tokens the answer may have."""

    def __init__(
        self,
        spell: Callable[[list[int]], str],
        length: int,
        limit: int,
        mask: int,
        ends: Sequence[int],
        stops: Sequence[str] = (),
    ) -> None:
        self.spell, self.mask, self.ends, self.stops = spell, mask, tuple(ends), tuple(stops)
        self.limit = min(limit, length)
        self.tokens = [mask] * length
        self.steps = [0] * length
        self.confidence = [0.0] * length
        self.text = ""  # given out so far; the answer once there is a reason
        self.reason: Reason | None = None
        self.counted = 0  # tokens of the answer, the end token included
        self._final = 0  # leading positions that are revealed, before an end token and the limit

    @property
    def masks(self) -> int:
        return self.tokens.count(self.mask)

    def active(self, block: int, created: int) -> list[int]:
        """Of the blocks that exist, those with masks left."""
        parts = (self.tokens[number * block : (number + 1) * block] for number in range(created))
        return [number for number, part in enumerate(parts) if self.mask in part]

    def write(
        self,
        step: int,
        positions: Sequence[int],
        tokens: Sequence[int],
        confidence: Sequence[float],
    ) -> str:
        """Take the reveals of a forward; returns the text that became final."""
        for position, token, sure in zip(positions, tokens, confidence, strict=True):
            self.tokens[position], self.steps[position], self.confidence[position] = token, step, sure
        if self.reason is not None:
            return ""
        before, ended = self._final, self._advance()
        if self._final == before and not ended:
            return ""
        return self._give_out(complete=ended or self._final == self.limit, ended=ended)

    def fill_end(self) -> None:
        """Where the answer ended with an end token, the first of them stands at the masks behind it, as in the loop."""
        if self._final < self.limit and self.tokens[self._final] in self.ends:
            self.tokens = [self.ends[0] if token == self.mask else token for token in self.tokens]

    def _advance(self) -> bool:
        """Move to the first mask, end token or limit; whether it is an end token."""
        while self._final < self.limit:
            token = self.tokens[self._final]
            if token in self.ends:
                return True
            if token == self.mask:
                return False
            self._final += 1
        return False

    def _give_out(self, complete: bool, ended: bool) -> str:
        text = self.spell(self.tokens[: self._final])
        if not complete:
            text = text.rstrip(_BROKEN)
        # The stop text that is complete first counts, as if tokens came one by one; of two at once, the longer.
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            whole, at = min(found)
            self.reason, self.counted, text = "stop", self._tokens_for(whole), text[:at]
        elif complete:
            self.reason, self.counted = "stop" if ended else "length", self._final + ended
        else:
            text = text[: len(text) - _begun(text, self.stops)]
        new = text[len(self.text) :]
        self.text += new
        return new

    def _tokens_for(self, characters: int) -> int:
        """Fewest leading tokens whose text has so many characters that nothing can change any more."""
        return bisect_left(
            range(self._final),
            characters,
            key=lambda count: len(self.spell(self.tokens[:count]).rstrip(_BROKEN)),
        )


def _begun(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins one of the stop texts."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
