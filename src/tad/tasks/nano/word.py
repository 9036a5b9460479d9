"""Word problems about things that people gain, lose, pack and share; the level is the number of calculations (1 to 5).

Counts stay within 0..199 at level 1, 0..499 at level 2 and 0..999 above. Every sentence of a solution is phrased anew, so that
the text has something to be uncertain about: what comes next is seldom settled before the sentence before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tad.tasks.nano.problem import NanoFamily, Problem

LEVELS = (1, 2, 3, 4, 5)
_LARGEST = {1: 199, 2: 499, 3: 999, 4: 999, 5: 999}

_PEOPLE = (
    ("Mia", "she", "her"), ("Ben", "he", "him"), ("Ana", "she", "her"), ("Tom", "he", "him"),
    ("Eva", "she", "her"), ("Sam", "he", "him"), ("Lily", "she", "her"), ("Noah", "he", "him"),
    ("Zoe", "she", "her"), ("Max", "he", "him"), ("Ivy", "she", "her"), ("Leo", "he", "him"),
)  # fmt: skip
_THINGS = (
    "apples", "books", "coins", "cards", "shells", "stamps",
    "pencils", "marbles", "cookies", "beads", "eggs", "keys",
)  # fmt: skip
_BOXES = ("boxes", "bags", "jars", "baskets")

_ASK_ADD = (
    "{P} finds {k} more {things}.",
    "{P} buys {k} more {things}.",
    "{other} gives {him} {k} {things}.",
)
_ASK_SUB = ("{P} gives {k} {things} to {other}.", "{P} loses {k} {things}.", "{P} sells {k} {things}.")
_ASK_PACKS = (
    "{P} buys {k} {boxes} with {n} {things} each.",
    "{P} finds {k} {boxes} with {n} {things} in each.",
)
_ASK_TIMES = ("Then {p} collects until {p} has {k} times as many.", "A year later {p} has {k} times as many.")
_ASK_SHARE = (
    "{P} splits the {things} equally into {k} {boxes} and keeps one.",
    "{P} shares the {things} equally among {k} people, including {himself}.",
)
_SAY_ADD = (
    "Then {p} has {v} + {k} = {w} {things}.",
    "That makes {v} + {k} = {w}.",
    "Adding {k} makes {v} + {k} = {w} {things}.",
    "Now there are more, {v} + {k} = {w} {things}.",
)
_SAY_SUB = (
    "Then {p} has {v} - {k} = {w} {things}.",
    "That leaves {v} - {k} = {w}.",
    "Taking away {k} leaves {v} - {k} = {w} {things}.",
    "Now there are fewer, {v} - {k} = {w} {things}.",
)
_SAY_PACKS = (
    "The {boxes} hold {k} * {n} = {w} {things}.",
    "That is {k} * {n} = {w}.",
    "In the {boxes} there are {k} * {n} = {w} {things}.",
    "{k} {boxes} of {n} make {k} * {n} = {w}.",
)
_SAY_TIMES = (
    "Then {p} has {v} * {k} = {w} {things}.",
    "It grows to {v} * {k} = {w}.",
    "{k} times as many is {v} * {k} = {w} {things}.",
    "Now there are {k} times as many, {v} * {k} = {w}.",
)
_SAY_SHARE = (
    "Then {p} has {v} / {k} = {w} {things}.",
    "Each share is {v} / {k} = {w}.",
    "One part of {k} is {v} / {k} = {w} {things}.",
    "Split into {k} parts, one part is {v} / {k} = {w}.",
)
_SAY_OTHER = (
    "{other} has {v} {sign} {k} = {w} {things}.",
    "For {other} it is {v} {sign} {k} = {w}.",
    "So {other} owns {v} {sign} {k} = {w} {things}.",
    "Compare with {other}, who has {v} {sign} {k} = {w}.",
)
_SAY_BOTH = (
    "Both have {v} + {n} = {w} {things}.",
    "The total is {v} + {n} = {w}.",
    "Together they have {v} + {n} = {w} {things}.",
    "We add both, {v} + {n} = {w}.",
)
_SAY_GOAL = (
    "So {p} needs {k} - {v} = {w} more.",
    "There are {k} - {v} = {w} missing.",
    "To reach the goal it takes {k} - {v} = {w} {things}.",
    "Compare with the goal, {k} - {v} = {w}.",
)
_BEGIN = (
    "{name} has {v} {things} at first.",
    "At the start there are {v} {things}.",
    "We begin with {v} {things}.",
    "{name} starts with {v}.",
)
# Events of one calculation: how they are told, how they are worked out, and their sign.
_PLAIN = {
    "add": (_ASK_ADD, _SAY_ADD, "+"),
    "sub": (_ASK_SUB, _SAY_SUB, "-"),
    "times": (_ASK_TIMES, _SAY_TIMES, "*"),
    "share": (_ASK_SHARE, _SAY_SHARE, "/"),
}


@dataclass(frozen=True)
class WordPlan:
    """A start, then events: ("add", k), ("packs", m, n), ...; `goal`, `more` and `fewer` end a story."""

    start: int
    events: tuple[tuple[str | int, ...], ...]
    level: int


def draw(rng: random.Random) -> WordPlan:
    level = rng.choice(LEVELS)
    largest = _LARGEST[level]
    value = start = rng.randint(2, rng.choice((20, 99, largest // 2)))
    events: list[tuple[str | int, ...]] = []
    left = level
    while left:
        event, after, cost = _draw_event(rng, value, left, largest)
        if cost:
            events.append(event)
            value, left = after, left - cost
    return WordPlan(start, tuple(events), level)


def _draw_event(
    rng: random.Random, value: int, left: int, largest: int
) -> tuple[tuple[str | int, ...], int, int]:
    """One event, the count after it, and how many calculations it takes; 0 where this draw does not fit."""
    none = (("none",), value, 0)
    name = rng.choice(("add", "add", "sub", "sub", "packs", "times", "share", "end"))
    if name == "end":
        if left == 1:
            goal = rng.randint(2, largest // 2)
            return (("goal", goal), goal - value, 1) if goal > value else none
        if left == 2:
            which = rng.choice(("more", "fewer"))
            k = rng.randint(1, largest // 4)
            other = value + k if which == "more" else value - k
            return ((which, k), value + other, 2) if other > 0 and value + other <= largest else none
        return none
    if name == "add":
        k = rng.randint(1, rng.choice((20, 99, largest // 2)))
        return (("add", k), value + k, 1) if value + k <= largest else none
    if name == "sub":
        k = rng.randint(1, rng.choice((20, 99, largest // 2)))
        return (("sub", k), value - k, 1) if k <= value else none
    if name == "packs":
        m, n = rng.randint(2, 9), rng.randint(2, 12 if largest < 500 else 39)
        return (("packs", m, n), value + m * n, 2) if left > 1 and value + m * n <= largest else none
    if name == "times":
        k = rng.randint(2, 4 if largest < 500 else 9)
        return (("times", k), value * k, 1) if value > 1 and value * k <= largest else none
    k = rng.randint(2, 6 if largest < 500 else 9)
    return (("share", k), value // k, 1) if value >= k and value % k == 0 else none


def key(plan: WordPlan) -> str:
    return f"word {plan.start} " + " ".join("-".join(map(str, event)) for event in plan.events)


def write(plan: WordPlan, rng: random.Random) -> Problem:
    (name, p, him), (other, _, _) = rng.sample(_PEOPLE, 2)
    words = {
        "name": name, "p": p, "P": p.capitalize(), "him": him, "himself": him + "self", "other": other,
        "things": rng.choice(_THINGS), "boxes": rng.choice(_BOXES),
    }  # fmt: skip
    asks = [f"{name} has {plan.start} {words['things']}."]
    says: list[str] = []
    sums: list[str] = []
    # The longest stories do without an opening and take the shorter forms, which come first.
    if plan.level < 5:
        says.append(rng.choice(_BEGIN).format(v=plan.start, **words))

    def say(forms: tuple[str, ...], equation: str, **numbers: int | str) -> None:
        says.append(rng.choice(forms if plan.level < 5 else forms[:2]).format(**numbers, **words))
        sums.append(equation)

    value = plan.start
    last = "How many {things} does {name} have now?"
    for event in plan.events:
        what, k = str(event[0]), int(event[1])
        if what in _PLAIN:
            ask, forms, sign = _PLAIN[what]
            after = {"+": value + k, "-": value - k, "*": value * k, "/": value // k}[sign]
            asks.append(rng.choice(ask).format(k=k, **words))
            say(forms, f"{value} {sign} {k} = {after}", v=value, k=k, w=after)
            value = after
        elif what == "packs":
            n = int(event[2])
            asks.append(rng.choice(_ASK_PACKS).format(k=k, n=n, **words))
            say(_SAY_PACKS, f"{k} * {n} = {k * n}", k=k, n=n, w=k * n)
            say(_SAY_ADD, f"{value} + {k * n} = {value + k * n}", v=value, k=k * n, w=value + k * n)
            value += k * n
        elif what == "goal":
            asks.append(f"{words['P']} wants {k} {words['things']}.")
            say(_SAY_GOAL, f"{k} - {value} = {k - value}", v=value, k=k, w=k - value)
            value, last = k - value, "How many more does {p} need?"
        else:
            sign = "+" if what == "more" else "-"
            theirs = value + k if what == "more" else value - k
            asks.append(f"{other} has {k} {what} {words['things']} than {him}.")
            say(_SAY_OTHER, f"{value} {sign} {k} = {theirs}", v=value, k=k, w=theirs, sign=sign)
            say(_SAY_BOTH, f"{value} + {theirs} = {value + theirs}", v=value, n=theirs, w=value + theirs)
            value, last = value + theirs, "How many {things} do they have together?"
    asks.append(last.format(**words))
    return Problem(
        kind="story",
        level=plan.level,
        key=key(plan),
        content=key(plan),
        question=" ".join(asks),
        reference=", ".join(sums),
        solution=" ".join(says) + f"\n#### {value}",
        answer=value,
    )


WORD: NanoFamily[WordPlan] = NanoFamily("nano-word", draw, key, write)
