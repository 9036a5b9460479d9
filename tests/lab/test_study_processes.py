"""Several processes at one study: each cell is made once, and nobody waits for what another one is making."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from run_world import Listener
from study_world import rounds_recipe, study_recipe

from tad.files import claiming
from tad_lab.study import Study
from tad_lab.study.cells import Source

_WORK = """
import sys, yaml
from tad.config import parse_recipe
from tad_lab.study import Study, StudyRecipe
study = Study(parse_recipe(StudyRecipe, yaml.safe_load(open(sys.argv[1]))), sys.argv[2])
print(study.run())
"""


@pytest.mark.parametrize(
    ("make", "whole"), [(study_recipe, "done"), pytest.param(rounds_recipe, "rounds", marks=pytest.mark.slow)]
)
def test_two_processes_share_a_study_and_do_nothing_twice(
    world: Path, tmp_path: Path, make: Callable, whole: str, request: pytest.FixtureRequest
) -> None:
    done = request.getfixturevalue(whole)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(yaml.safe_dump(make(world).model_dump(mode="json"), sort_keys=False))
    words = [sys.executable, "-c", _WORK, str(recipe), str(out)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=300)[0].split()[-1] for process in both] == ["True", "True"]

    def names(folder: Path, kind: str) -> list[str]:
        return sorted(path.name.rpartition("-")[2] for path in (folder / kind).iterdir())

    for kind in ("stores", "students", "answers"):
        assert names(out, kind) == names(done[0], kind)
    trained = [json.loads(path.read_text())["calls"] for path in (out / "students").glob("*/run.json")]
    assert all(len(calls) == 1 for calls in trained)
    for path in (out / "tables").iterdir():
        if path.suffix in (".md", ".csv"):
            assert path.read_text() == (done[0] / "tables" / path.name).read_text()


def test_a_cell_that_another_process_has_taken_is_left_to_it(world: Path, tmp_path: Path) -> None:
    study, watch = Study(study_recipe(world), tmp_path), Listener(stop_after=3)
    cell = study.cell("base", None)
    assert cell is not None
    with study._claim(cell) as mine:
        assert mine
        other = Study(study_recipe(world), tmp_path, watch)
        assert not other.run(["base", "tad"], tables=False)
    assert not (tmp_path / "answers").exists() or not list((tmp_path / "answers").glob("base-*"))
    assert Study(study_recipe(world), tmp_path).run(["base"], tables=False)


def test_a_round_that_another_process_is_making_is_left_to_it(
    world: Path, rounds: tuple[Path, Listener], tmp_path: Path
) -> None:
    study = Study(rounds_recipe(world), tmp_path, watch := Listener(8))
    tmp_path.joinpath("study.json").write_text((rounds[0] / "study.json").read_text())
    first = study.hashes.student(study.cell("ltr/round=1", 0))
    with (
        claiming(tmp_path, f"student-{first}") as mine,
        claiming(tmp_path, f"answers-{study.hashes.answers(study.cell('ltr/round=1', 0))}"),
    ):
        assert mine
        study.run(grade=False, tables=False)
    assert not any("'ltr" in title for title in watch.stages)
    assert any("'whole" in title for title in watch.stages)


def test_while_another_process_collects_a_store_cells_of_other_stores_are_made(
    world: Path, done: tuple[Path, Listener], tmp_path: Path
) -> None:
    tables = {"main": {"methods": ["tad", "plain"]}, "windows": {"methods": ["base"]}}
    study = Study(study_recipe(world, tables=tables), tmp_path, watch := Listener(5))
    tmp_path.joinpath("study.json").write_text((done[0] / "study.json").read_text())
    with claiming(tmp_path, f"store-{study.hashes.store(Source('teacher'))}") as mine:
        assert mine
        assert not study.run(grade=False, tables=False)  # stopped while it waits for the other process
    assert any("'plain" in title for title in watch.stages)
    assert not any("'tad" in title for title in watch.stages)
