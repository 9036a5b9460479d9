"""Finding a program in a text."""

from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from tad.tasks.code import cut_python_fence, fenced_or_all, longest_program, mentioned_names, parse, sanitize


def test_the_first_python_fence_is_cut_out() -> None:
    assert cut_python_fence("Sure:\n```python\nx = 1\n```\nand\n```python\ny = 2\n```") == "x = 1\n"
    assert cut_python_fence("x = 1\n```\nrest") == "x = 1\n"
    assert cut_python_fence("x = 1") == "x = 1"


def test_the_first_fence_of_any_language_is_found() -> None:
    assert fenced_or_all("a\n```\nx = 1\n```\n```python\ny\n```") == "x = 1\n"
    assert fenced_or_all("a\n```py\nx = 1\n") == "x = 1\n"
    assert fenced_or_all("x = 1") == "x = 1"


def test_prose_around_a_program_is_dropped() -> None:
    text = "Here is my solution:\nimport math\ndef f(x):\n\treturn math.sqrt(x)\nIt works because it does."
    assert ast.dump(ast.parse(sanitize(text))) == ast.dump(
        ast.parse("import math\ndef f(x):\n    return math.sqrt(x)")
    )


def test_statements_that_define_nothing_are_dropped() -> None:
    kept = sanitize("X = 3\ndef f():\n    return X\nprint(f())\nassert f() == 4\nwhile True:\n    pass")
    assert "print" not in kept
    assert "assert" not in kept
    assert "while" not in kept
    assert "X = 3" in kept


def test_only_what_the_roots_reach_is_kept() -> None:
    kept = sanitize("def a():\n    return b()\ndef b():\n    return 1\ndef c():\n    return 2", {"a"})
    assert "def a" in kept
    assert "def b" in kept
    assert "def c" not in kept


def test_the_last_definition_counts_but_a_stub_replaces_nothing() -> None:
    twice = "def f():\n    return 1\ndef f():\n    return 2"
    assert "return 2" in sanitize(twice)
    assert "return 1" not in sanitize(twice)
    assert "return 1" in sanitize("def f():\n    return 1\ndef f():\n    'to do'")


def test_generators_and_helpers_that_return_nothing_are_kept() -> None:
    kept = sanitize("def g():\n    yield 1\ndef h(x):\n    x.append(1)\ndef f():\n    return list(g())")
    assert "def g" in kept
    assert "def h" in kept


def test_a_text_without_a_program_gives_nothing() -> None:
    assert sanitize("I cannot do this.") == ""
    assert sanitize("") == ""
    assert sanitize("\x00") == ""


def test_the_names_a_program_uses_are_listed() -> None:
    assert {"c", "encode"} <= mentioned_names("def check(c):\n    assert c(encode('a')) == 'a'")
    assert mentioned_names("not python at all") == set()


@given(
    st.lists(
        st.sampled_from(["x = 1", "def f():", "    return 1", "words here", "", "(", "    y = 2"]), max_size=8
    )
)
def test_the_longest_program_is_the_one_that_trying_everything_finds(lines: list[str]) -> None:
    best, most = "", 0
    for first in range(len(lines)):
        for last in range(first + 1, len(lines) + 1):
            program = "\n".join(lines[first:last])
            filled = sum(bool(line.strip()) for line in lines[first:last])
            if parse(program) is not None and filled > most:
                best, most = program, filled
    assert longest_program(lines) == best


def test_a_sum_of_hundreds_of_terms_is_kept_as_it_stands() -> None:
    body = f"@cache\ndef f(a):\n    return {' + '.join(['a'] * 400)}"
    assert sanitize(f"from functools import cache\n{body}\nprint(f(1))", {"f"}).split("\n", 1)[1] == body
