"""Numbers in text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad.tasks.numeric import extract_number, find_numbers, format_number, grade_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 18.", 18),
        ("#### 1,450", 1450),
        ("#### -3", -3),
        ("It costs $1,234.50 in total", "1234.5"),
        ("-$5", -5),
        ("$-5", -5),
        ("−7", -7),
        ("he owes (-12) coins", -12),
        ("10-12", 12),
        ("10 - 12 = -2", -2),
        ("a gain of 5%", 5),
        ("half, so 1/2", "1/2"),
        (".5", "1/2"),
        ("5.", 5),
        ("3 1/2 cups", "7/2"),
        (r"\boxed{-\$1{,}000}", -1000),
        (r"\boxed{12\,345}", 12345),
        (r"\boxed{\frac{-3}{4}}", "-3/4"),
        (r"\boxed{-\dfrac12}", "-1/2"),
        (r"\boxed{3\frac{1}{2}}", "7/2"),
        (r"\boxed{18 \text{ dollars}}", 18),
        (r"\boxed{2\text{ m}^2}", 2),
        (r"\boxed{45^\circ}", 45),
        (r"\boxed{x = 5}", 5),
        (r"\boxed{\$18}", 18),
        (r"\boxed{3} is wrong, it is \boxed{4}, I am 100% sure", 4),
        ("The answer is 5 + 3 = 8 apples. Check: 8 - 3 = 5.", 8),
        ("Answer: 12 apples, not 13 or 14", 12),
        ("first 3, then 4, so 7 apples remain", 7),
    ],
)
def test_the_answer_is_found(text: str, value: int | str) -> None:
    found = extract_number(text)
    assert found is not None
    assert found.value == Fraction(value)


@pytest.mark.parametrize(
    "text", ["", "...", "no number", r"\boxed{}", r"\boxed{5 and 6}", "1/0", r"#### none", "$,."]
)
def test_no_answer_is_found_where_there_is_none_or_more_than_one(text: str) -> None:
    assert extract_number(text) is None
    assert not grade_number(Fraction(5), text).correct


def test_verdicts_say_why() -> None:
    assert grade_number(Fraction(5), "so 5").reason == "equal"
    assert grade_number(Fraction(5), "so 6").reason == "different; expected 5"
    assert grade_number(Fraction(5), "so").reason == "no number found"
    assert grade_number(Fraction(5), r"\boxed{5, 6}").reason == "the box does not hold one number"


def test_equality_is_exact() -> None:
    third = Fraction(100, 3)
    assert not grade_number(third, "33.33").correct
    assert grade_number(third, "100/3").correct
    assert grade_number(Fraction(1, 2), "0.50").correct


@given(
    st.integers(), st.sampled_from(["{}", "#### {}", "The answer is {}.", r"\boxed{{{}}}", "I get {} apples"])
)
def test_integers_survive_any_marking(value: int, marking: str) -> None:
    for written in (str(value), f"{value:,}"):
        assert grade_number(Fraction(value), marking.format(written)).correct
        assert not grade_number(Fraction(value + 1), marking.format(written)).correct
        assert grade_number(Fraction(-value), marking.format(written)).correct == (value == 0)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_decimals_with_currency_and_separators_survive(value: object) -> None:
    gold = Fraction(str(value))
    sign = "-" if gold < 0 else ""
    assert parse_number(f"{sign}${abs(value):,.2f}") == gold  # type: ignore[arg-type]


@given(st.fractions(max_denominator=1000))
def test_a_formatted_number_is_read_back(value: Fraction) -> None:
    assert parse_number(format_number(value)) == value


@given(st.text(alphabet="0123456789.,-$/\\{}frac bx#=", max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    find_numbers(text)
    extract_number(text)


@pytest.mark.parametrize(
    "text", [r"\frac{...}{2}", r"\boxed{\frac{...}{...}}", r"\frac{,}{3}", r"\frac{1.2.3}{4}", "0" * 5000]
)
def test_what_only_looks_like_a_number_is_none(text: str) -> None:
    assert find_numbers(text) == []
    assert not grade_number(Fraction(3), text).correct
    assert grade_number(Fraction(3), f"It is {text}, so \\boxed{{3}}.").correct


def test_the_dash_of_a_list_is_not_a_sign() -> None:
    assert grade_number(Fraction(18), "She has:\n- 3 hens\n - 18 eggs").correct
    assert grade_number(Fraction(-18), "So she has\n-18 eggs").correct
    assert grade_number(Fraction(-18), "- 18").correct
