"""The examples, run as scripts on tiny models; the plain training loop is held to the trainer's own loss."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny_store import write_world

import tad
from tad.decoding import decode
from tad.models import FAMILIES
from tad.tasks import _FACTORIES, get_task
from tad.training.objectives import OBJECTIVES, LossModule, get_objective
from tad.training.states import read_stores
from tad.trajectories.store import TrajectoryStore

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _names_are_forgotten() -> Iterator[None]:
    """What an example registers is there for it alone."""
    tables: list[dict] = [FAMILIES, OBJECTIVES, _FACTORIES]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def imported(name: str) -> ModuleType:
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 5
    assert all(length < 80 for length in lengths.values()), lengths


def test_an_objective(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "objective", world / "base", world / "train", "--out", tmp_path, "--steps", "2")
    assert tad.load(world / "base", adapter=tmp_path / "adapter", device="cpu").peft is not None


def test_an_unmasking_rule_reveals_more_the_smaller_the_lead_it_asks_for(world: Path) -> None:
    lm, rule = tad.load(world / "base", device="cpu"), imported("unmasking_rule")
    wide, narrow = (decode(lm, [[5, 6, 7]], rule.lead_decoder(lead, 8), 32)[0] for lead in (1.0, 0.0))
    assert wide.forwards == 32  # the surest position of each forward, since nothing is that far ahead
    assert narrow.forwards < 32


def test_an_unmasking_rule_as_a_script(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "unmasking_rule", world / "base", "hello", "--gen-length", "32")
    assert capsys.readouterr().out.count("tokens per forward") == 3


def test_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "family", tmp_path)
    assert "for 32 positions" in capsys.readouterr().out


def test_a_task_and_its_grader(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported("task")
    task = get_task("backwards", size=3)
    example = task.examples()[0]
    assert task.grade(example, f"So. Answer: {example.answer}.").correct
    assert not task.grade(example, "Answer: no").correct
    assert not task.grade(example, "").correct
    run(monkeypatch, "task", world / "base", "--out", tmp_path / "run", "--gen-length", "32")
    assert capsys.readouterr().out.count("tokens per forward") == 8


def test_the_plain_loop_has_the_trainer_s_loss(world: Path) -> None:
    lm, loop = tad.load(world / "base", device="cpu"), imported("training_loop")
    lm.attach(rank=2)
    row = next(iter(TrajectoryStore.open(world / "train").rows()))
    arrays = read_stores([world / "train"])[0]
    objective = get_objective("tad", mask_token=lm.tokens.mask, family=lm.family, window=3, **{"lambda": 0.5})
    batch = objective.collate(objective.views(arrays, 2, None))  # type: ignore[arg-type]
    wanted = LossModule(lm.peft, objective)(batch, objective.counts(batch))
    near, distant = loop.tad_loss(lm, row, 2, 3, weight=0.5)
    torch.testing.assert_close(near, wanted.terms["near"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(near + distant, wanted.total, rtol=1e-4, atol=1e-5)
    assert distant > 0


def test_the_plain_loop_leaves_an_adapter(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "training_loop", world / "base", world / "train", "--out", tmp_path, "--steps", "2")
    assert tad.load(world / "base", adapter=tmp_path, device="cpu").peft is not None
