"""The fixtures of `eval_world`, and two studies that are done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))

from eval_world import data_dir, lm, no_pictures_of_windows, world  # noqa: F401 - fixtures
from run_world import Listener
from study_world import rounds_recipe, study_recipe

from tad_lab.study import Study


@pytest.fixture(scope="module")
def done(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:  # noqa: F811
    out, watch = tmp_path_factory.mktemp("study"), Listener()
    assert Study(study_recipe(world), out, watch).run()
    return out, watch


@pytest.fixture(scope="module")
def rounds(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:  # noqa: F811
    out, watch = tmp_path_factory.mktemp("rounds"), Listener()
    assert Study(rounds_recipe(world), out, watch).run()
    return out, watch
