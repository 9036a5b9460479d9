"""LaTeX answers as strings: find the box, take the decoration off. No algebra here."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SPACING = re.compile(r"\\(?:[,;:!>]|quad|qquad|left|right|displaystyle)(?![a-zA-Z])|\\ |[\s~]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} (or `\boxed x`, as some solutions write it); None if there is none."""
    for match in reversed(list(_BOX.finditer(text))):
        content = _read_group(text, match.end())
        if content is not None:
            return content.strip()
    return None


def _read_group(text: str, start: int) -> str | None:
    if start >= len(text):
        return None
    if text[start] != "{":
        return re.split(r"[\s$.,]", text[start:], maxsplit=1)[0] or None
    depth = 0
    for at in range(start, len(text)):
        if text[at] in "{}" and (text[at - 1] != "\\" or text[at - 2 : at] == "\\\\"):
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start + 1 : at]
    return None


def tidy(answer: str) -> str:
    """An answer that parsers read better, with the same meaning: whole arguments of \frac, no final full stop."""
    answer = " ".join(answer.split()).strip("$ ")
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    token = r"\s*(\\[a-zA-Z]+|[0-9a-zA-Z])"
    answer = re.sub(rf"\\frac{token}{token}", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\s*\\!\s*", "", answer)
    return answer.rstrip("$. ")


def normalize(answer: str) -> str:
    """One string for all spellings of an answer that differ only in spacing, units of degree and text markup."""
    answer = re.sub(r"\\(?:text|mbox|textrm|mathrm)\s*\{([^{}]*)\}", r"\1", tidy(answer))
    answer = _SPACING.sub("", answer)
    return answer.replace(r"\$", "").replace("^{\\circ}", "").replace("^\\circ", "")


def number_base(answer: str) -> str | None:
    """The base an answer is written in, as in 2516_8 or 101_{two}; None if it names none."""
    match = re.search(r"[0-9A-Za-z]\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*(\w+)[\s}]*|(\w+))\s*$", tidy(answer))
    return next(group for group in match.groups() if group) if match else None
