"""What the laboratory adds to `tad`; see `tad.plugins`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
COMMANDS = {"pretrain": "tad_lab.cli:pretrain", "study": "tad_lab.cli:study"}
RECIPE_KEYS = {
    "pretrain": {"data", "optimization"},
    "study": {"stores", "methods", "tables"},
}
REPORTED = {"study.json": "tad_lab.study.report:read_part"}
