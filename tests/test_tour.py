"""The notebook of the docs runs from its first cell to its last, without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[1] / "docs" / "tour.ipynb"


NAMES = ["base, one-by-one", "base, fast-dllm", "10 steps", "bundled"]


def test_the_notebook_is_kept_with_its_results_and_without_warnings() -> None:
    cells = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in cells)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert sum("text/html" in output.get("data", {}) for output in outputs) == 2
    assert [line.split("  ")[0] for line in cells[-1]["outputs"][-1]["text"]] == NAMES


@pytest.mark.slow
def test_the_tour_runs_and_shows_canvases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv(
        "PYTHONPATH", str(TOUR.parents[1] / "src") + os.pathsep + os.environ.get("PYTHONPATH", "")
    )
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [one["data"]["text/html"] for one in outputs if "text/html" in one.get("data", {})]
    assert len(pictures) == 2
    assert "forwards" in pictures[0]
    last = "".join(one["text"] for one in notebook.cells[-1].outputs if one.get("name") == "stdout")
    assert [line.split("  ")[0] for line in last.splitlines()] == NAMES
