"""The one exception a user is meant to read.

Raise it where the cause is known, with a single line that names the file or field and the fix. The command line
prints that line and exits with code 2; a library caller can catch it. Programming errors stay what they are.
"""

from __future__ import annotations

import sys
from pathlib import Path


def printable(text: str) -> str:
    """A line for a terminal: what would move its cursor or change its colours is written out."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class TadError(Exception):
    """Bad input or an unusable environment: the message says what is wrong and what to do."""


class MissingExtraError(TadError):
    """A package that only an extra of this one brings is not installed."""

    def __init__(self, what: str, *extras: str) -> None:
        clone = Path(__file__).parents[2]
        if not (clone / "pyproject.toml").is_file():
            super().__init__(
                f"{what} is not installed; install tad again with its extra [{','.join(extras)}]"
            )
            return
        place = "." if clone == Path.cwd() else str(clone)
        pip = f"{Path(sys.executable)} -m pip"
        super().__init__(f'{what} is not installed: {pip} install -e "{place}[{",".join(extras)}]"')
