"""Numbers in text: find the one that is the answer, and compare exactly.

Covers signs, thousands separators, decimals, fractions, percent signs, currency and units around the number, and the
usual ways to mark an answer: a LaTeX box, `#### n`, "the answer is n", or simply the last number. Does not do algebra:
`2 + 3` is not 5 here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tad.tasks.latex import last_boxed
from tad.tasks.task import Verdict

# A sign counts unless it follows something it could be subtracted from: "10-12" holds 10 and 12, "(-12)" holds -12.
_SIGN = r"(?:(?<![\w.)\]}%])[-−–]\s?)?"
_CURRENCY = r"(?:\\?[$€£¥]\s?(?P<inner>[-−–])?)?"
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})+(?!\d)|\d+)"
_VALUE = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_LATEX_FRACTION = r"\\[dt]?frac\s*(?:\{\s*(-?[\d.,]+)\s*\}\s*\{\s*(-?[\d.,]+)\s*\}|(\d)\s*(\d))"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN}){_CURRENCY}"
    rf"(?:(?P<whole>\d+)(?:\s+(?=\d+/\d)|\s*(?=\\[dt]?frac)))?"
    rf"(?:(?P<latex>{_LATEX_FRACTION})|(?P<value>{_VALUE})(?:\s*/\s*(?P<below>{_VALUE})(?![\d/]))?)"
)
_ANSWER_IS = re.compile(r"answer\s*(?:is\b|:|=)\s*:?", re.IGNORECASE)
_BULLET = re.compile(r"\n[ \t]*[-−–][ \t]+")  # "- 18 eggs" on a line of its own is an item of a list, not -18
_DECORATION = re.compile(
    r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\^\s*(?:\{[^{}]*\}|\d|\\circ)|\\[,;!: ]"
)


@dataclass(frozen=True)
class FoundNumber:
    value: Fraction
    text: str


def find_numbers(text: str) -> list[FoundNumber]:
    """Every number in a text, left to right."""
    found = []
    for match in _NUMBER.finditer(text):
        value = _read_match(match)
        if value is not None:
            found.append(FoundNumber(value, match.group().strip()))
    return found


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number and perhaps its unit; None if it holds no number or several."""
    plain = _DECORATION.sub(lambda decoration: "" if decoration.group() in (r"\!", r"\,") else " ", text)
    numbers = find_numbers(plain.rsplit("=", 1)[-1]) or find_numbers(plain)
    values = {number.value for number in numbers}
    return values.pop() if len(values) == 1 else None


def extract_number(text: str) -> FoundNumber | None:
    """The answer of a text: its last box if it has one, else `#### n`, else "answer is n", else the last number."""
    boxed = last_boxed(text)
    if boxed is not None:
        value = parse_number(boxed)
        return FoundNumber(value, boxed) if value is not None else None
    if "####" in text:
        numbers = find_numbers(text.rsplit("####", 1)[1])
        return numbers[0] if numbers else None
    for match in reversed(list(_ANSWER_IS.finditer(text))):
        sentence = re.split(r"[.!?](?:\s|$)|\n", text[match.end() :], maxsplit=1)[0]
        if numbers := find_numbers(sentence):
            return numbers[-1] if "=" in sentence else numbers[0]
    numbers = find_numbers(_BULLET.sub("\n", text))
    return numbers[-1] if numbers else None


def grade_number(gold: Fraction, text: str) -> Verdict:
    """Judge a text against a number, exactly: 0.5, 1/2 and .50 are the same, 33.3 and 100/3 are not."""
    found = extract_number(text)
    if found is None:
        boxed = last_boxed(text)
        return Verdict(
            False, "no number found" if boxed is None else "the box does not hold one number", boxed
        )
    if found.value == gold:
        return Verdict(True, "equal", found.text)
    return Verdict(False, f"different; expected {format_number(gold)}", found.text)


def format_number(value: Fraction) -> str:
    """An integer or a terminating decimal where there is one, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = format(value.numerator / value.denominator, ".12g")
    return digits if Fraction(digits) == value else str(value)


def _read_match(match: re.Match[str]) -> Fraction | None:
    try:
        return _read_parts(match)
    except ValueError:  # dots in place of digits, as in \frac{...}{2}, or more digits than Python reads
        return None


def _read_parts(match: re.Match[str]) -> Fraction | None:
    sign = -1 if bool(match["sign"].strip()) != bool(match["inner"]) else 1
    if match["latex"]:
        above, below, digit_above, digit_below = re.fullmatch(_LATEX_FRACTION, match["latex"]).groups()  # type: ignore[union-attr]
        top, bottom = _read_value(above or digit_above), _read_value(below or digit_below)
    else:
        top, bottom = _read_value(match["value"]), _read_value(match["below"] or "1")
    return sign * (int(match["whole"] or 0) + top / bottom) if bottom else None


def _read_value(text: str) -> Fraction:
    return Fraction(re.sub(r"[^\d.\-]", "", text).rstrip("."))
