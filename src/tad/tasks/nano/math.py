r"""Symbolic maths with worked steps: equations, sequences, systems and calculations, levels 1 to 5.

The answer is a whole number in \boxed{}; numbers stay within 0..199 at levels 1 and 2, and within 0..999 above. A kind is a pair of functions: one draws the numbers of a problem
(None where the draw does not fit), one words them as (question, steps, answer); a step is (equation, sentence forms).
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
Worded = tuple[str, list[Step], int]


@dataclass(frozen=True)
class MathPlan:
    kind: str
    level: int
    numbers: Numbers


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


def _draw_shift(rng: random.Random) -> Numbers | None:
    x, b, sign = rng.randint(1, 99), rng.randint(1, 99), rng.choice((1, -1))
    return (x, sign * b) if _fits(x + sign * b, largest=_SMALL) else None


def _write_shift(numbers: Numbers) -> Worded:
    x, b = numbers
    c = x + b
    sign, undo, verb, word = ("+", "-", "Subtract", "from") if b > 0 else ("-", "+", "Add", "to")
    b = abs(b)
    steps = [
        _step(f"x = {c} {undo} {b} = {x}", f"{verb} {b} {word} both sides: @.", f"Moving {b} over gives @.")
    ]
    return f"Solve x {sign} {b} = {c}.", steps, x


def _draw_linear(rng: random.Random) -> Numbers | None:
    a, x, b = rng.randint(2, 9), rng.randint(1, 20), rng.choice((1, -1)) * rng.randint(1, 60)
    return (a, x, b) if _fits(a * x + b, largest=_SMALL) else None


def _undo(b: int, left: str, right: int) -> Step:
    """The step that takes `b` away from `left + b = right`."""
    sign, verb, word = ("-", "Subtract", "from") if b > 0 else ("+", "Add", "to")
    equation = f"{left} = {right} {sign} {abs(b)} = {right - b}"
    return _step(equation, f"{verb} {abs(b)} {word} both sides: @.", f"Moving {abs(b)} over gives @.")


def _divide(a: int, right: int, name: str = "x") -> Step:
    return _step(f"{name} = {right} / {a} = {right // a}", f"Divide by {a}: @.", f"Dividing by {a} gives @.")


def _sign(b: int) -> str:
    return f"+ {b}" if b >= 0 else f"- {-b}"


def _write_linear(numbers: Numbers) -> Worded:
    a, x, b = numbers
    c = a * x + b
    return f"Solve {a}x {_sign(b)} = {c}.", [_undo(b, f"{a}x", c), _divide(a, c - b)], x


def _draw_two_sided(rng: random.Random) -> Numbers | None:
    c, x = rng.randint(1, 9), rng.randint(1, 60)
    a, b = c + rng.randint(2, 9), rng.randint(1, 400)
    d = (a - c) * x + b
    return (a, b, c, x) if _fits(d) else None


def _times(c: int) -> str:
    return "x" if c == 1 else f"{c}x"


def _write_two_sided(numbers: Numbers) -> Worded:
    a, b, c, x = numbers
    d = (a - c) * x + b
    left = f"{a - c}x"
    steps = [
        _step(
            f"{a}x - {_times(c)} = {left}",
            f"Subtract {_times(c)}: @, so {left} + {b} = {d}.",
            f"Collecting x, @ and {left} + {b} = {d}.",
        ),
        _undo(b, left, d),
        _divide(a - c, d - b),
    ]
    return f"Solve {a}x + {b} = {_times(c)} + {d}.", steps, x


def _draw_bracket(rng: random.Random) -> Numbers | None:
    c, x = rng.randint(1, 6), rng.randint(1, 40)
    a, b = c + rng.randint(2, 6), rng.randint(1, 40)
    d = (a - c) * x + a * b
    return (a, b, c, x) if _fits(d) else None


def _write_bracket(numbers: Numbers) -> Worded:
    a, b, c, x = numbers
    d = (a - c) * x + a * b
    _, steps, _ = _write_two_sided((a, a * b, c, x))
    expand = _step(
        f"{a} * {b} = {a * b}",
        "Expand: @.",
        "The bracket gives @.",
    )
    return f"Solve {a}(x + {b}) = {_times(c)} + {d}.", [expand, *steps], x


def _draw_brackets(rng: random.Random) -> Numbers | None:
    a, c = rng.randint(2, 9), rng.randint(2, 9)
    b, d, x = rng.randint(1, 30), rng.randint(1, 30), rng.randint(1, 30)
    return (a, b, c, d, x) if _fits(a * (x + b) + c * (x + d)) else None


def _write_brackets(numbers: Numbers) -> Worded:
    a, b, c, d, x = numbers
    total, fixed = a * (x + b) + c * (x + d), a * b + c * d
    steps = [
        _step(f"{a} * {b} = {a * b}", "Expand: @", "We have @"),
        _step(f"{c} * {d} = {c * d}", "and @.", "and also @."),
        _step(
            f"{a * b} + {c * d} = {fixed}",
            "Collect: @.",
            "Adding gives @.",
        ),
        _undo(fixed, f"{a + c}x", total),
        _divide(a + c, total - fixed),
    ]
    return f"Solve {a}(x + {b}) + {c}(x + {d}) = {total}.", steps, x


# --- sequences -----------------------------------------------------------------------------------------------------


def _draw_next(rng: random.Random) -> Numbers | None:
    start, gap = rng.randint(1, 60), rng.choice((1, 1, -1)) * rng.randint(1, 25)
    return (start, gap) if _fits(start + 4 * gap, largest=_SMALL) else None


def _list(terms: list[int]) -> str:
    return ", ".join(map(str, terms))


def _gap(start: int, gap: int) -> Step:
    equation = f"{start + gap} - {start} = {gap}" if gap > 0 else f"{start} - {start + gap} = {-gap}"
    word = "up" if gap > 0 else "down"
    return _step(equation, f"The terms go {word} by @.", f"The step {word} is @.")


def _write_next(numbers: Numbers) -> Worded:
    start, gap = numbers
    terms = [start + i * gap for i in range(4)]
    after = _step(
        f"{terms[-1]} {'+' if gap > 0 else '-'} {abs(gap)} = {terms[-1] + gap}",
        "The next term is @.",
        "After that comes @.",
    )
    return f"Find the next term of {_list(terms)}.", [_gap(start, gap), after], terms[-1] + gap


def _draw_term(rng: random.Random) -> Numbers | None:
    start, gap, index = rng.randint(1, 200), rng.randint(2, 49), rng.randint(5, 19)
    return (start, gap, index) if _fits(start + gap * (index - 1)) else None


def _write_term(numbers: Numbers) -> Worded:
    start, gap, index = numbers
    rise = gap * (index - 1)
    steps = [
        _gap(start, gap),
        _step(f"{index} - 1 = {index - 1}", "There are @ steps.", "We make @ steps."),
        _step(f"{index - 1} * {gap} = {rise}", "They add @.", "The rise is @."),
        _step(f"{start} + {rise} = {start + rise}", f"Term {index} is @.", "From the start this is @."),
    ]
    terms = [start + i * gap for i in range(3)]
    return f"Find term {index} of {_list(terms)}, ...", steps, start + rise


def _draw_growing(rng: random.Random) -> Numbers | None:
    start, gap, growth = rng.randint(1, 200), rng.randint(1, 60), rng.randint(1, 29)
    return (start, gap, growth) if _fits(start + 4 * gap + 6 * growth) else None


def _write_growing(numbers: Numbers) -> Worded:
    start, gap, growth = numbers
    gaps = [gap + i * growth for i in range(4)]
    terms = [start + sum(gaps[:i]) for i in range(5)]
    steps = [
        _step(f"gaps {_list(gaps[:3])}", "Look at the @.", "The terms have @."),
        _step(f"{gaps[1]} - {gaps[0]} = {growth}", "They grow by @.", "Each gap grows by @."),
        _step(f"{gaps[2]} + {growth} = {gaps[3]}", "The next gap is @.", "Then the gap is @."),
        _step(f"{terms[3]} + {gaps[3]} = {terms[4]}", "The next term is @.", "After that comes @."),
    ]
    return f"Find the next term of {_list(terms[:4])}.", steps, terms[4]


def _draw_rule(rng: random.Random) -> Numbers | None:
    start, factor, shift = (
        rng.randint(1, 40),
        rng.choice((2, 2, 3, 4, 5)),
        rng.choice((1, -1)) * rng.randint(1, 60),
    )
    count = rng.randint(2, 4)
    value = start
    for _ in range(count):
        value = factor * value + shift
        if not _fits(value):
            return None
    return start, factor, shift, count


def _write_rule(numbers: Numbers) -> Worded:
    start, factor, shift, count = numbers
    steps: list[Step] = []
    value = start
    for index in range(2, count + 2):
        after = factor * value + shift
        equation = f"{factor} * {value} {_sign(shift)} = {after}"
        steps.append(_step(equation, f"Term {index} is @.", f"Term {index} equals @."))
        value = after
    sign = "plus" if shift > 0 else "minus"
    question = (
        f"A sequence starts with {start}. Each term is {factor} times the last term {sign} {abs(shift)}. "
        f"Find term {count + 1}."
    )
    return question, steps, value


def _draw_sums(rng: random.Random) -> Numbers | None:
    first, second, count = rng.randint(1, 40), rng.randint(1, 40), rng.randint(2, 4)
    a, b = first, second
    for _ in range(count):
        a, b = b, a + b
    return (first, second, count) if _fits(b, largest=_SMALL) else None


def _write_sums(numbers: Numbers) -> Worded:
    first, second, count = numbers
    steps: list[Step] = []
    a, b = first, second
    for index in range(3, count + 3):
        steps.append(_step(f"{a} + {b} = {a + b}", f"Term {index} is @.", f"Term {index} equals @."))
        a, b = b, a + b
    question = (
        f"A sequence starts with {first}, {second}. Each term is the sum of the last two terms. "
        f"Find term {count + 2}."
    )
    return question, steps, b


# --- systems -------------------------------------------------------------------------------------------------------


def _draw_sum_difference(rng: random.Random) -> Numbers | None:
    y = rng.randint(1, 400)
    x = y + rng.randint(1, 400)
    return (x, y) if _fits(2 * x) else None


def _write_sum_difference(numbers: Numbers) -> Worded:
    x, y = numbers
    total, gap = x + y, x - y
    steps = [
        _step(f"2x = {total} + {gap} = {2 * x}", "Add both equations: @.", "Their sum is @."),
        _divide(2, 2 * x),
        _step(f"y = {total} - {x} = {y}", "Then @.", "From the first, @."),
    ]
    return f"x + y = {total} and x - y = {gap}. Find y.", steps, y


def _draw_multiple(rng: random.Random) -> Numbers | None:
    a, x, y = rng.randint(3, 12), rng.randint(1, 60), rng.randint(1, 400)
    return (a, x, y) if _fits(a * x + y) else None


def _write_multiple(numbers: Numbers) -> Worded:
    a, x, y = numbers
    large, small = a * x + y, x + y
    steps = [
        _step(
            f"{a - 1}x = {large} - {small} = {large - small}",
            "Subtract the equations: @.",
            "The difference is @.",
        ),
        _divide(a - 1, large - small),
        _step(f"y = {small} - {x} = {y}", "Then @.", "From the second, @."),
    ]
    return f"{a}x + y = {large} and x + y = {small}. Find y.", steps, y


def _draw_substitute(rng: random.Random) -> Numbers | None:
    a, b, x = rng.randint(2, 9), rng.randint(1, 300), rng.randint(1, 60)
    return (a, b, x) if _fits((a + 1) * x + b) else None


def _write_substitute(numbers: Numbers) -> Worded:
    a, b, x = numbers
    y = a * x + b
    total = x + y
    steps = [
        _step(f"{a + 1}x + {b} = {total}", "Put y in: @.", "Replacing y gives @."),
        _undo(b, f"{a + 1}x", total),
        _divide(a + 1, total - b),
        _step(f"y = {total} - {x} = {y}", "Then @.", "From the sum, @."),
    ]
    return f"y = {a}x + {b} and x + y = {total}. Find y.", steps, y


# --- calculations --------------------------------------------------------------------------------------------------


def _draw_product_sum(rng: random.Random) -> Numbers | None:
    a, b, c = rng.randint(2, 9), rng.randint(2, 12), rng.choice((1, -1)) * rng.randint(1, 60)
    return (a, b, c) if _fits(a * b + c, largest=_SMALL) else None


def _write_product_sum(numbers: Numbers) -> Worded:
    a, b, c = numbers
    steps = [
        _step(f"{a} * {b} = {a * b}", "First multiply: @.", "The product is @."),
        _step(f"{a * b} {_sign(c)} = {a * b + c}", "Then @.", "Together @."),
    ]
    return f"Compute {a} * {b} {_sign(c)}.", steps, a * b + c


def _draw_remainder(rng: random.Random) -> Numbers | None:
    d = rng.randint(3, 12)
    n = rng.randint(d + 1, _SMALL)
    return n, d


def _write_remainder(numbers: Numbers) -> Worded:
    n, d = numbers
    q, r = divmod(n, d)
    steps = [
        _step(f"{d} * {q} = {d * q}", "The largest multiple is @.", "We can take out @."),
        _step(f"{n} - {d * q} = {r}", "What is left is @.", "So the rest is @."),
    ]
    return f"Find the remainder of {n} divided by {d}.", steps, r


def _draw_products(rng: random.Random) -> Numbers | None:
    a, b, c, d = (rng.randint(2, 12) for _ in range(4))
    sign = rng.choice((1, -1))
    return (a, b, c, d, sign) if _fits(a * b + sign * c * d, largest=_SMALL) else None


def _write_products(numbers: Numbers) -> Worded:
    a, b, c, d, sign = numbers
    mark = "+" if sign > 0 else "-"
    result = a * b + sign * c * d
    steps = [
        _step(f"{a} * {b} = {a * b}", "First multiply: @.", "The first product is @."),
        _step(f"{c} * {d} = {c * d}", "Also @.", "The second product is @."),
        _step(f"{a * b} {mark} {c * d} = {result}", "Then @.", "Together @."),
    ]
    return f"Compute {a} * {b} {mark} {c} * {d}.", steps, result


def _draw_nested(rng: random.Random) -> Numbers | None:
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    c, d, e = rng.randint(2, 9), rng.randint(1, 200), rng.randint(2, 9)
    inside = (a + b) * c - d
    return (a, b, c, d, e) if inside > 0 and inside % e == 0 and _fits((a + b) * c) else None


def _write_nested(numbers: Numbers) -> Worded:
    a, b, c, d, e = numbers
    product = (a + b) * c
    steps = [
        _step(f"{a} + {b} = {a + b}", "Inside, @.", "The sum is @."),
        _step(f"{a + b} * {c} = {product}", "Multiply: @.", "The product is @."),
        _step(f"{product} - {d} = {product - d}", "Subtract: @.", "The difference is @."),
        _step(f"{product - d} / {e} = {(product - d) // e}", "Divide: @.", "The quotient is @."),
    ]
    return f"Compute (({a} + {b}) * {c} - {d}) / {e}.", steps, (product - d) // e


# kind -> (level, draw, write); a level is drawn first, then one of its kinds.
KINDS: dict[str, tuple[int, Callable[[random.Random], Numbers | None], Callable[[Numbers], Worded]]] = {
    "shift": (1, _draw_shift, _write_shift),
    "next": (1, _draw_next, _write_next),
    "product-sum": (1, _draw_product_sum, _write_product_sum),
    "linear": (2, _draw_linear, _write_linear),
    "remainder": (2, _draw_remainder, _write_remainder),
    "sums": (2, _draw_sums, _write_sums),
    "products": (2, _draw_products, _write_products),
    "two-sided": (3, _draw_two_sided, _write_two_sided),
    "sum-difference": (3, _draw_sum_difference, _write_sum_difference),
    "term": (3, _draw_term, _write_term),
    "growing": (3, _draw_growing, _write_growing),
    "rule": (4, _draw_rule, _write_rule),
    "bracket": (4, _draw_bracket, _write_bracket),
    "multiple": (4, _draw_multiple, _write_multiple),
    "nested": (4, _draw_nested, _write_nested),
    "brackets": (5, _draw_brackets, _write_brackets),
    "substitute": (5, _draw_substitute, _write_substitute),
}
_OF_LEVEL = {level: tuple(kind for kind in KINDS if KINDS[kind][0] == level) for level in LEVELS}


def draw(rng: random.Random) -> MathPlan:
    level = rng.choice(LEVELS)
    kind = rng.choice(_OF_LEVEL[level])
    while True:
        numbers = KINDS[kind][1](rng)
        if numbers is not None:
            return MathPlan(kind, level, numbers)


def key(plan: MathPlan) -> str:
    return f"math {plan.kind} " + " ".join(map(str, plan.numbers))


def write(plan: MathPlan, rng: random.Random) -> Problem:
    question, steps, answer = KINDS[plan.kind][2](plan.numbers)
    close = rng.choice(("The answer is", "So the answer is", "We get"))
    told = " ".join(rng.choice(forms) for _, forms in steps)
    return Problem(
        kind=plan.kind,
        level=plan.level,
        key=key(plan),
        question=question,
        reference=", ".join(equation for equation, _ in steps),
        solution=f"{told} {close} \\boxed{{{answer}}}.",
        answer=answer,
    )


MATH: NanoFamily[MathPlan] = NanoFamily("nano-math", draw, key, write)
