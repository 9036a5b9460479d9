"""What tests change around a call, and the program should see: captured streams, prepared input, environment, directory."""

from __future__ import annotations

import builtins
import os
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from typing import Any

INPUT = builtins.input


def _environment() -> dict[Any, Any]:
    """As it is stored: decoding it for every call would take longer than most calls."""
    return dict(os.environ._data)  # type: ignore[attr-defined]


class Watched:
    """The tests' side: what has changed since the last call, or is no longer the process's own."""

    def __init__(self) -> None:
        self.environment, self.place = _environment(), os.getcwd()

    def changes(self) -> dict[str, Any]:
        listening = [
            name for name in ("stdout", "stderr") if getattr(sys, name) is not getattr(sys, f"__{name}__")
        ]
        changed: dict[str, Any] = {"streams": listening} if listening else {}
        if builtins.input is not INPUT:
            changed["input"] = builtins.input
        if sys.stdin is not sys.__stdin__:
            changed["stdin"] = sys.stdin
        if "warnings" in sys.modules:
            changed["warnings"] = True
        if (environment := _environment()) != self.environment:
            self.environment = environment
            changed["environ"] = dict(os.environ)
        if (place := os.getcwd()) != self.place:
            changed["place"] = self.place = place
        return changed


class Surroundings:
    """What the tests changed around a call, changed here too while it lasts."""

    def __init__(self, changed: dict[str, Any]) -> None:
        self.changed = changed
        self.printed: list[str] = []
        self.warned: list[tuple[type, str]] = []
        self.before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Surroundings:
        for name, value in self.changed.items():
            if name == "environ":
                os.environ.clear()
                os.environ.update(value)
            elif name == "place":
                os.chdir(value)
            elif name == "warnings":
                import warnings

                self.set(
                    warnings, "showwarning", lambda text, kind, *_: self.warned.append((kind, str(text)))
                )
                warnings.simplefilter("always")
            elif name == "streams":
                for stream in value:
                    self.set(sys, stream, __import__("io").StringIO())
            else:
                self.set(builtins if name == "input" else sys, name, value)
        return self

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for name in self.changed.get("streams", ()):
            self.printed.append(getattr(sys, name).getvalue())
        for owner, name, value in self.before:
            setattr(owner, name, value)
