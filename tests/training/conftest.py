"""One tiny world and one uninterrupted run in it, for all tests of training. They only read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_store import recipe, write_world

from tad.training.distill import distill


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def run(world: Path) -> Path:
    """Six steps, with all checkpoints kept."""
    distill(recipe(world), world / "whole", quiet=True)
    return world / "whole"
