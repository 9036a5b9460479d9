"""The verdict is the tests': wrong programs that attack it fail, right ones of every style pass.

The programs are in programs/forged.txt and programs/honest.txt. Those marked `packages` run with the installed packages,
so that their tests have pytest; those marked `together` have tests that ask for more than values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tad_sandbox import Job, Limits, Sandbox

PROGRAMS = Path(__file__).parent / "programs"


class Case(NamedTuple):
    name: str
    job: Job
    packages: bool
    together: bool


def read_cases(name: str) -> list[Case]:
    cases = []
    for part in re.split(r"^=== ", (PROGRAMS / name).read_text(), flags=re.MULTILINE)[1:]:
        head, _, rest = part.partition("\n")
        program, _, tests = rest.partition("\n---\n")
        title, _, flags = head.partition(" [")
        cases.append(
            Case(
                title,
                Job(program, tests.strip(), "module" in flags, ("sum",) * ("sum" in flags)),
                "packages" in flags,
                "together" in flags,
            )
        )
    return cases


def name_of(case: Case) -> str:
    return case.name


FORGED, HONEST = read_cases("forged.txt"), read_cases("honest.txt")
BOXES = {
    packages: Sandbox(Limits(seconds=120, memory=2 << 30), packages=packages) for packages in (False, True)
}
TOGETHER = {
    packages: Sandbox(Limits(seconds=120, memory=2 << 30), packages=packages, together=True)
    for packages in (False, True)
}


@pytest.mark.sandbox
@pytest.mark.parametrize("case", FORGED, ids=name_of)
def test_a_forged_verdict_is_not_believed(case: Case) -> None:
    outcome = BOXES[case.packages].run_job(case.job)
    assert not outcome.passed, outcome
    assert outcome.reason not in ("time limit", "tests: SyntaxError"), outcome


@pytest.mark.sandbox
@pytest.mark.parametrize("case", HONEST, ids=name_of)
def test_an_honest_program_passes(case: Case) -> None:
    outcome = BOXES[case.packages].run_job(case.job)
    assert outcome.verdict == ("cannot judge" if case.together else "passed"), outcome
    assert not outcome.together


@pytest.mark.sandbox
@pytest.mark.parametrize("case", [case for case in HONEST if case.together], ids=name_of)
def test_what_cannot_be_judged_apart_passes_in_one_process_and_says_so(case: Case) -> None:
    outcome = TOGETHER[case.packages].run_job(case.job)
    assert (outcome.verdict, outcome.together) == ("passed", True), outcome


def test_every_case_was_read() -> None:
    assert len(FORGED) > 60
    assert len(HONEST) > 50
    assert all(case.job.program.strip() and case.job.tests.strip() for case in (*FORGED, *HONEST))


@pytest.mark.sandbox
def test_the_forged_ones_fail_for_what_they_are() -> None:
    """The same tests pass with a right function: it is not the tests that cannot be passed."""
    right = "def f(x):\n    return x * x\n"
    plain = [case for case in FORGED if case.job.tests == "assert f(3) == 9"]
    assert len(plain) > 5
    assert all(BOXES[False].run(right, case.job.tests).passed for case in plain)
