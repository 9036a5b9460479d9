"""The tiny checkpoints of the parity set, as the decoding tests use them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tad.models import LM

sys.path.insert(0, str(Path(__file__).parents[1] / "decoding"))
from parity_models import tiny, tiny_prompts


@pytest.fixture(params=["llada", "dream"])
def lm(request: pytest.FixtureRequest) -> LM:
    return tiny(request.param)


@pytest.fixture
def plain(lm: LM) -> list[list[int]]:
    return tiny_prompts(lm.source)[:5]


@pytest.fixture
def privileged(plain: list[list[int]]) -> list[list[int]]:
    """The prompt with a made-up reference before it."""
    return [[7, 8, *prompt[::-1][:6], 9, *prompt] for prompt in plain]
