"""Collection: a function of its examples, whatever the batches, the workers and the interruptions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from collect_world import EXAMPLES, content, run, values
from typer.testing import CliRunner

from tad.cli import app
from tad.config import parse_recipe
from tad.errors import TadError
from tad.models import load
from tad.tasks import Verdict, get_task
from tad.trajectories.collect import Collector
from tad.trajectories.jsonl_format import export_rows
from tad.trajectories.listener import CollectProgress, NullListener
from tad.trajectories.majority import judge_by_vote, vote
from tad.trajectories.mix import list_examples
from tad.trajectories.preview import take_preview
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.rollout import RolloutConfig, roll_out
from tad.trajectories.store import ShardStats, TrajectoryStore
from tad.trajectories.summary import summarise
from tad.trajectories.workers import collect_here, collect_with_ray, load_teacher


@pytest.fixture(scope="module")
def whole(world: Path) -> TrajectoryStore:
    """An uninterrupted collection. Tests only read it."""
    return run(world, world / "whole")


class Heard(NullListener):
    """What a collection said; asks it to stop after some shards."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.shards, self.lines, self.progress = list[int](), list[str](), list[CollectProgress]()
        self.stop_after = stop_after

    def say(self, line: str) -> None:
        self.lines.append(line)

    def rollouts(self, progress: CollectProgress) -> None:
        self.progress.append(progress)

    def shard(self, shard: int, stats: ShardStats) -> None:
        self.shards.append(shard)

    def stopping(self) -> bool:
        return self.stop_after is not None and len(self.shards) >= self.stop_after


def test_rows_do_not_depend_on_the_batch_size(world: Path, whole: TrajectoryStore, tmp_path: Path) -> None:
    one = run(world, tmp_path / "one", batch_size=1)
    assert len(content(one)) == EXAMPLES
    assert content(one) == content(whole)


def test_a_task_named_twice_is_graded_with_the_options_of_each(world: Path, tmp_path: Path) -> None:
    task = {"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}}
    recipe = parse_recipe(CollectRecipe, values(world, tasks=[task, task], shard_size=2 * EXAMPLES))
    collector = Collector(load(recipe.model, device="cpu"), recipe)
    asked = []
    for task_of in (collector.items[0].task, collector.items[-1].task):
        grade_many = task_of.grade_many

        def watch(pairs, *rest, grade_many=grade_many):
            asked.append(len(pairs))
            return grade_many(pairs, *rest)

        task_of.grade_many = watch
    collector.grade(collector.generate(0))
    assert asked == [EXAMPLES, EXAMPLES]


def revealed(store: TrajectoryStore) -> list[tuple]:
    return [(row.id, row.tokens, row.reveal, row.n_real) for row in store.rows()]


def test_compiled_collection_makes_the_same_rows_and_may_continue_a_run(
    world: Path, whole: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: asked.append(function) or function)
    compiled = run(world, tmp_path / "compiled", compile=True)
    assert asked
    assert revealed(compiled) == revealed(whole)
    assert compiled.meta == whole.meta


@pytest.mark.slow
def test_collection_compiled_in_earnest_makes_the_same_rows(
    world: Path, whole: TrajectoryStore, tmp_path: Path
) -> None:
    assert revealed(run(world, tmp_path / "compiled", compile=True)) == revealed(whole)


def test_the_teacher_sees_the_reference_and_the_student_does_not(
    world: Path, whole: TrajectoryStore, tmp_path: Path
) -> None:
    lm = load(world / "llada", device="cpu")
    for row in whole.rows():
        assert "because" in lm.decode(row.privileged_ids)
        assert "because" not in lm.decode(row.plain_ids)
    for row in run(world, tmp_path / "s", privileged=False).rows():
        assert row.plain_ids == row.privileged_ids
        assert row.reference == "none"


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_system_form_puts_the_reference_in_a_system_turn(world: Path, tmp_path: Path, family: str) -> None:
    lm = load(world / family, device="cpu")
    row = next(iter(run(world, tmp_path / "s", family, prompt="system").rows()))
    text = lm.decode(row.privileged_ids, skip_special=False)
    assert text.index("system") < text.index("Reference Answer: because 0") < text.index("user")


def test_keeping_correct_ones_keeps_only_those_and_counts_the_rest(world: Path, tmp_path: Path) -> None:
    store = run(world, tmp_path / "s", keep="correct")
    assert all(row.correct for row in store.rows())
    stats = [stats for _, stats in store.shards()]
    assert sum(entry.attempted for entry in stats) == EXAMPLES
    assert sum(entry.attempted - entry.correct for entry in stats) == sum(
        sum(entry.reasons.values()) for entry in stats
    )


def test_samples_differ_by_their_seed_and_repeat_with_it(world: Path, tmp_path: Path) -> None:
    task = {"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}, "limit": 3}
    sampled = {"samples": 2, "temperature": 1.0, "tasks": [task]}
    first, again = (run(world, tmp_path / name, **sampled) for name in "ab")
    other = run(world, tmp_path / "c", seed=1, **sampled)
    assert content(first) == content(again)
    assert content(first) != content(other)
    rows = list(first.rows())
    assert len(rows) == 6
    assert rows[0].tokens != rows[1].tokens


def test_a_run_that_stopped_is_continued_to_the_same_store(
    world: Path, whole: TrajectoryStore, tmp_path: Path
) -> None:
    recipe = parse_recipe(CollectRecipe, values(world))
    heard = Heard(stop_after=1)
    lm = load(recipe.model, device="cpu")
    collect_here(recipe, tmp_path / "parts", lm, heard)
    assert 0 < len(heard.shards) < 3
    store = collect_here(recipe, tmp_path / "parts", lm)
    assert content(store) == content(whole)


def test_rollouts_are_counted_inside_shards_and_a_look_comes_first(world: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(CollectRecipe, values(world, keep="correct"))
    lm, heard = load(recipe.model, device="cpu"), Heard()
    store = collect_here(recipe, tmp_path / "s", lm, heard)
    done = [progress.done for progress in heard.progress]
    assert done == sorted(done)
    assert (done[0] < recipe.shard_size, done[-1]) == (True, EXAMPLES)
    assert {progress.total for progress in heard.progress} == {EXAMPLES}
    # The tiny model knows nothing: the look says so with texts, and so does the end.
    assert "0 right with the reference, 0 without" in heard.lines[0]
    assert sum(line.startswith("WARNING") for line in heard.lines) == 2
    assert sum(line.startswith("  wrong: ") for line in heard.lines) == 6
    assert content(store) == content(run(world, tmp_path / "plain", keep="correct"))
    again = Heard()
    collect_here(recipe, tmp_path / "s", lm, again)
    assert (again.lines, again.progress) == ([], [])
    # Every shard keeps a few wrong rollouts to be read, and nothing that the recipe drops.
    wrong = list(store.wrong())
    assert len(wrong) == 3 * 3 if EXAMPLES >= 9 else len(wrong) == EXAMPLES
    assert all(one.question and one.reference and one.reason for one in wrong)
    shown = CliRunner().invoke(
        app, ["trajectories", str(tmp_path / "s"), "--wrong", "2"], catch_exceptions=False
    )
    for one, is_shown in zip(wrong, (True, True, False), strict=False):
        assert (one.id in shown.stdout) == is_shown


@pytest.mark.slow
def test_a_reference_that_hurts_is_warned_of(tmp_path: Path) -> None:
    """nano-llada has learnt its own instruction; with the usual one and a bare number it cannot use the reference."""
    examples = get_task("nano-word", size=8).examples("train")
    lines = [{"question": one.question, "answer": str(one.answer)} for one in examples]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"model": "nano-llada", "tasks": [{"name": f"jsonl:{tmp_path / 'own.jsonl'}"}], "gen_length": 96}
    recipe = parse_recipe(CollectRecipe, {**given, "device": "cpu"})
    found = take_preview(Collector(load("nano-llada", device="cpu"), recipe))
    assert found is not None
    assert found.right < found.right_without
    assert any("instruction" in line for line in found.describe())


def test_the_prompts_are_shown_without_weights(world: Path, tmp_path: Path) -> None:
    for file in (world / "llada").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({**values(world), "model": str(tmp_path)}))
    words = ["collect", str(path), "--show", "--out", str(tmp_path / "none")]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    teacher, student = shown.split("the student's prompt")
    assert "because 0" in teacher
    assert "because 0" not in student
    assert "qqq" in student
    assert not (tmp_path / "none").exists()


def test_two_processes_share_the_shards_and_make_the_same_rows(
    world: Path, whole: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        store = run(world, tmp_path / "shared")
    assert content(store) == content(whole)


@pytest.mark.slow
def test_processes_started_by_torchrun_make_the_same_rows(
    world: Path, whole: TrajectoryStore, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(values(world)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tad"]
    arguments = ["collect", str(recipe), "--out", str(tmp_path / "shared")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert content(TrajectoryStore.open(tmp_path / "shared")) == content(whole)


@pytest.mark.slow
def test_ray_actors_make_the_same_rows(world: Path, whole: TrajectoryStore, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    recipe = parse_recipe(CollectRecipe, values(world))
    assert content(collect_with_ray(recipe, tmp_path / "ray")) == content(whole)


@pytest.mark.parametrize("order", ["teacher", "left-to-right"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_cached_rollouts_are_whole(world: Path, cache: str, order: str) -> None:
    lm = load(world / "llada", device="cpu")
    prompts = [lm.encode("q" * n) for n in (3, 5, 8)]
    config = RolloutConfig(order=order, block=8, stop_at_end=False)
    cached = roll_out(lm, prompts, prompts, 16, replace(config, cache=cache))
    assert all(sorted(row.reveal) == list(range(1, 17)) for row in cached)
    if order == "left-to-right":
        assert all(row.reveal == list(range(1, 17)) for row in cached)
        exact = roll_out(lm, prompts, prompts, 16, config)
        assert [row.tokens[0] for row in cached] == [
            row.tokens[0] for row in exact
        ]  # before anything is cached


def test_majority_votes_replace_the_reference_and_never_see_the_gold(world: Path, tmp_path: Path) -> None:
    lm = load(world / "llada", device="cpu")
    recipe = parse_recipe(
        CollectRecipe,
        values(world, reference="majority", votes=3, shard_size=EXAMPLES),
    )
    collector = Collector(lm, recipe)
    said = iter(vote for vote in ("so #### 8", "3 + 4 #### 7", "#### 7") for _ in range(EXAMPLES))
    collector.lm.decode = lambda ids, skip_special=True: next(said)  # type: ignore[method-assign]
    items = vote(collector, collector.items)
    assert {(item.reference, item.voted, item.origin) for item in items} == {
        ("3 + 4 #### 7", "7", "majority")
    }
    right, other = (judge_by_vote(items[0], Verdict(True, "", extracted)).correct for extracted in ("7", "8"))
    assert right
    assert not other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 2}, "^samples"),
        ({"cache": "dual", "order": "student"}, "^cache 'dual'"),
        ({"compile": True, "order": "student"}, "^compile"),
        ({"block": 7}, "gen_length 16 .* 7"),
        ({"tokens": "reference"}, "^tokens 'reference'"),
        (
            {"tasks": [{"name": "nano-code", "options": {"size": 1}}], "reference": "majority"},
            "nano-code.*majority",
        ),
        ({"reference": "where-needed", "privileged": False}, "where-needed"),
        ({"reference": "where-needed", "tokens": "reference", "order": "random"}, "where-needed"),
        ({"part": [4, 3]}, r"part \[4, 3\]"),
        *(
            (
                {"tasks": [{"name": "nano-word", "graded": "later"}], "reference": name},
                f"reference.*nano-word.*{name}",
            )
            for name in ("majority", "where-needed")
        ),
        (
            {"tasks": [{"name": "nano-word", "options": {"size": 1}, "graded": g} for g in (True, "later")]},
            "nano-word.*twice",
        ),
    ],
)
def test_recipes_that_make_no_sense_are_refused(
    world: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(TadError, match=message):
        run(world, tmp_path / "s", **changes)


def test_a_prompt_that_does_not_fit_is_counted_and_left_out(world: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"question": "q" * 400, "reference": "r", "answer": "1"}) + "\n")
    store = run(world, tmp_path / "s", tasks=[{"name": "jsonl", "options": {"path": str(path)}}])
    assert list(store.rows()) == []
    assert next(store.shards())[1].reasons == {"the prompt does not fit the context": 1}


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_interrupted_runs_end_in_the_same_store(
    world: Path, whole: TrajectoryStore, tmp_path: Path, rounds: int
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(values(world, shard_size=1)))
    command = [sys.executable, "-m", "tad", "collect", str(recipe), "--out", str(tmp_path / "broken")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    draws = random.Random(0)
    shards = 0
    for number in range(rounds):
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        process.stderr.readline()  # the first shard of this run is there
        time.sleep(draws.random() * 0.3)
        process.send_signal((signal.SIGKILL, signal.SIGINT)[number % 2])
        process.communicate(timeout=120)
        found = len(list((tmp_path / "broken").glob("*.parquet")))
        assert found >= shards
        shards = found
    store = run(world, tmp_path / "broken", shard_size=1)
    assert store.missing() == []
    assert content(store) == content(whole)


def test_a_task_that_is_not_graded_keeps_every_rollout_without_a_verdict(
    world: Path, whole: TrajectoryStore, tmp_path: Path
) -> None:
    task = {"name": "jsonl", "options": {"path": str(world / "questions.jsonl")}, "graded": False}
    store = run(world, tmp_path / "ungraded", tasks=[task], keep="correct")
    rows = list(store.rows())
    assert {(row.correct, row.reason, row.extracted) for row in rows} == {(None, "not graded", None)}
    summary = summarise(store)
    assert (summary.attempted, summary.graded, summary.correct, summary.by_task) == (EXAMPLES, 0, 0, {})
    assert [row.tokens for row in rows] == [row.tokens for row in whole.rows()]
    assert "graded" not in whole.meta.recipe["tasks"][0]  # a choice that is not made is no part of a store


# The reference where it is needed


def needed(
    world: Path, half_known: Path, out: Path, graded: bool = True, **changes: object
) -> TrajectoryStore:
    task = {"name": "jsonl", "options": {"path": str(half_known)}, "graded": graded}
    values = {"tasks": [task], "order": "left-to-right", "reference": "where-needed", **changes}
    return run(world, out, **values)


def test_the_reference_is_shown_only_where_a_rollout_without_it_is_wrong(
    world: Path, half_known: Path, tmp_path: Path
) -> None:
    store = needed(world, half_known, tmp_path / "needed")
    origins = [row.reference for row in store.rows()]
    assert origins == ["none", "gold"] * (EXAMPLES // 2)
    plain = needed(world, half_known, tmp_path / "plain", reference="gold", privileged=False)
    always = needed(world, half_known, tmp_path / "always", reference="gold")
    for row, without, shown in zip(store.rows(), plain.rows(), always.rows(), strict=True):
        source = without if row.reference == "none" else shown
        assert (row.tokens, row.reveal, row.correct) == (source.tokens, source.reveal, source.correct)
        assert row.privileged_ids == shown.privileged_ids  # for a privileged teacher of the KL
    summary, spent = summarise(store), summarise(plain)
    assert (summary.attempted, summary.unaided, summary.rollouts) == (
        EXAMPLES,
        EXAMPLES // 2,
        3 * EXAMPLES // 2,
    )
    with_it = sum(row.n_real for row in always.rows() if int(row.example.rpartition("/")[2]) % 2)
    assert summary.forwards == spent.forwards + with_it


def test_further_attempts_are_sampled_before_the_reference_is_shown(
    world: Path, half_known: Path, tmp_path: Path
) -> None:
    store = needed(world, half_known, tmp_path / "s", attempts=3)
    assert summarise(store).rollouts == EXAMPLES + 3 * EXAMPLES // 2
    assert content(store) != []


def test_a_task_that_is_not_graded_always_has_the_reference(
    world: Path, half_known: Path, tmp_path: Path
) -> None:
    store = needed(world, half_known, tmp_path / "s", graded=False)
    assert {row.reference for row in store.rows()} == {"gold"}
    assert summarise(store).rollouts == EXAMPLES


def test_parts_share_out_the_examples(world: Path, whole: TrajectoryStore) -> None:
    asked = [parse_recipe(CollectRecipe, values(world, part=[i, 3])) for i in (1, 2, 3)]
    parts = [{f"{example.id}#0" for example in list_examples(recipe)} for recipe in asked]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert set.union(*parts) == {row.id for row in whole.rows()}


def test_a_student_rolls_out_with_its_adapter_in_the_weights(
    world: Path, whole: TrajectoryStore, tmp_path: Path
) -> None:
    lm = load(world / "llada", device="cpu")
    handle = lm.attach(rank=2)
    torch.manual_seed(0)
    for name, weight in lm.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    handle.save_pretrained(str(tmp_path / "adapter"))
    recipe = parse_recipe(CollectRecipe, values(world, adapter=str(tmp_path / "adapter")))
    own = collect_here(recipe, tmp_path / "student", load_teacher(recipe, "cpu"))
    assert own.meta.model != whole.meta.model
    assert revealed(own) != revealed(whole)
    wrong = recipe.model_copy(update={"adapter": str(tmp_path / "nowhere")})
    with pytest.raises(TadError, match="nowhere"):
        load_teacher(wrong, "cpu")


def test_a_parallel_collection_has_few_steps_shows_and_exports_each(world: Path, tmp_path: Path) -> None:
    store = run(world, tmp_path / "store", order="parallel", threshold=20.0)
    lm, rows = load(world / "llada", device="cpu"), list(store.rows())
    assert len(rows) == EXAMPLES
    assert any(len({*row.reveal}) < len(row.reveal) for row in rows)  # several at a step
    assert store.meta.recipe["threshold"] == 20.0
    for row, exported in zip(rows, export_rows(lm, store), strict=True):
        states = list(exported["trajectory"].values())
        assert len(states) == max(row.reveal) + 1
        assert [sum(ids[i] == lm.tokens.mask for ids in states) for i in range(len(row.reveal))] == row.reveal
    words = ["trajectories", str(store.folder), "--show", rows[0].example, "--model", str(world / "llada")]
    shown = CliRunner().invoke(app, words)
    assert f"{rows[0].n_real} steps, then end filler" in shown.output
    with pytest.raises(TadError, match="order 'parallel' is how the teacher decodes"):
        run(world, tmp_path / "other", order="parallel", floor=0.5)
