"""The canvas in a terminal: masks as dim blocks, tokens coloured by the forward that revealed them.

It draws what it is told by the decoding loop's steps and decides nothing. Old reveals are violet, new ones yellow; the
ramp stretches with the number of forwards, so the last picture spans it whole.
"""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tad.canvas.text import (
    END,
    FILLER,
    FUTURE,
    MASK,
    Spell,
    continues,
    printable,
    reveal_colour,
    spell_pieces,
)
from tad.decoding import Decoded, Step

_DIM = Style(dim=True)
_FRAMES_PER_SECOND = 15


class Canvas:
    """The generated part of one row while it is decoded."""

    def __init__(
        self, length: int, block: int | None, spell: Spell, ends: tuple[int, ...] = (), title: str = ""
    ) -> None:
        self.length, self.block, self.title = length, block or length, title
        self.tokens: list[int | None] = [None] * length
        self.steps = [0] * length
        self.forward, self.created = 0, 1
        self._spell, self._ends = spell, ends

    @property
    def revealed(self) -> int:
        return sum(token is not None for token in self.tokens)

    def take(self, step: Step) -> None:
        """Write what a forward revealed."""
        self.forward, self.created = step.forward, step.created
        for position, token in zip(step.positions, step.tokens, strict=True):
            self.tokens[position], self.steps[position] = token, step.forward

    def finish(self, decoded: Decoded) -> None:
        """Take over the finished row, with the filler that no forward revealed."""
        self.tokens, self.steps = list(decoded.tokens), list(decoded.steps)
        self.forward, self.created = decoded.forwards, self.length // self.block

    def draw(self, width: int = 100, height: int | None = None) -> Group:
        """Blocks as numbered rows and a status line; cut to the blocks around the first mask if `height` is small."""
        count = self.length // self.block
        numbers = len(str(count))
        inner = max(10, width - numbers - 3)
        starts = self._starts(count)
        rows = [self._draw_block(block, starts[block], starts[block + 1]) for block in range(count)]
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", no_wrap=True, width=numbers)
        grid.add_column(no_wrap=True, width=1)
        grid.add_column(overflow="fold", width=inner)
        heights = [max(1, len(row.wrap(Console(width=inner), inner))) for row in rows]
        first, end = self._visible(heights, height)
        if first > 0:
            grid.add_row("", "", Text(f"... {first} blocks above", _DIM))
        for block in range(first, end):
            bar = "\n".join("│" * heights[block])
            grid.add_row(Text(str(block + 1), _DIM), Text(bar, _DIM), rows[block])
        if end < count:
            grid.add_row("", "", Text(f"... {count - end} blocks below", _DIM))
        return Group(grid, self._status())

    def _visible(self, heights: list[int], height: int | None) -> tuple[int, int]:
        """The range of blocks shown: all, or as many as fit from one before the first with masks."""
        if height is None or sum(heights) + 2 <= height:
            return 0, len(heights)
        masked = next((i for i, token in enumerate(self.tokens) if token is None), self.length - 1)
        first = end = max(0, masked // self.block - 1)
        room = height - 4  # status, two notes of what is cut, and the line of the cursor
        while end < len(heights) and (end == first or heights[end] <= room):
            room -= heights[end]
            end += 1
        while first > 0 and heights[first - 1] <= room:
            first -= 1
            room -= heights[first]
        return first, end

    def _starts(self, count: int) -> list[int]:
        """Where the rows of the blocks begin: at their first position, or behind the end of a number or word that the block
        before began."""
        pieces = spell_pieces(self.tokens, self._spell, self._ends)
        found = []
        for start in range(0, self.length, self.block):
            end = min(start + self.block, self.length)
            while 0 < start < end and continues(pieces[start - 1], pieces[start]):
                start += 1
            found.append(start)
        return [*found[:count], self.length]

    def _draw_block(self, block: int, start: int, end: int) -> Text:
        text = Text(overflow="fold")
        positions = range(start, end)
        mine = [self.tokens[position] for position in positions]
        for position, token, piece in zip(
            positions, mine, spell_pieces(mine, self._spell, self._ends), strict=True
        ):
            step = self.steps[position]
            if token is None:
                text.append(MASK if block < self.created else FUTURE, _DIM)
            elif token in self._ends:
                text.append(*((FILLER, _DIM) if step == 0 else (END, reveal_colour(step, self.forward))))
            elif piece:
                text.append(printable(piece), reveal_colour(max(step, 1), self.forward))
        return text

    def _status(self) -> Text:
        words = f"forward {self.forward}   revealed {self.revealed}/{self.length}"
        if None not in self.tokens and any(token in self._ends for token in self.tokens):
            words += " with the filler"
        return Text(f"{self.title}   {words}" if self.title else words, "bold")


class LiveCanvas:
    """Redraws a canvas in place as steps come, a few times a second; what was drawn last stays on the screen."""

    def __init__(self, canvas: Canvas, console: Console) -> None:
        self.canvas, self._console, self._drawn = canvas, console, 0.0
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> LiveCanvas:
        self._live.__enter__()
        self._redraw()
        return self

    def __exit__(self, *reason: object) -> None:
        self._redraw(whole=True)
        self._live.__exit__(None, None, None)

    def take(self, step: Step) -> None:
        """The callback for the decoding loop."""
        self.canvas.take(step)
        if time.monotonic() - self._drawn >= 1 / _FRAMES_PER_SECOND:
            self._redraw()

    def _redraw(self, whole: bool = False) -> None:
        height = None if whole else self._console.height
        self._live.update(self.canvas.draw(self._console.width, height), refresh=not whole)
        self._drawn = time.monotonic()
