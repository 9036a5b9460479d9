"""Small Python functions from a docstring, levels 1 to 5, with hidden tests.

Kinds: a chain of operations on a number, its inverse, branches, a straight line through two points with the working in
comments, list pipelines, and two kinds whose numbers must be found without any working: a rule to be guessed from
examples, and a chain to be folded into one expression. The plan holds operations as (name, constant); `_OPERATIONS` says what each is in words, as an expression and as a comment. Whether a line gets its comment is
drawn line by line.
Tests are written from the plan on demand: training does not need them.

Programs of one behaviour are one content, whatever their kind, their wording and the examples shown: none that computes the
same as a test program's reference is in the training split.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tad.tasks.nano.problem import NanoFamily, Problem

LEVELS = (1, 2, 3, 4, 5)
_NAMES = ("f", "g", "h", "solve", "run", "compute", "change", "make")

Operation = tuple[str, int]  # name, constant (0 where there is none)
Comment = Callable[[str], list[str]]  # a line of comment, or none: decided line by line

# name -> (largest constant, words, expression)
Table = dict[str, tuple[int, str, str]]
_OPERATIONS: Table = {
    "add": (50, "add {k}", "{x} + {k}"),
    "sub": (50, "subtract {k}", "{x} - {k}"),
    "mul": (12, "multiply by {k}", "{x} * {k}"),
    "mod": (12, "take the remainder by {k}", "{x} % {k}"),
    "div": (9, "divide by {k} rounding down", "{x} // {k}"),
    "abs": (0, "take the absolute value", "abs({x})"),
    "square": (0, "square it", "{x} ** 2"),
    "negate": (0, "change the sign", "-{x}"),
    "upto": (50, "cut it to at most {k}", "min({x}, {k})"),
    "atleast": (50, "raise it to at least {k}", "max({x}, {k})"),
}
_INVERSE = {"add": "sub", "sub": "add", "mul": "div"}

_MAPS: Table = {
    "add": (20, "add {k} to each number", "{x} + {k}"),
    "sub": (20, "subtract {k} from each number", "{x} - {k}"),
    "mul": (9, "multiply each number by {k}", "{x} * {k}"),
    "square": (0, "square each number", "{x} ** 2"),
    "mod": (9, "replace each number by its remainder by {k}", "{x} % {k}"),
}
_FILTERS: Table = {
    "even": (0, "keep the even numbers", "{x} % 2 == 0"),
    "odd": (0, "keep the odd numbers", "{x} % 2 == 1"),
    "above": (40, "keep the numbers above {k}", "{x} > {k}"),
    "below": (40, "keep the numbers below {k}", "{x} < {k}"),
    "multiple": (9, "keep the multiples of {k}", "{x} % {k} == 0"),
    "drop": (20, "remove every {k}", "{x} != {k}"),
}
_LISTS: Table = {
    "reverse": (0, "reverse the list", "{x}[::-1]"),
    "sort": (0, "sort the list", "sorted({x})"),
    "first": (6, "take the first {k} numbers", "{x}[:{k}]"),
    "skip": (6, "skip the first {k} numbers", "{x}[{k}:]"),
}
_ENDS: Table = {
    "sum": (0, "return the sum", "sum({x})"),
    "count": (0, "return how many there are", "len({x})"),
    "largest": (0, "return the largest or 0", "max({x}, default=0)"),
    "smallest": (0, "return the smallest or 0", "min({x}, default=0)"),
}
_STAGES = {**_MAPS, **_FILTERS, **_LISTS, **_ENDS}  # no name occurs twice
_SQUASHING = {"mod", "div", "upto", "atleast"}
_DIVISIBILITY = {"even", "odd", "multiple"}
_COMPARE = {"above": "{x} > {k}", "below": "{x} < {k}", "multiple": "{x} % {k} == 0"}
_COMPARE_WORDS = {"above": "x is above {k}", "below": "x is below {k}", "multiple": "x is a multiple of {k}"}


@dataclass(frozen=True)
class CodePlan:
    kind: str
    level: int
    operations: tuple[Operation, ...]


def _draw_operation(rng: random.Random, table: Table, names: tuple[str, ...] = ()) -> Operation:
    name = rng.choice(names or tuple(table))
    largest = table[name][0]
    return name, rng.randint(2, largest) if largest else 0


def _draw_chain(rng: random.Random, level: int) -> tuple[Operation, ...]:
    """No operation twice in a row (most such pairs are one in disguise), and few that squash: two can leave a constant."""
    chain: list[Operation] = []
    while len(chain) < level:
        operation = _draw_operation(rng, _OPERATIONS)
        seen = {name for name, _ in chain}
        if (chain and operation[0] == chain[-1][0]) or (operation[0] in _SQUASHING and seen & _SQUASHING):
            continue
        chain.append(operation)
    return tuple(chain)


def _draw_inverse(rng: random.Random, level: int) -> tuple[Operation, ...]:
    return tuple(_draw_operation(rng, _OPERATIONS, tuple(_INVERSE)) for _ in range(level - 1))


def _draw_branch(rng: random.Random, level: int) -> tuple[Operation, ...]:
    """Alternately a condition and what to do then; the last entry is what to do otherwise."""
    plan: list[Operation] = []
    for _ in range(level - 1):
        plan.append((rng.choice(tuple(_COMPARE)), rng.randint(2, 30)))
        plan.append(_draw_operation(rng, _OPERATIONS, ("add", "sub", "mul", "mod", "negate")))
    plan.append(_draw_operation(rng, _OPERATIONS, ("add", "sub", "mul", "square")))
    return tuple(plan)


def _draw_line(rng: random.Random, level: int) -> tuple[Operation, ...]:
    """A slope and an offset; level 3 shows f(0) and f(1), level 4 f(0) and another, level 5 two others."""
    slope, offset = rng.randint(2, 19), rng.randint(1, 99)
    low = 0 if level < 5 else rng.randint(1, 9)
    high = 1 if level == 3 else low + rng.randint(2, 9)
    return (("slope", slope), ("offset", offset), ("low", low), ("high", high))


def _draw_guess(rng: random.Random, level: int) -> tuple[Operation, ...]:
    """A rule a * x ** power + b and the two inputs shown; levels 2 to 5 take one number, the other, both, and a square."""
    slope = 1 if level in (2, 5) else rng.randint(2, 19)
    offset = 0 if level == 3 else rng.randint(1, 99)
    low = rng.randint(1, 9)
    return (
        ("slope", slope),
        ("offset", offset),
        ("power", 2 if level == 5 else 1),
        ("low", low),
        ("high", low + rng.randint(1, 9)),
    )


def _draw_fold(rng: random.Random, level: int) -> tuple[Operation, ...]:
    """Sums and products that fold into a * x + b with moderate numbers."""
    while True:
        chain = tuple(_draw_operation(rng, _OPERATIONS, ("add", "sub", "mul")) for _ in range(level))
        a, b = _fold(chain)
        if 1 < a < 100 and 0 < b < 1000:
            return chain


def _fold(chain: tuple[Operation, ...]) -> tuple[int, int]:
    a, b = 1, 0
    for name, k in chain:
        if name == "mul":
            a, b = a * k, b * k
        else:
            b += k if name == "add" else -k
    return a, b


def _draw_pipeline(rng: random.Random, level: int) -> tuple[Operation, ...]:
    """`level` stages, of which the last may be a summary. At most one divisibility test: two often leave nothing."""
    stages: list[Operation] = []
    while len(stages) < level:
        stage = _draw_operation(rng, rng.choice((_MAPS, _FILTERS, _LISTS)))
        seen = {name for name, _ in stages}
        if stage[0] not in seen and not (stage[0] in _DIVISIBILITY and seen & _DIVISIBILITY):
            stages.append(stage)
    if rng.random() < 0.6:
        stages[-1] = _draw_operation(rng, _ENDS)
    return tuple(stages)


def key(plan: CodePlan) -> str:
    return f"code {plan.kind} " + " ".join(f"{name}-{k}" for name, k in plan.operations)


# Inputs on which two programs of this family that differ do differ: below zero, around every constant, and far away.
_NUMBERS = (*range(-25, 66), 97, 100, 1009)
_NUMBER_LISTS = (
    (*range(-12, 64),),
    (*range(63, -13, -1),),
    (17, -4, 30, 8, 8, 51, 3, 26, 0, 12, 45, 9, 33),
    (40, 2, 19, 60, 7, -9, 15, 28, 5, 36, 54, 11),
    (14, 6, 21, 10, 35, 24, 1, 49, 18, 32),
    (5,),
    (),
)


def _nothing(line: str) -> list[str]:
    return []


@functools.lru_cache(maxsize=4096)
def _behave(argument: str, terse: str) -> str:
    # Written by this module: it is not a model's text.
    solve = eval(f"lambda {argument}: {terse.removeprefix('return ')}", {})
    if argument == "x":
        return " ".join(str(solve(x)) for x in _NUMBERS)
    return " ".join(str(solve(list(xs))) for xs in _NUMBER_LISTS)


def behaviour(plan: CodePlan) -> str:
    """What the reference computes, as its results on fixed inputs: equal for programs that compute the same."""
    argument, _, _, terse = KINDS[plan.kind][2](plan, _nothing)
    return f"code {argument} {_behave(argument, terse)}"


def _words(table: Table, operation: Operation) -> str:
    return table[operation[0]][1].format(k=operation[1])


def _expression(table: Table, operation: Operation, x: str) -> str:
    return table[operation[0]][2].format(x=x, k=operation[1])


def _join(parts: list[str]) -> str:
    """'A, then b, then c.' with a capital."""
    text = ", then ".join(parts)
    return text[0].upper() + text[1:] + "."


def _assign_all(operations: list[Operation], comment: Comment, inverse: bool = False) -> list[str]:
    lines = []
    for i, operation in enumerate(operations):
        said = _words(_OPERATIONS, operation)
        if inverse and operation[0] == "div":
            said = f"divide by {operation[1]}"
        lines += [
            *comment(f"    # {said}"),
            f"    y = {_expression(_OPERATIONS, operation, 'y' if i else 'x')}",
        ]
    return [*lines, "    return y"]


def _nest(operations: list[Operation]) -> str:
    """One expression for a chain, with the brackets it needs."""
    text, atomic = "x", True
    for operation in operations:
        call = _expression(_OPERATIONS, operation, "x").endswith(")")
        text = _expression(_OPERATIONS, operation, text if atomic or call else f"({text})")
        atomic = call
    return text


Code = tuple[str, str, list[str], str]  # the argument, what the docstring says, the body, the terse body


def _write_chain(plan: CodePlan, comment: Comment) -> Code:
    operations = list(plan.operations)
    doc = _join([_words(_OPERATIONS, operation) for operation in operations])
    return "x", doc, _assign_all(operations, comment), f"return {_nest(operations)}"


def _write_inverse(plan: CodePlan, comment: Comment) -> Code:
    forward = _nest(list(plan.operations))
    back = [(_INVERSE[name], k) for name, k in reversed(plan.operations)]
    doc = f"Find the number y for which {forward.replace('x', 'y')} is x."
    return "x", doc, _assign_all(back, comment, inverse=True), f"return {_nest(back)}"


def _write_branch(plan: CodePlan, comment: Comment) -> Code:
    steps = plan.operations
    words, lines, terse = [], [], ""
    for (test, bound), then in zip(steps[:-1:2], steps[1::2], strict=True):
        said = _COMPARE_WORDS[test].format(k=bound)
        words.append(f"if {said} {_words(_OPERATIONS, then)}")
        condition = _COMPARE[test].format(x="x", k=bound)
        value = _expression(_OPERATIONS, then, "x")
        lines += [*comment(f"    # {said}"), f"    if {condition}:", f"        return {value}"]
        terse += f"{value} if {condition} else "
    words.append(f"otherwise {_words(_OPERATIONS, steps[-1])}")
    value = _expression(_OPERATIONS, steps[-1], "x")
    text = ", ".join(words)
    lines += [*comment("    # otherwise"), f"    return {value}"]
    return "x", text[0].upper() + text[1:] + ".", lines, f"return {terse}{value}"


def _write_line(plan: CodePlan, comment: Comment) -> Code:
    numbers = dict(plan.operations)
    a, b, low, high = numbers["slope"], numbers["offset"], numbers["low"], numbers["high"]
    at_low, at_high = a * low + b, a * high + b
    doc = f"A straight line through {low}, {at_low} and {high}, {at_high}."
    rise, run = at_high - at_low, high - low
    lines = [f"    # rise {at_high} - {at_low} = {rise}"]
    if run > 1:
        run_text = f" over {high} - {low} = {run}" if low else f" over {run}"
        lines[0] += run_text
        lines.append(f"    # slope {rise} / {run} = {a}")
    lines.append(f"    slope = {a}")
    if low:
        lines.append(f"    # start {at_low} - {a} * {low} = {at_low} - {a * low} = {b}")
    lines += [f"    start = {b}", "    return slope * x + start"]
    return "x", doc, lines, f"return {a} * x + {b}"


def _write_guess(plan: CodePlan, comment: Comment) -> Code:
    numbers = dict(plan.operations)
    a, b, power = numbers["slope"], numbers["offset"], numbers["power"]
    shown = [f"{x} gives {a * x**power + b}" for x in (numbers["low"], numbers["high"])]
    rule = "x ** 2" if power == 2 else "x" if a == 1 else f"{a} * x"
    body = [f"    y = {rule}", f"    return y + {b}"] if b else [f"    y = {rule}", "    return y"]
    kind = "The square plus a number" if power == 2 else "A rule"
    return "x", f"{kind}: {' and '.join(shown)}.", body, f"return {rule} + {b}" if b else f"return {rule}"


def _write_fold(plan: CodePlan, comment: Comment) -> Code:
    a, b = _fold(plan.operations)
    words = ", then ".join(_words(_OPERATIONS, operation) for operation in plan.operations)
    return "x", f"In one line: {words}.", [f"    return {a} * x + {b}"], f"return {a} * x + {b}"


def _write_pipeline(plan: CodePlan, comment: Comment) -> Code:
    words, lines, terse = [], [], "xs"
    end = "xs"
    for operation in plan.operations:
        words.append(_words(_STAGES, operation))
        if operation[0] in _ENDS:
            end, terse = (_expression(_ENDS, operation, x) for x in ("xs", terse))
            continue
        if operation[0] in _LISTS:
            value, terse = (_expression(_LISTS, operation, x) for x in ("xs", terse))
        else:
            item = _expression(_STAGES, operation, "x")
            form = "[{0} for x in {1}]" if operation[0] in _MAPS else "[x for x in {1} if {0}]"
            value, terse = form.format(item, "xs"), form.format(item, terse)
        lines += [*comment(f"    # {words[-1]}"), f"    xs = {value}"]
    if not words[-1].startswith("return"):
        words.append("return the list")
    return "xs", _join(words), [*lines, f"    return {end}"], f"return {terse}"


# kind -> (levels, draw, write); a level is drawn first, then one of its kinds.
KINDS: dict[
    str,
    tuple[
        tuple[int, ...],
        Callable[[random.Random, int], tuple[Operation, ...]],
        Callable[[CodePlan, Comment], Code],
    ],
] = {
    "chain": ((1, 2, 3, 4, 5), _draw_chain, _write_chain),
    "inverse": ((2, 3, 4, 5), _draw_inverse, _write_inverse),
    "branch": ((2, 3), _draw_branch, _write_branch),
    "line": ((3, 4, 5), _draw_line, _write_line),
    "guess": ((2, 3, 4, 5), _draw_guess, _write_guess),
    "fold": ((2, 3, 4, 5), _draw_fold, _write_fold),
    "pipeline": ((1, 2, 3, 4, 5), _draw_pipeline, _write_pipeline),
}
_TWICE = ("fold", "guess")  # drawn twice as often as the others
_OF_LEVEL = {level: tuple(kind for kind in (*KINDS, *_TWICE) if level in KINDS[kind][0]) for level in LEVELS}


def draw(rng: random.Random) -> CodePlan:
    level = rng.choice(LEVELS)
    kind = rng.choice(_OF_LEVEL[level])
    return CodePlan(kind, level, KINDS[kind][1](rng, level))


def write(plan: CodePlan, rng: random.Random) -> Problem:
    name = rng.choice(_NAMES)
    share = 0.0 if plan.kind == "pipeline" and plan.level > 3 else 0.4  # none in the longest, to stay short

    def comment(line: str) -> list[str]:
        return [line] if rng.random() < share else []

    argument, doc, body, terse = KINDS[plan.kind][2](plan, comment)
    if rng.random() < 0.5:
        question = f'Complete the function.\ndef {name}({argument}):\n    """{doc}"""'
    else:
        question = f"Write a function {name}({argument}). {doc}"
    return Problem(
        kind=plan.kind,
        level=plan.level,
        key=key(plan),
        content=behaviour(plan),
        question=question,
        reference=terse,
        solution="\n".join([f"def {name}({argument}):", *body]),
        answer=name,
    )


def hidden_tests(problem: Problem) -> str:
    """Assertions on inputs drawn from the problem's content; expected values come from the reference."""
    rng = random.Random(problem.key)
    argument = "xs" if problem.kind == "pipeline" else "x"
    # The reference is written by this module: it is not a model's text.
    solve = eval(f"lambda {argument}: {problem.reference.removeprefix('return ')}", {})
    lines = []
    for value in _inputs(problem, rng):
        lines.append(f"assert {problem.answer}({value!r}) == {solve(value)!r}")
    return "\n".join(lines)


def _inputs(problem: Problem, rng: random.Random) -> list[Any]:
    if problem.kind == "pipeline":
        lists = [[rng.randint(-10, 60) for _ in range(rng.randint(3, 12))] for _ in range(8)]
        return [[], *lists, list(range(0, 60, 3))]
    constants = [int(part.rpartition("-")[2]) for part in problem.key.split()[2:]]
    values = [*range(-3, 40), *(k + d for k in constants for d in (-1, 0, 1)), rng.randint(41, 99)]
    if problem.kind != "inverse":
        return sorted(set(values))
    forward = problem.key.split()[2:]
    return sorted({_apply_forward(forward, y) for y in range(12)})


def _apply_forward(parts: list[str], y: int) -> int:
    for part in parts:
        name, _, k = part.partition("-")
        y = {"add": y + int(k), "sub": y - int(k), "mul": y * int(k)}[name]
    return y


CODE: NanoFamily[CodePlan] = NanoFamily("nano-code", draw, behaviour, write, edition=2, mix=LEVELS)
