"""Trajectories that are graded later: the store becomes what a graded collection writes, and nothing uses it before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from collect_world import EXAMPLES, content, run
from typer.testing import CliRunner

from tad.cli import app
from tad.errors import TadError
from tad.models import load
from tad.tasks import Verdict, jsonl
from tad.training.states import read_stores
from tad.trajectories import store as store_module
from tad.trajectories.grading import count_verdicts, grade_store
from tad.trajectories.jsonl_format import export_rows
from tad.trajectories.store import ShardStats, TrajectoryStore
from tad.trajectories.summary import describe_store, summarise
from tad.trajectories.window import measure_window
from tad_sandbox import bwrap


def mixed(world: Path, half_known: Path, out: Path, graded: object, **changes: object) -> TrajectoryStore:
    """Two tasks without the reference, some of either right, in shards that have both; one task is graded or will be."""
    known = [json.loads(line) for line in half_known.read_text().splitlines()]
    for name in ("now", "then"):
        lines = [json.dumps({**line, "id": f"{name}-{i}"}) for i, line in enumerate(known)]
        (world / f"{name}.jsonl").write_text("\n".join(lines[: 7 if name == "now" else None]))
    tasks = [
        {"name": f"jsonl:{world / 'then.jsonl'}", "graded": graded},
        {"name": f"jsonl:{world / 'now.jsonl'}"},
    ]
    usual = {"order": "left-to-right", "privileged": False, "keep": "correct", "shard_size": 5}
    return run(world, out, tasks=tasks, **{**usual, **changes})


def files(store: TrajectoryStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("keep", ["correct", "all"])
def test_a_store_that_is_graded_later_becomes_what_a_graded_collection_writes(
    world: Path, half_known: Path, tmp_path: Path, keep: str
) -> None:
    graded = mixed(world, half_known, tmp_path / "graded", True, keep=keep)
    later = mixed(world, half_known, tmp_path / "later", "later", keep=keep)
    before, right = summarise(later), summarise(graded)
    assert (before.pending, before.attempted, before.graded) == (EXAMPLES, EXAMPLES + 7, 7)
    assert 0 < right.correct < right.attempted
    assert files(later) != files(graded)
    words = ["regrade", str(later.folder), "--model", str(world / "llada")]
    told = CliRunner().invoke(app, words, catch_exceptions=False)
    assert f"{right.kept} trajectories of {right.attempted} rollouts" in told.output
    assert files(later) == files(graded)
    assert CliRunner().invoke(app, words).exit_code == 0  # nothing is left to grade
    assert files(later) == files(graded)


def test_grading_that_is_killed_anywhere_loses_nothing_and_comes_to_the_same_store(
    world: Path, half_known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded = mixed(world, half_known, tmp_path / "graded", True)
    later = mixed(world, half_known, tmp_path / "later", "later")
    lm, write_whole = load(world / "llada", weights=False), store_module.write_whole
    steps = 0
    while len(later.pending()) > 0:
        left = iter(range(steps % 3))  # a shard takes three writes

        def write(path: Path, content: bytes, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            write_whole(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(store_module, "write_whole", write)
            with pytest.raises(KeyboardInterrupt):
                list(grade_store(later, lm))
        assert later.missing() == []
        assert {row.id for row in graded.rows()} <= {row.id for row in later.rows()}
        steps += 1
    assert steps > 3
    assert content(later) == content(graded)
    assert summarise(later) == summarise(graded)


@pytest.mark.sandbox
def test_programs_are_not_graded_without_a_sandbox_and_wait(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_text(json.dumps({"question": "q", "reference": "r", "tests": "assert f(1) == 1"}) + "\n")
    task = {"name": f"jsonl:{path}", "graded": "later"}
    with monkeypatch.context() as patch:
        patch.setattr(bwrap, "SYSTEM_PATH", "")
        store = run(world, tmp_path / "store", tasks=[task])
        lm = load(world / "llada", device="cpu")
        before = files(store)
        with pytest.raises(TadError, match="bubblewrap"):
            list(grade_store(store, lm))
    assert store.pending() == [0]
    for use in (
        lambda: measure_window(lm, store),
        lambda: read_stores([store.folder]),
        lambda: list(export_rows(lm, store)),
    ):
        with pytest.raises(TadError, match=f"{store.folder}: 1 rollouts wait"):
            use()
    assert files(store) == before
    assert [stats.by_task for _, stats in grade_store(store, lm)] == [{"jsonl": [1, 0]}]


@pytest.mark.sandbox
def test_programs_that_tests_judge_only_together_are_kept_only_where_the_recipe_says_together(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_text(json.dumps({"question": "q", "reference": "r", "tests": "assert f() == 1"}) + "\n")
    program = "class Equal:\n    def __eq__(self, other): return True\n\ndef f(): return Equal()"
    monkeypatch.setattr(jsonl, "fenced_or_all", lambda _text: program)
    kept = {}
    for judge in ({}, {"judge": "apart"}, {"judge": "together"}):
        task = {"name": f"jsonl:{path}", "options": judge}
        store = run(world, tmp_path / f"store {judge}", tasks=[task], keep="correct")
        summary = summarise(store)
        kept[judge.get("judge")] = [row.reason for row in store.rows()]
        assert (summary.attempted, summary.unjudged) == (1, int(judge != {"judge": "together"}))
        lines = list(describe_store(store))
        assert any("1 rollouts cannot be judged" in line for line in lines) == (summary.unjudged == 1)
    assert kept[None] == kept["apart"] == []
    assert "(judge: together)" in kept["together"][0]


def test_rollouts_that_cannot_be_judged_are_counted_however_many_other_reasons_there_are() -> None:
    verdicts = [
        Verdict(False, f"reason {chr(97 + n // 26)}{chr(97 + n % 26)}") for n in range(40) for _ in range(3)
    ]
    verdicts += [
        Verdict(False, "cannot judge: compares a handle"),
        Verdict(False, "cannot judge: adds to a handle"),
    ]
    stats = ShardStats(len(verdicts), 0, 0, {}, 8, 0, {})
    found = count_verdicts(stats, [("task", verdict) for verdict in verdicts])
    assert found.reasons["cannot judge"] == 2
    assert len(found.reasons) == 20


def test_a_store_is_graded_with_its_own_tokenizer_and_data(
    world: Path, half_known: Path, tmp_path: Path
) -> None:
    store = mixed(world, half_known, tmp_path / "store", "later")
    with pytest.raises(TadError, match=f"{store.folder}: .*tokenizer"):
        list(grade_store(store, load("nano-llada", weights=False)))
    (world / "then.jsonl").write_text(json.dumps({"question": "other", "answer": "1", "id": "then-0"}) + "\n")
    with pytest.raises(TadError, match=f"{store.folder}: example .*--data-dir"):
        list(grade_store(store, load(world / "llada", weights=False)))
    assert store.pending()
