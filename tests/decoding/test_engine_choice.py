"""Who decides whether CUDA graphs decode: the argument, else the environment, else the default."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tad.decoding import GraphEngine, decode
from tad.errors import TadError

sys.path.insert(0, str(Path(__file__).parent))
from parity_models import tiny, tiny_prompts


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each batch of a graph engine asked for."""
    found: list[int] = []
    inner = GraphEngine.acquire

    def counting(self: GraphEngine, spec, slots, tenant):
        found.append(slots)
        return inner(self, spec, slots, tenant)

    monkeypatch.setattr(GraphEngine, "acquire", counting)
    return found


@pytest.mark.parametrize(
    ("variable", "argument", "used"),
    [(None, None, False), ("graph", None, True), ("graph", "plain", False), (None, "graph", True), ("auto", None, False)],
)  # fmt: skip
def test_the_argument_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    calls: list[int],
    variable: str | None,
    argument: str | None,
    used: bool,
) -> None:
    monkeypatch.delenv("TAD_ENGINE", raising=False)
    if variable is not None:
        monkeypatch.setenv("TAD_ENGINE", variable)
    found = decode(tiny("llada"), tiny_prompts("llada")[:2], "tad", 32, engine=argument)
    assert len(found) == 2
    assert bool(calls) is used


def test_an_engine_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAD_ENGINE", "steam")
    with pytest.raises(TadError, match="one of auto, plain, graph, not 'steam'"):
        decode(tiny("llada"), tiny_prompts("llada")[:1], "tad", 32)
