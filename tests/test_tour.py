"""The notebook of the docs runs from its first cell to its last, without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "docs" / "tour.ipynb"


@pytest.mark.slow
def test_the_tour_runs_and_shows_canvases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv(
        "PYTHONPATH", str(TOUR.parents[1] / "src") + os.pathsep + os.environ.get("PYTHONPATH", "")
    )
    notebook = nbformat.read(TOUR, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # kept without results
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [one["data"]["text/html"] for one in outputs if "text/html" in one.get("data", {})]
    assert len(pictures) == 2
    assert "forwards" in pictures[0]
    last = "".join(one["text"] for one in notebook.cells[-1].outputs if one.get("name") == "stdout")
    assert [line.split("  ")[0] for line in last.splitlines()] == ["base", "20 steps", "bundled"]
