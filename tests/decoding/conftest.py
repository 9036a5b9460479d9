"""Fixtures for the decoding tests: each runs for both families."""

from __future__ import annotations

import pytest
from parity_models import tiny, tiny_prompts

from tad.models import LM


@pytest.fixture(params=["llada", "dream"])
def lm(request: pytest.FixtureRequest) -> LM:
    return tiny(request.param)


@pytest.fixture
def prompts(lm: LM) -> list[list[int]]:
    return tiny_prompts(lm.source)
