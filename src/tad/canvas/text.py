"""What every picture of a canvas shares: the colour of a reveal step, the marks, and the text of each position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MASK, FUTURE, FILLER, END, ODD = "▒", "░", "·", "▪", "▯"  # FUTURE: a mask of a block that does not exist yet

Spell = Callable[[list[int]], str]


def reveal_colour(step: int, last: int) -> str:
    """A hex colour for a reveal step between 1 and `last`: equal steps look equally far apart (Oklch)."""
    t = (step - 1) / max(1, last - 1)
    lightness, chroma, hue = 0.6 + 0.28 * t, 0.11, math.radians(300 - 200 * t)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    # Oklab -> linear sRGB, with the published matrices.
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _encode_gamma(value)):02x}" for value in linear)


def _encode_gamma(value: float) -> float:
    value = min(1.0, max(0.0, value))
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


def printable(text: str) -> str:
    """Text that moves no cursor: tabs become spaces, other control characters a box."""
    return "".join(c if c.isprintable() or c == "\n" else ODD for c in text.expandtabs(4))


def continues(before: str, piece: str) -> bool:
    """Whether a piece goes on with the number or word of the piece before it, so that no line ends between them."""
    return before[-1:].isalnum() and piece[:1].isalnum()


def spell_pieces(tokens: Sequence[int | None], spell: Spell, ends: Sequence[int]) -> list[str]:
    """The text of each position; nothing for masks and ends. A character may be spread over up to four byte tokens: it stands
    with the last of them."""
    found, pending = list[str](), list[int]()
    for token in tokens:
        if token is None or token in ends:
            if pending:  # a character that was cut off
                found[-1] = spell(pending)
                pending = []
            found.append("")
            continue
        pending.append(token)
        text = spell(pending)
        whole = len(pending) == 4 or not text.endswith("\N{REPLACEMENT CHARACTER}")
        found.append(text if whole else "")
        pending = [] if whole else pending
    if pending:
        found[-1] = spell(pending)
    return found
