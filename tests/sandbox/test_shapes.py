"""Wrong programs against tests of every shape: none passes, and the right program passes them all."""

from __future__ import annotations

import random
from itertools import product

import pytest
from wrong_programs import MODULES, PACKAGES, PROGRAMS, RIGHT, SHAPES

from tad_sandbox import Job, Limits, Sandbox

SCRIPTS = [(program, tests, False) for program, tests in product(PROGRAMS, SHAPES)]
# Of the programs that answer for themselves, those that have another effect in a module than in a script.
ANSWERS = (
    "true, member, generator, raises own stop, raises skip, array empty, array half, kind2, updates, loan"
)
CHOSEN = [name for name in PROGRAMS if not name.startswith("answer ")]
CHOSEN += [*(f"answer {name}" for name in ANSWERS.split(", ")), *PACKAGES]
# Numpy compares an empty list with anything and finds no difference: such tests pass a wrong plain value.
WEAK = set(product(("range", "empty list", "answer loan"), ("numpy testing", "numpy all")))
PAIRS = [*SCRIPTS, *((*pair, True) for pair in product(CHOSEN, MODULES) if pair not in WEAK)]
BOXES = {
    module: Sandbox(Limits(seconds=120, cpu_seconds=10, memory=2 << 30), packages=module)
    for module in (False, True)
}


def check(pairs: list[tuple[str, str, bool]]) -> None:
    passed = []
    for module in (False, True):
        chosen = [pair for pair in pairs if pair[2] is module]
        programs, tests = {**PROGRAMS, **PACKAGES}, MODULES if module else SHAPES
        jobs = [Job(programs[program], tests[shape], module) for program, shape, _ in chosen]
        for pair, outcome in zip(chosen, BOXES[module].run_many(jobs), strict=True):
            assert outcome.reason, pair
            assert not outcome.reason.startswith("the judge failed"), (pair, outcome)
            if outcome.passed:
                passed.append(pair)
    assert passed == []


def check_right(shapes: dict[str, str], module: bool) -> None:
    outcomes = BOXES[module].run_many(Job(RIGHT, tests, module) for tests in shapes.values())
    assert [name for name, outcome in zip(shapes, outcomes, strict=True) if not outcome.passed] == []


@pytest.mark.sandbox
def test_the_right_program_passes_some_shapes() -> None:
    check_right(dict(list(SHAPES.items())[::4]), module=False)


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_right_program_passes_every_shape() -> None:
    check_right(SHAPES, module=False)
    check_right(MODULES, module=True)


@pytest.mark.sandbox
def test_no_wrong_program_of_a_sample_passes() -> None:
    check(random.Random(0).sample(SCRIPTS, 20))


@pytest.mark.slow
@pytest.mark.sandbox
def test_no_wrong_program_passes_tests_of_any_shape() -> None:
    check(PAIRS)
