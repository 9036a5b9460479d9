"""No model test may reach for the network or ask a question."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test reached for the network or for the keyboard")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("builtins.input", refuse)
