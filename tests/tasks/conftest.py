"""Where these tests find benchmark data; without it they skip and say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real benchmark data: TAD_DATA, else a directory next to the repository."""
    chosen = os.environ.get("TAD_DATA")
    directory = Path(chosen) if chosen else REPOSITORY.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip("needs the benchmark data: set TAD_DATA to a directory that holds it")
    return directory


@pytest.fixture(autouse=True)
def _no_data_from_the_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests name their data; none finds some by accident."""
    if "data_dir" in request.fixturenames:
        request.getfixturevalue("data_dir")
    monkeypatch.delenv("TAD_DATA", raising=False)
