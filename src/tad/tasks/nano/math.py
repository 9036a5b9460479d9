r"""Symbolic maths with worked steps: equations, sequences, systems and calculations, levels 1 to 5.

The answer is a whole number in \boxed{}; numbers stay within 0..199 at levels 1 and 2, and within 0..999 above. A kind is a function that draws the numbers of a
problem and words them as (numbers, question, steps, answer), or gives None where the draw does not fit; a step is (equation, sentence forms).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tad.tasks.nano.problem import NanoFamily, Problem

LEVELS = (1, 2, 3, 4, 5)
_SMALL, _LARGE = 199, 999

Numbers = tuple[int, ...]
Step = tuple[str, tuple[str, ...]]  # the equation of the reference, and ways to write the step out in full
Worded = tuple[Numbers, str, list[Step], int]


@dataclass(frozen=True)
class MathPlan:
    kind: str
    level: int
    numbers: Numbers
    question: str
    steps: list[Step]
    answer: int


def _step(equation: str, plain: str, formal: str) -> Step:
    """The two wordings, and a bland third where both are a sentence that ends with the equation."""
    forms = (
        (plain, formal, "This gives @.")
        if plain.endswith(" @.") and formal.endswith(" @.")
        else (plain, formal)
    )
    return equation, tuple(form.replace("@", equation) for form in forms)


def _fits(*values: int, largest: int = _LARGE) -> bool:
    return all(0 <= value <= largest for value in values)


# --- equations -----------------------------------------------------------------------------------------------------


def _undo(b: int, left: str, right: int) -> Step:
    """The step that takes `b` away from `left + b = right`."""
    sign, verb, word = ("-", "Subtract", "from") if b > 0 else ("+", "Add", "to")
    equation = f"{left} = {right} {sign} {abs(b)} = {right - b}"
    return _step(equation, f"{verb} {abs(b)} {word} both sides: @.", f"Moving {abs(b)} over gives @.")


def _divide(a: int, right: int, name: str = "x") -> Step:
    return _step(f"{name} = {right} / {a} = {right // a}", f"Divide by {a}: @.", f"Dividing by {a} gives @.")


def _sign(b: int) -> str:
    return f"+ {b}" if b >= 0 else f"- {-b}"


def _times(c: int) -> str:
    return "x" if c == 1 else f"{c}x"


def _shift(rng: random.Random) -> Worded | None:
    x, b, sign = rng.randint(1, 99), rng.randint(1, 99), rng.choice((1, -1))
    b *= sign
    c = x + b
    if not _fits(c, largest=_SMALL):
        return None
    return (x, b), f"Solve x {_sign(b)} = {c}.", [_undo(b, "x", c)], x


def _linear(rng: random.Random) -> Worded | None:
    a, x, b = rng.randint(2, 9), rng.randint(1, 20), rng.choice((1, -1)) * rng.randint(1, 60)
    c = a * x + b
    if not _fits(c, largest=_SMALL):
        return None
    return (a, x, b), f"Solve {a}x {_sign(b)} = {c}.", [_undo(b, f"{a}x", c), _divide(a, c - b)], x


def _collect(a: int, b: int, c: int, d: int) -> list[Step]:
    """The steps that solve ax + b = cx + d."""
    left = f"{a - c}x"
    collected = _step(
        f"{a}x - {_times(c)} = {left}",
        f"Subtract {_times(c)}: @, so {left} + {b} = {d}.",
        f"Collecting x, @ and {left} + {b} = {d}.",
    )
    return [collected, _undo(b, left, d), _divide(a - c, d - b)]


def _two_sided(rng: random.Random) -> Worded | None:
    c, x = rng.randint(1, 9), rng.randint(1, 60)
    a, b = c + rng.randint(2, 9), rng.randint(1, 400)
    d = (a - c) * x + b
    if not _fits(d):
        return None
    return (a, b, c, x), f"Solve {a}x + {b} = {_times(c)} + {d}.", _collect(a, b, c, d), x


def _bracket(rng: random.Random) -> Worded | None:
    c, x = rng.randint(1, 6), rng.randint(1, 40)
    a, b = c + rng.randint(2, 6), rng.randint(1, 40)
    d = (a - c) * x + a * b
    if not _fits(d):
        return None
    expand = _step(f"{a} * {b} = {a * b}", "Expand: @.", "The bracket gives @.")
    steps = [expand, *_collect(a, a * b, c, d)]
    return (a, b, c, x), f"Solve {a}(x + {b}) = {_times(c)} + {d}.", steps, x


def _brackets(rng: random.Random) -> Worded | None:
    a, c = rng.randint(2, 9), rng.randint(2, 9)
    b, d, x = rng.randint(1, 30), rng.randint(1, 30), rng.randint(1, 30)
    total, fixed = a * (x + b) + c * (x + d), a * b + c * d
    if not _fits(total):
        return None
    steps = [
        _step(f"{a} * {b} = {a * b}", "Expand: @", "We have @"),
        _step(f"{c} * {d} = {c * d}", "and @.", "and also @."),
        _step(f"{a * b} + {c * d} = {fixed}", "Collect: @.", "Adding gives @."),
        _undo(fixed, f"{a + c}x", total),
        _divide(a + c, total - fixed),
    ]
    return (a, b, c, d, x), f"Solve {a}(x + {b}) + {c}(x + {d}) = {total}.", steps, x


# --- sequences -----------------------------------------------------------------------------------------------------


def _list(terms: list[int]) -> str:
    return ", ".join(map(str, terms))


def _gap(start: int, gap: int) -> Step:
    equation = f"{start + gap} - {start} = {gap}" if gap > 0 else f"{start} - {start + gap} = {-gap}"
    word = "up" if gap > 0 else "down"
    return _step(equation, f"The terms go {word} by @.", f"The step {word} is @.")


def _next(rng: random.Random) -> Worded | None:
    start, gap = rng.randint(1, 60), rng.choice((1, 1, -1)) * rng.randint(1, 25)
    terms = [start + i * gap for i in range(5)]
    if not _fits(terms[4], largest=_SMALL):
        return None
    after = _step(f"{terms[3]} {_sign(gap)} = {terms[4]}", "The next term is @.", "After that comes @.")
    return (start, gap), f"Find the next term of {_list(terms[:4])}.", [_gap(start, gap), after], terms[4]


def _term(rng: random.Random) -> Worded | None:
    start, gap, index = rng.randint(1, 200), rng.randint(2, 49), rng.randint(5, 19)
    rise = gap * (index - 1)
    if not _fits(start + rise):
        return None
    steps = [
        _gap(start, gap),
        _step(f"{index} - 1 = {index - 1}", "There are @ steps.", "We make @ steps."),
        _step(f"{index - 1} * {gap} = {rise}", "They add @.", "The rise is @."),
        _step(f"{start} + {rise} = {start + rise}", f"Term {index} is @.", "From the start this is @."),
    ]
    terms = [start + i * gap for i in range(3)]
    return (start, gap, index), f"Find term {index} of {_list(terms)}, ...", steps, start + rise


def _growing(rng: random.Random) -> Worded | None:
    start, gap, growth = rng.randint(1, 200), rng.randint(1, 60), rng.randint(1, 29)
    gaps = [gap + i * growth for i in range(4)]
    terms = [start + sum(gaps[:i]) for i in range(5)]
    if not _fits(terms[4]):
        return None
    steps = [
        _step(f"gaps {_list(gaps[:3])}", "Look at the @.", "The terms have @."),
        _step(f"{gaps[1]} - {gaps[0]} = {growth}", "They grow by @.", "Each gap grows by @."),
        _step(f"{gaps[2]} + {growth} = {gaps[3]}", "The next gap is @.", "Then the gap is @."),
        _step(f"{terms[3]} + {gaps[3]} = {terms[4]}", "The next term is @.", "After that comes @."),
    ]
    return (start, gap, growth), f"Find the next term of {_list(terms[:4])}.", steps, terms[4]


def _rule(rng: random.Random) -> Worded | None:
    start, factor, shift = (
        rng.randint(1, 40),
        rng.choice((2, 2, 3, 4, 5)),
        rng.choice((1, -1)) * rng.randint(1, 60),
    )
    count = rng.randint(2, 4)
    steps: list[Step] = []
    value = start
    for index in range(2, count + 2):
        after = factor * value + shift
        if not _fits(after):
            return None
        equation = f"{factor} * {value} {_sign(shift)} = {after}"
        steps.append(_step(equation, f"Term {index} is @.", f"Term {index} equals @."))
        value = after
    sign = "plus" if shift > 0 else "minus"
    question = (
        f"A sequence starts with {start}. Each term is {factor} times the last term {sign} {abs(shift)}. "
        f"Find term {count + 1}."
    )
    return (start, factor, shift, count), question, steps, value


def _sums(rng: random.Random) -> Worded | None:
    first, second, count = rng.randint(1, 40), rng.randint(1, 40), rng.randint(2, 4)
    steps: list[Step] = []
    a, b = first, second
    for index in range(3, count + 3):
        steps.append(_step(f"{a} + {b} = {a + b}", f"Term {index} is @.", f"Term {index} equals @."))
        a, b = b, a + b
    if not _fits(b, largest=_SMALL):
        return None
    question = (
        f"A sequence starts with {first}, {second}. Each term is the sum of the last two terms. "
        f"Find term {count + 2}."
    )
    return (first, second, count), question, steps, b


# --- systems -------------------------------------------------------------------------------------------------------


def _sum_difference(rng: random.Random) -> Worded | None:
    y = rng.randint(1, 400)
    x = y + rng.randint(1, 400)
    if not _fits(2 * x):
        return None
    total, gap = x + y, x - y
    steps = [
        _step(f"2x = {total} + {gap} = {2 * x}", "Add both equations: @.", "Their sum is @."),
        _divide(2, 2 * x),
        _step(f"y = {total} - {x} = {y}", "Then @.", "From the first, @."),
    ]
    return (x, y), f"x + y = {total} and x - y = {gap}. Find y.", steps, y


def _multiple(rng: random.Random) -> Worded | None:
    a, x, y = rng.randint(3, 12), rng.randint(1, 60), rng.randint(1, 400)
    large, small = a * x + y, x + y
    if not _fits(large):
        return None
    equation = f"{a - 1}x = {large} - {small} = {large - small}"
    steps = [
        _step(equation, "Subtract the equations: @.", "The difference is @."),
        _divide(a - 1, large - small),
        _step(f"y = {small} - {x} = {y}", "Then @.", "From the second, @."),
    ]
    return (a, x, y), f"{a}x + y = {large} and x + y = {small}. Find y.", steps, y


def _substitute(rng: random.Random) -> Worded | None:
    a, b, x = rng.randint(2, 9), rng.randint(1, 300), rng.randint(1, 60)
    y = a * x + b
    total = x + y
    if not _fits(total):
        return None
    steps = [
        _step(f"{a + 1}x + {b} = {total}", "Put y in: @.", "Replacing y gives @."),
        _undo(b, f"{a + 1}x", total),
        _divide(a + 1, total - b),
        _step(f"y = {total} - {x} = {y}", "Then @.", "From the sum, @."),
    ]
    return (a, b, x), f"y = {a}x + {b} and x + y = {total}. Find y.", steps, y


# --- calculations --------------------------------------------------------------------------------------------------


def _product_sum(rng: random.Random) -> Worded | None:
    a, b, c = rng.randint(2, 9), rng.randint(2, 12), rng.choice((1, -1)) * rng.randint(1, 60)
    result = a * b + c
    if not _fits(result, largest=_SMALL):
        return None
    steps = [
        _step(f"{a} * {b} = {a * b}", "First multiply: @.", "The product is @."),
        _step(f"{a * b} {_sign(c)} = {result}", "Then @.", "Together @."),
    ]
    return (a, b, c), f"Compute {a} * {b} {_sign(c)}.", steps, result


def _remainder(rng: random.Random) -> Worded | None:
    d = rng.randint(3, 12)
    n = rng.randint(d + 1, _SMALL)
    q, r = divmod(n, d)
    steps = [
        _step(f"{d} * {q} = {d * q}", "The largest multiple is @.", "We can take out @."),
        _step(f"{n} - {d * q} = {r}", "What is left is @.", "So the rest is @."),
    ]
    return (n, d), f"Find the remainder of {n} divided by {d}.", steps, r


def _products(rng: random.Random) -> Worded | None:
    a, b, c, d = (rng.randint(2, 12) for _ in range(4))
    sign = rng.choice((1, -1))
    mark = "+" if sign > 0 else "-"
    result = a * b + sign * c * d
    if not _fits(result, largest=_SMALL):
        return None
    steps = [
        _step(f"{a} * {b} = {a * b}", "First multiply: @.", "The first product is @."),
        _step(f"{c} * {d} = {c * d}", "Also @.", "The second product is @."),
        _step(f"{a * b} {mark} {c * d} = {result}", "Then @.", "Together @."),
    ]
    return (a, b, c, d, sign), f"Compute {a} * {b} {mark} {c} * {d}.", steps, result


def _nested(rng: random.Random) -> Worded | None:
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    c, d, e = rng.randint(2, 9), rng.randint(1, 200), rng.randint(2, 9)
    product = (a + b) * c
    inside = product - d
    if inside <= 0 or inside % e or not _fits(product):
        return None
    steps = [
        _step(f"{a} + {b} = {a + b}", "Inside, @.", "The sum is @."),
        _step(f"{a + b} * {c} = {product}", "Multiply: @.", "The product is @."),
        _step(f"{product} - {d} = {inside}", "Subtract: @.", "The difference is @."),
        _step(f"{inside} / {e} = {inside // e}", "Divide: @.", "The quotient is @."),
    ]
    return (a, b, c, d, e), f"Compute (({a} + {b}) * {c} - {d}) / {e}.", steps, inside // e


# kind -> (level, function); a level is drawn first, then one of its kinds.
KINDS: dict[str, tuple[int, Callable[[random.Random], Worded | None]]] = {
    "shift": (1, _shift),
    "next": (1, _next),
    "product-sum": (1, _product_sum),
    "linear": (2, _linear),
    "remainder": (2, _remainder),
    "sums": (2, _sums),
    "products": (2, _products),
    "two-sided": (3, _two_sided),
    "sum-difference": (3, _sum_difference),
    "term": (3, _term),
    "growing": (3, _growing),
    "rule": (4, _rule),
    "bracket": (4, _bracket),
    "multiple": (4, _multiple),
    "nested": (4, _nested),
    "brackets": (5, _brackets),
    "substitute": (5, _substitute),
}
_OF_LEVEL = {level: tuple(kind for kind in KINDS if KINDS[kind][0] == level) for level in LEVELS}


def draw(rng: random.Random) -> MathPlan:
    level = rng.choice(LEVELS)
    kind = rng.choice(_OF_LEVEL[level])
    while True:
        worded = KINDS[kind][1](rng)
        if worded is not None:
            return MathPlan(kind, level, *worded)


def key(plan: MathPlan) -> str:
    return f"math {plan.kind} " + " ".join(map(str, plan.numbers))


def write(plan: MathPlan, rng: random.Random) -> Problem:
    close = rng.choice(("The answer is", "So the answer is", "We get"))
    told = " ".join(rng.choice(forms) for _, forms in plan.steps)
    return Problem(
        kind=plan.kind,
        level=plan.level,
        key=key(plan),
        content=key(plan),
        question=plan.question,
        reference=", ".join(equation for equation, _ in plan.steps),
        solution=f"{told} {close} \\boxed{{{plan.answer}}}.",
        answer=plan.answer,
    )


MATH: NanoFamily[MathPlan] = NanoFamily("nano-math", draw, key, write)
