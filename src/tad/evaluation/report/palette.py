"""Colours and markers of the report, for a light and a dark page, and which method gets which.

Six hues that stay apart for readers with any of the common colour deficiencies (`tests` measure it); a seventh method repeats
the first hue with a dashed line and hollow markers, so colour is never the only difference. One token at a time is ink.
"""

from __future__ import annotations

from dataclasses import dataclass

LIGHT = {
    "paper": "#fbfaf8",
    "raised": "#ffffff",
    "ink": "#1d1c22",
    "quiet": "#5d5b66",
    "line": "#dedbe3",
    "slot-1": "#3c48b9",
    "slot-2": "#bf8b00",
    "slot-3": "#14826d",
    "slot-4": "#65125c",
    "slot-5": "#7293cd",
    "slot-6": "#873600",
}
DARK = {
    "paper": "#16161a",
    "raised": "#1e1e24",
    "ink": "#ececf1",
    "quiet": "#a6a4b2",
    "line": "#3b3a46",
    "slot-1": "#9187fb",
    "slot-2": "#fcc43a",
    "slot-3": "#459469",
    "slot-4": "#d67bb3",
    "slot-5": "#66cafc",
    "slot-6": "#e85112",
}
HUES = 6


@dataclass(frozen=True)
class Look:
    """How a method is drawn everywhere."""

    colour: str  # a name in LIGHT and DARK
    marker: str  # matplotlib's letter
    dashed: bool = False
    hollow: bool = False


FIRST_LOOK = Look("ink", "D")
STUDENT_FIRST_LOOK = Look("ink", "D", hollow=True)
_MARKERS = "os^vPX"


def look(slot: int) -> Look:
    """The look of the method that came `slot`-th, from 0. Eighteen differ; after that they repeat."""
    cycle = slot // HUES
    return Look(
        colour=f"slot-{slot % HUES + 1}",
        marker=_MARKERS[(slot + cycle) % len(_MARKERS)],
        dashed=cycle % 3 > 0,
        hollow=cycle % 3 == 1,
    )


def css_variables(theme: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in theme.items())
