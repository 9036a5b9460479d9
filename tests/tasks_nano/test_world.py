"""The nano world: disjoint splits, exact solutions, and problems that depend on nothing but their index."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tad.tasks import get_task
from tad.tasks.nano import SPLITS, WORLD, Problem, hidden_tests, split_of

FAMILIES = sorted(WORLD)
EQUATION = re.compile(r"(?<![+*/-] )(?<![\w.)])([\d(][\d ()+*/%-]*) = (\d+)(?!\d|x)")


def problems(name: str, split: str, count: int) -> list:
    return [WORLD[name].problem(split, index) for index in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_problem_is_a_function_of_its_index(name: str) -> None:
    assert problems(name, "test", 50) == problems(name, "test", 50)
    assert WORLD[name].problem("test", 7) != WORLD[name].problem("test", 7, seed=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_problem_lies_in_the_split_it_was_asked_for(name: str) -> None:
    for split in SPLITS:
        assert {split_of(problem.content) for problem in problems(name, split, 300)} == {split}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_test_question_occurs_in_a_sample_of_the_training_split(name: str) -> None:
    questions = {problem.question for problem in problems(name, "test", 1024)}
    contents = {problem.content for problem in problems(name, "test", 1024)}
    for problem in problems(name, "train", 10_000):
        assert problem.question not in questions
        assert problem.content not in contents


def test_no_training_program_computes_what_a_test_program_computes() -> None:
    """By running the solutions, the verbose texts that models learn, on numbers near the constants and on short lists."""
    rng = random.Random(5)
    inputs: dict[str, list] = {
        "x": [*range(-99, 600), 1009],
        "xs": [[rng.randint(-12, 64) for _ in range(rng.randint(1, 14))] for _ in range(150)],
    }

    def results(problem: Problem) -> str:
        names: dict = {}
        exec(problem.solution, names)
        argument = "xs" if problem.kind == "pipeline" else "x"
        return f"{argument} {[names[problem.answer](value) for value in inputs[argument]]}"

    held_out = {results(problem) for problem in problems("nano-code", "test", 1024)}
    assert len(held_out) > 300
    assert not held_out & {results(problem) for problem in problems("nano-code", "train", 5_000)}


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["test", "validation"]), st.integers(1, 300))
def test_a_sample_of_programs_has_the_same_mix_of_levels_at_any_size(split: str, size: int) -> None:
    levels = [int(example.level or 0) for example in get_task("nano-code", size=size).examples(split)]
    counts = [levels.count(level) for level in range(1, 6)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.slow
def test_no_test_problem_occurs_in_a_million_training_examples() -> None:
    for name in FAMILIES:
        held_out = problems(name, "test", 4096) + problems(name, "validation", 1024)
        questions = {problem.question for problem in held_out}
        contents = {problem.content for problem in held_out}
        for index in range(340_000):
            problem = WORLD[name].problem("train", index)
            assert problem.question not in questions
            assert problem.content not in contents


@pytest.mark.parametrize("name", FAMILIES)
def test_the_test_split_has_every_level_and_hardly_any_repeats(name: str) -> None:
    sample = problems(name, "test", 1024)
    counts = {level: sum(problem.level == level for problem in sample) for level in range(1, 6)}
    assert min(counts.values()) > 100
    deep = [problem.question for problem in sample if problem.level >= 3]
    assert len(set(deep)) > 0.9 * len(deep)


@pytest.mark.parametrize("name", ["nano-word", "nano-math"])
def test_every_equation_in_a_solution_holds_and_numbers_stay_small(name: str) -> None:
    seen = 0
    for problem in problems(name, "train", 3000):
        for left, right in EQUATION.findall(problem.solution):
            assert eval(left) == int(right), problem.solution
            seen += 1
        numbers = [int(n) for n in re.findall(r"\d+", problem.question + problem.solution)]
        largest = {1: 199, 2: 499 if name == "nano-word" else 199}.get(problem.level, 999)
        assert max(numbers) <= largest, problem
        assert 0 <= problem.answer <= largest
    assert seen > 3000


def test_every_word_problem_ends_with_its_answer() -> None:
    for problem in problems("nano-word", "train", 500):
        assert problem.solution.endswith(f"\n#### {problem.answer}")
        assert re.search(rf"= {problem.answer}[ .]", problem.solution)


def test_the_answer_of_every_equation_solves_it() -> None:
    """Substitute the answer back: an independent check of the worked steps."""
    checked = 0
    for problem in problems("nano-math", "train", 3000):
        if problem.kind not in ("shift", "linear", "two-sided", "bracket", "brackets"):
            continue
        equation = problem.question.removeprefix("Solve ").removesuffix(".")
        spelled = re.sub(r"(\d)(x|\()", r"\1*\2", equation).replace(" = ", " == ")
        assert eval(spelled, {"x": problem.answer}), problem
        checked += 1
    assert checked > 500


def test_the_answer_of_every_system_solves_it() -> None:
    checked = 0
    for problem in problems("nano-math", "train", 3000):
        if problem.kind not in ("sum-difference", "multiple", "substitute"):
            continue
        first, second = problem.question.removesuffix(". Find y.").split(" and ")
        spelled = [re.sub(r"(\d)x", r"\1*x", part).replace(" = ", " == ") for part in (first, second)]
        y = problem.answer
        assert any(all(eval(s, {"x": x, "y": y}) for s in spelled) for x in range(1000)), problem
        checked += 1
    assert checked > 200


def test_every_solution_in_code_passes_its_hidden_tests_and_a_wrong_one_fails() -> None:
    failed = 0
    sample = problems("nano-code", "train", 600)
    for problem, other in itertools.pairwise(sample):
        exec(f"{problem.solution}\n{hidden_tests(problem)}", {})
        wrong = re.sub(r"def \w+\(", f"def {problem.answer}(", other.solution)
        try:
            exec(f"{wrong}\n{hidden_tests(problem)}", {})
        except Exception:
            failed += 1
    assert failed > 0.97 * (len(sample) - 1)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FAMILIES), st.sampled_from(SPLITS), st.integers(0, 10**9), st.integers(0, 5))
def test_any_index_of_any_split_gives_a_problem(name: str, split: str, index: int, seed: int) -> None:
    problem = WORLD[name].problem(split, index, seed)
    assert split_of(problem.content) == split
    assert problem.question
    assert problem.solution
    assert problem.reference
    assert 1 <= problem.level <= 5
