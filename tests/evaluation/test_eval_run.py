"""Runs: rows that depend on nothing but the recipe, whatever stops them, and directories that belong to one run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from eval_world import EXAMPLES, content, recipe_of
from lm_eval_setup import tiny_lm
from tests.tiny_autoregressive import write_autoregressive

from tad.decoding import decode
from tad.errors import TadError
from tad.evaluation import EvalRecipe, Results, evaluate, list_tasks, regrade
from tad.evaluation import run as run_module
from tad.evaluation.row import UNFIT
from tad.evaluation.tables import show_summary
from tad.evaluation.workers import evaluate_with_ray
from tad.models import DREAM, LLADA, LM, load
from tad.tasks import Example
from tad.tasks.jsonl import Jsonl
from tad_sandbox import Sandbox


@pytest.fixture(scope="module")
def whole(lm: LM, world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The rows of a run that nothing stopped."""
    return content(evaluate(lm, recipe_of(world), tmp_path_factory.mktemp("run") / "whole"))


def test_rows_say_what_was_asked_what_came_and_why_it_is_right(lm: LM, world: Path, tmp_path: Path) -> None:
    rows = evaluate(lm, recipe_of(world), tmp_path / "r").rows()
    assert [row.id for row in rows] == [
        str(i) for i in range(EXAMPLES)
    ]  # the order of the data, not of the batches
    assert [row.correct for row in rows] == [i % 2 == 0 for i in range(EXAMPLES)]
    first = rows[0]
    assert "why 0" in first.prompt
    assert "<|start_header_id|>" in first.prompt
    assert first.text == lm.decode(decode(lm, [lm.encode("why 0")], "one-by-one", 16, block=8)[0].answer)
    assert (first.level, first.reason, rows[1].reason) == ("1", "equal", "different; expected something else")
    assert first.seconds > 0
    assert first.share > 0


@pytest.mark.parametrize(("family", "decoder"), [("llada", "tad"), ("dream", "fast-dllm-dual")])
def test_rows_do_not_depend_on_the_batch(world: Path, tmp_path: Path, family: str, decoder: str) -> None:
    lm = load(world / family, device="cpu")
    settings = {"block": 8, "threshold": 0.4}
    runs = [
        evaluate(
            lm,
            recipe_of(world, family, decoder=decoder, settings=settings, batch_size=size),
            tmp_path / str(size),
        )
        for size in (1, 5)
    ]
    assert len(content(runs[0])) == EXAMPLES
    assert content(runs[0]) == content(runs[1])


def test_sampled_rows_do_not_depend_on_the_batch_and_follow_the_seed(
    lm: LM, world: Path, tmp_path: Path
) -> None:
    def texts(name: str, **changes: object) -> list[str]:
        recipe = recipe_of(world, settings={"block": 8, "temperature": 1.0}, **changes)
        return [row.text for row in evaluate(lm, recipe, tmp_path / name).rows()]

    assert texts("a", batch_size=1) == texts("b", batch_size=7)
    assert texts("c", seed=1) != texts("d")


def test_a_run_that_was_stopped_is_continued_to_the_same_rows(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict]
) -> None:
    made: list[int] = []
    part = evaluate(lm, recipe_of(world), tmp_path / "part", lambda p: made.append(p.rows), lambda: True)
    assert 0 < len(part.rows()) < EXAMPLES
    summary = json.loads((tmp_path / "part" / "summary.json").read_text())
    assert not summary["complete"]
    done = evaluate(lm, recipe_of(world, batch_size=3), tmp_path / "part")
    assert content(done) == whole
    assert json.loads((tmp_path / "part" / "summary.json").read_text())["complete"]
    assert not list((tmp_path / "part").glob("part-*"))


def test_a_finished_run_is_not_decoded_again(
    lm: LM, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content(evaluate(lm, recipe_of(world), tmp_path / "r"))
    monkeypatch.setattr(run_module, "decode", None)
    assert content(evaluate(lm, recipe_of(world), tmp_path / "r")) == first


def test_a_torn_last_line_is_made_again(lm: LM, world: Path, tmp_path: Path, whole: list[dict]) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "torn", stopping=lambda: True)
    part = tmp_path / "torn" / "part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-40])
    assert len(Results.open(tmp_path / "torn").rows()) == 3
    assert content(evaluate(lm, recipe_of(world), tmp_path / "torn")) == whole


def test_two_processes_share_the_work_and_make_the_same_rows(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, complete in (("0", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        shared = evaluate(lm, recipe_of(world), tmp_path / "shared")
        assert shared.is_complete() == complete
    assert content(shared) == whole


def test_a_run_begun_by_two_processes_is_finished_by_one(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    evaluate(lm, recipe_of(world), tmp_path / "shared", grade=False)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert content(evaluate(lm, recipe_of(world), tmp_path / "shared")) == whole


@pytest.mark.slow
def test_processes_at_the_same_time_make_the_same_rows(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict]
) -> None:
    processes = [
        subprocess.Popen(
            command(world, tmp_path / "shared"),
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    assert content(Results.open(tmp_path / "shared")) == whole


@pytest.mark.slow
def test_ray_actors_make_the_same_rows(lm: LM, world: Path, tmp_path: Path, whole: list[dict]) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    results = evaluate_with_ray(recipe_of(world, batch_size=1), tmp_path / "ray")
    assert content(results) == whole


def command(world: Path, out: Path, batch: int = 1) -> list[str]:
    return [
        sys.executable, "-m", "tad", "eval", str(world / "llada"), "--tasks", f"jsonl:{world / 'questions.jsonl'}",
        "--decoder", "one-by-one", "--set", "block=8", "--gen-length", "16", "--batch", str(batch),
        "--device", "cpu", "--out", str(out),
    ]  # fmt: skip


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_interrupted_runs_end_in_the_same_rows(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict], rounds: int
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    draws = random.Random(0)
    rows = 0
    for number in range(rounds):
        process = subprocess.Popen(
            command(world, tmp_path / "broken"),
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "accuracy" in line:  # the first row of this call is there
                break
        time.sleep(draws.random() * 0.05)
        process.send_signal(signal.SIGKILL if number == 0 else draws.choice([signal.SIGKILL, signal.SIGINT]))
        process.communicate(timeout=120)
        found = len(Results.open(tmp_path / "broken").rows())
        assert found >= rows
        rows = found
    assert content(evaluate(lm, recipe_of(world), tmp_path / "broken")) == whole


def test_texts_decoded_without_grading_are_graded_later(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict]
) -> None:
    plain = evaluate(lm, recipe_of(world), tmp_path / "plain", grade=False)
    assert {row.correct for row in plain.rows()} == {None}
    assert json.loads((tmp_path / "plain" / "summary.json").read_text())["overall"]["tad"]["accuracy"] is None
    ((graded, changed),) = regrade([tmp_path / "plain"])
    assert changed == EXAMPLES
    assert content(graded) == whole
    assert [count for _, count in regrade([tmp_path / "plain"])] == [0]


def test_equal_texts_are_graded_once_and_other_texts_for_themselves(
    lm: LM, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, decoder in (
        ("a", "one-by-one"),
        ("b", "llada"),
        ("c", "tad"),
    ):  # the first two write the same texts
        recipe = recipe_of(
            world, decoder=decoder, settings={"block": 8} | ({"threshold": 4.0} if name == "c" else {})
        )
        evaluate(lm, recipe, tmp_path / name, grade=False)
    graded: list[str] = []
    plain = Jsonl.grade_many

    def counted(self: Jsonl, pairs: Iterable[tuple[Example, str]], *rest: object) -> object:
        pairs = list(pairs)
        graded.extend(text for _, text in pairs)
        return plain(self, pairs, *rest)

    monkeypatch.setattr(Jsonl, "grade_many", counted)
    a, b, c = (results.rows() for results, _ in regrade([tmp_path / name for name in "abc"]))
    assert [row.correct for row in a] == [row.correct for row in b] == [i % 2 == 0 for i in range(EXAMPLES)]
    assert len(graded) == EXAMPLES + sum(x.text != y.text for x, y in zip(a, c, strict=True))
    assert not any(y.correct for x, y in zip(a, c, strict=True) if x.text != y.text)


def test_evaluating_again_grades_what_is_not_graded(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict]
) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "plain", grade=False, stopping=lambda: True)
    assert content(evaluate(lm, recipe_of(world), tmp_path / "plain")) == whole


def test_grading_again_refuses_other_data(lm: LM, world: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "why", "answer": "1"}) + "\n")
    evaluate(lm, recipe_of(world, tasks=[{"name": f"jsonl:{file}"}]), tmp_path / "r")
    file.write_text(json.dumps({"question": "why", "answer": "2"}) + "\n")
    with pytest.raises(TadError, match="are not those of the run"):
        list(regrade([tmp_path / "r"]))


def test_a_prompt_that_does_not_fit_is_wrong_and_said(lm: LM, world: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    lines = [{"question": "q" * n, "answer": "1"} for n in (400, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = evaluate(lm, recipe_of(world, tasks=[{"name": f"jsonl:{file}"}]), tmp_path / "r")
    long, short = results.rows()
    assert (long.correct, long.reason, long.forwards) == (False, UNFIT, 0)
    assert short.forwards > 0
    found = json.loads((tmp_path / "r" / "summary.json").read_text())["overall"]["tad"]
    assert (found["unfit"], found["n"]) == (1, 2)
    assert [count for _, count in regrade([tmp_path / "r"])] == [0]


def test_a_batch_that_does_not_fit_the_memory_is_cut(
    lm: LM, world: Path, tmp_path: Path, whole: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    room = 2

    def cramped(lm: LM, prompts: Sequence[list[int]], *rest: object) -> object:
        sizes.append(len(prompts))
        if len(prompts) > room:
            raise torch.OutOfMemoryError
        return decode(lm, prompts, *rest)

    monkeypatch.setattr(run_module, "decode", cramped)
    assert content(evaluate(lm, recipe_of(world, batch_size=6), tmp_path / "cut")) == whole
    assert sizes.count(6) == 1  # the next batches begin smaller
    room = 0
    with pytest.raises(TadError, match="does not fit the device's memory"):
        evaluate(lm, recipe_of(world), tmp_path / "none")


def test_graders_that_cannot_work_are_found_before_decoding(
    lm: LM, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Sandbox) -> None:
        raise TadError("the code sandbox does not work here")

    monkeypatch.setattr(Sandbox, "check", check)
    tasks = list_tasks(["nano-code"], limit=2)
    monkeypatch.setattr(run_module, "decode", None)
    with pytest.raises(TadError, match="sandbox"):
        evaluate(lm, recipe_of(world, tasks=tasks), tmp_path / "r")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": "tad"}, "decoder.name is 'one-by-one' there and 'tad' here"),
        ({"settings": {"block": 4}}, "decoder.block is 8 there and 4 here"),
        ({"gen_length": 8}, "gen_length is 16 there and 8 here"),
        ({"seed": 5}, "seed is 0 there and 5 here"),
        ({"limit": 3}, "limit is None there and 3 here"),
    ],
)
def test_the_directory_of_another_run_is_refused_with_the_difference(
    lm: LM, world: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "r", stopping=lambda: True)
    with pytest.raises(TadError, match=message):
        evaluate(lm, recipe_of(world, **changes), tmp_path / "r")


def test_the_directory_of_another_model_and_of_another_adapter_is_refused(
    lm: LM, world: Path, tmp_path: Path
) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "r")
    with pytest.raises(TadError, match=r"model is '[0-9a-f]+' there and '[0-9a-f]+' here"):
        evaluate(load(world / "dream", device="cpu"), recipe_of(world, "dream"), tmp_path / "r")
    adapted = load(world / "llada", device="cpu")
    adapted.attach(rank=2)
    with pytest.raises(TadError, match="adapter is None there"):
        evaluate(adapted, recipe_of(world), tmp_path / "r")


def test_a_directory_of_something_else_is_refused(lm: LM, world: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TadError, match="is not empty and holds no run"):
        evaluate(lm, recipe_of(world), tmp_path)


def test_a_second_writer_is_refused(lm: LM, world: Path, tmp_path: Path) -> None:
    results = evaluate(lm, recipe_of(world), tmp_path / "r", stopping=lambda: True)
    with results.writing(), pytest.raises(TadError, match="another process is writing there"):
        evaluate(lm, recipe_of(world), tmp_path / "r")


def test_the_record_has_the_machine_and_the_recipe_of_every_call(lm: LM, world: Path, tmp_path: Path) -> None:
    evaluate(lm, recipe_of(world), tmp_path / "r", stopping=lambda: True)
    evaluate(lm, recipe_of(world), tmp_path / "r")
    record = json.loads((tmp_path / "r" / "run.json").read_text())
    assert [call["rows_before"] + call["rows_made"] for call in record["calls"]] == [4, 12]
    assert record["calls"][0]["versions"]["torch"] == torch.__version__
    assert EvalRecipe(**record["recipe"]) == recipe_of(world)


def test_samples_are_drawn_by_id_and_the_smaller_is_part_of_the_larger(
    lm: LM, world: Path, tmp_path: Path
) -> None:
    def ids(sample: int) -> list[str]:
        tasks = [{"name": f"jsonl:{world / 'questions.jsonl'}", "sample": sample}]
        rows = evaluate(lm, recipe_of(world, tasks=tasks), tmp_path / str(sample), grade=False).rows()
        return [row.id for row in rows]

    small, large = ids(4), ids(8)
    assert set(small) < set(large)
    assert large == sorted(large, key=int)
    assert small != ["0", "1", "2", "3"]
    with pytest.raises(TadError, match="sample 40 is too many"):
        ids(40)


def test_all_templates_are_asked_about_every_example(lm: LM, world: Path, tmp_path: Path) -> None:
    tasks = [{"name": f"jsonl:{world / 'questions.jsonl'}", "limit": 4, "templates": ["all"]}]
    rows = evaluate(lm, recipe_of(world, tasks=tasks), tmp_path / "r").rows()
    assert [row.template for row in rows] == ["tad"] * 4 + ["plain"] * 4
    assert [row.text for row in rows[:4]] == [
        row.text for row in rows[4:]
    ]  # this task's templates are the same


def test_the_nano_tasks_run_as_one_name(lm: LM, world: Path, tmp_path: Path) -> None:
    tasks = list_tasks(["nano"], limit=2)
    assert [task.name for task in tasks] == ["nano-word", "nano-math", "nano-code"]
    rows = evaluate(lm, recipe_of(world, tasks=tasks), tmp_path / "r", grade=False).rows()
    assert [row.task for row in rows] == [
        name for name in ("nano-word", "nano-math", "nano-code") for _ in range(2)
    ]


@pytest.mark.sandbox
@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.slow)])
def test_published_benchmarks_run_from_prompt_to_verdict(
    world: Path, tmp_path: Path, data_dir: Path, family: str
) -> None:
    """Scores of a random model are near zero; what counts is that every part works, and works again after a stop."""
    lm = tiny_lm(tmp_path / "model", {"llada": LLADA, "dream": DREAM}[family])
    own = {"llada": ["humaneval", "mbpp"], "dream": ["humaneval-instruct", "mbpp-instruct"]}[family]
    names = ["gsm8k", "math", *own]
    recipe = recipe_of(world, tasks=list_tasks(names, limit=2), decoder="tad", data_dir=str(data_dir))
    whole = evaluate(lm, recipe, tmp_path / "whole")
    assert [row.task for row in whole.rows()] == [name for name in names for _ in range(2)]
    assert all(row.forwards > 0 and row.correct is not None and row.reason for row in whole.rows())
    evaluate(lm, recipe, tmp_path / "part", stopping=lambda: True)
    assert content(evaluate(lm, recipe, tmp_path / "part")) == content(whole)
    prompts = {row.task: row.prompt for row in whole.rows()}
    assert prompts["math"].count("Problem:") == 5
    assert prompts["gsm8k"].startswith("<|")


def test_a_task_named_twice_is_refused(world: Path, lm: LM, tmp_path: Path) -> None:
    task = {"name": f"jsonl:{world / 'questions.jsonl'}"}
    with pytest.raises(TadError, match="is named twice"):
        evaluate(lm, recipe_of(world, tasks=[task, {**task, "limit": 3}]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_are_not_added_while_another_process_puts_them_together(
    world: Path, lm: LM, tmp_path: Path
) -> None:
    results = evaluate(lm, recipe_of(world, limit=2), tmp_path / "run")
    rows = results.rows()
    with results.writing():
        with Results.open(tmp_path / "run").quiet():
            adding = threading.Thread(target=results.add, args=(rows,))
            adding.start()
            adding.join(0.3)
            assert adding.is_alive()
            assert not list((tmp_path / "run").glob("part-*"))
        adding.join(5)
        assert list((tmp_path / "run").glob("part-*"))


def test_rows_and_summary_count_what_became_of_drafts(world: Path, tmp_path: Path) -> None:
    folder = write_autoregressive(tmp_path / "model", "llama", 2, 6)
    lm = load(folder, device="cpu")
    with torch.no_grad():  # embeddings that have much in common, so that some drafts are right
        embedding = lm.model.embedding().weight
        common = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(1))
        embedding.mul_(0.5).add_(2 * common * embedding.std())
    recipe = recipe_of(world, model=str(folder), decoder="verified", settings={})
    results = evaluate(lm, recipe, tmp_path / "run")
    rows = results.rows()
    assert all(row.drafting is not None and row.drafting["cycles"] > 0 for row in rows)
    summary = json.loads((results.folder / "summary.json").read_text())
    (by_template,) = summary["tasks"].values()
    (found,) = by_template.values()
    drafts = found["drafts"]
    assert drafts["accepted"] + found["forwards"] == found["tokens"]
    assert 0 < drafts["accepted"] < drafts["drafted"]
    assert drafts["acceptance"] == sorted(drafts["acceptance"], reverse=True)
    assert drafts["kept_per_cycle"] == pytest.approx(found["tokens"] / drafts["cycles"])
    assert "tokens kept per cycle" in show_summary(summary)
