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


def normalize(answer: str) -> str:
    """The same string for answers that differ only in spelling: spacing, dollar signs, \\dfrac, a final full stop."""
    answer = answer.strip().strip("$").strip()
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\(?:text|mbox|textrm|mathrm)\s*\{([^{}]*)\}", r"\1", answer)
    answer = _SPACING.sub("", answer)
    return answer.rstrip(".").replace(r"\$", "").replace("^{\\circ}", "").replace("^\\circ", "")
