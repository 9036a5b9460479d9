"""`tad eval` and its sisters: what they print, what they write, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_world import EXAMPLES
from typer.testing import CliRunner, Result

from tad.cli import app
from tad.errors import TadError
from tad.evaluation import Results
from tad.evaluation.analysis import TOLERANCE
from tad.models import load


@pytest.fixture
def model(world: Path) -> str:
    return str(world / "llada")


@pytest.fixture
def own(world: Path) -> list[str]:
    """The file of questions, as options."""
    return [
        "--tasks",
        f"jsonl:{world / 'questions.jsonl'}",
        "--set",
        "block=8",
        "--gen-length",
        "16",
        "--device",
        "cpu",
    ]


def run(*words: Any) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_prints_a_table_with_progress_and_writes_its_files(
    model: str, own: list[str], tmp_path: Path
) -> None:
    words = ["eval", model, *own, "--decoder", "one-by-one", "--out", tmp_path / "r"]
    result = run(*words, "--batch", 5, "--levels")
    assert result.exit_code == 0
    assert "50.0 ± 15.1" in result.stdout
    assert result.stdout.count("  level ") == 3
    assert f"written: {tmp_path / 'r'}" in result.stdout
    assert "5/12  accuracy" in result.stderr
    assert "TPF" in result.stderr
    files = {path.name for path in (tmp_path / "r").iterdir() if not path.name.startswith(".")}
    assert files == {"eval.json", "rows.jsonl", "summary.json", "run.json"}
    again = run(*words, "--json")
    assert json.loads(again.stdout)["overall"]["tad"]["accuracy"] == 50
    with pytest.raises(TadError, match="holds a single run, not a sweep"):
        run(*words, "--sweep")


def test_tasks_may_have_templates_of_their_own(model: str, own: list[str], tmp_path: Path) -> None:
    words = ["--tasks", "gsm8k:plain,nano-word", *own[2:], "--limit", 2, "--no-grade"]
    (tmp_path / "gsm8k").mkdir()
    line = json.dumps({"question": "1 + 1?", "answer": "It is 2. #### 2"})
    (tmp_path / "gsm8k" / "test.jsonl").write_text(f"{line}\n{line}\n")
    text = run("eval", model, *words, "--data-dir", tmp_path, "--out", tmp_path / "r").stdout
    assert [entry["templates"] for entry in Results.open(tmp_path / "r").meta.tasks] == [["plain"], ["tad"]]
    for words in ("gsm8k (plain)", "mean of 2 tasks (each task's own template)"):
        assert words in text
    with pytest.raises(TadError, match="no prompt template 'mine'"):
        run("eval", model, "--tasks", "nano-word:mine", *own[2:], "--out", tmp_path / "s")


def test_a_sweep_prints_and_writes_its_points(model: str, own: list[str], tmp_path: Path) -> None:
    words = ["eval", model, *own, "--threshold", "0.5,4", "--out", tmp_path / "s", "--y-max", "75"]
    assert f"tad regrade {tmp_path / 's'}" in run(*words, "--no-grade").stdout
    run("regrade", tmp_path / "s", "--missing")
    result = run(*words)
    assert "75.0 (given)" in result.stdout
    assert "one token" in result.stdout
    points = json.loads((tmp_path / "s" / "points.json").read_text())
    (found,) = points[0]["rows"][1]["scopes"].values()
    assert (found["n"], len(found["points"])) == (EXAMPLES, 3)
    assert found["aup"]["value"] > 0
    shown = run("points", tmp_path / "s", "--y-max", "75", "--json")
    assert json.loads(shown.stdout) == points
    assert f"TPF at base - {TOLERANCE:g}" in result.stdout
    assert "TPF at base - 7" in run("points", tmp_path / "s", "--tolerance", "7").stdout


def test_decoded_texts_are_graded_by_another_command(model: str, own: list[str], tmp_path: Path) -> None:
    result = run("eval", model, *own, "--decoder", "one-by-one", "--no-grade", "--out", tmp_path / "r")
    assert "not graded" in result.stdout
    result = run("regrade", tmp_path / "r")
    assert "12 verdicts changed" in result.stderr
    assert "50.0 ± 15.1" in result.stdout


def test_ungraded_templates_and_prompts_that_do_not_fit_print_as_dashes(
    model: str, own: list[str], tmp_path: Path
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question": "q" * 400, "answer": "1"}) + "\n")
    tasks = f"{own[1]},jsonl:{long}"
    result = run(
        "eval", model, "--tasks", tasks, *own[2:], "--templates", "all", "--no-grade", "--out", tmp_path / "r"
    )
    assert "not graded" in result.stdout
    assert "accuracy moves by - points" in result.stdout
    assert "2 prompts did not fit" in result.stdout


def test_runs_are_compared(model: str, own: list[str], tmp_path: Path) -> None:
    for decoder in ("one-by-one", "tad"):
        run("eval", model, *own, "--decoder", decoder, "--out", tmp_path / decoder)
    result = run("compare", tmp_path / "one-by-one", tmp_path / "tad")
    assert "against base, one-by-one" in result.stdout
    found = json.loads(run("compare", tmp_path / "one-by-one", tmp_path / "tad", "--json").stdout)
    assert list(found["table"]["tasks"].values()) == [EXAMPLES]


def test_throughput_compares_methods(model: str, own: list[str], world: Path, tmp_path: Path) -> None:
    load(model, device="cpu").attach(rank=2).save_pretrained(tmp_path / "speed" / "adapter")
    task = ["--task", f"jsonl:{world / 'questions.jsonl'}", *own[2:], "--limit", 4, "--warmup", 1]
    methods = ["base,one-by-one", f"{tmp_path / 'speed' / 'adapter'},tad,threshold=0.4"]
    words = [word for name in methods for word in ("--method", name)]
    text = run("throughput", model, *task, *words, "--batch", "1,4").stdout
    assert text.count("base, one-by-one") == text.count("speed, tad, threshold=0.4") == 2
    found = json.loads(run("throughput", model, *task, "--json").stdout)
    assert (found["speeds"][0]["method"], found["speeds"][0]["rows"]) == ("base, tad", 4)
    assert "commit" in found["machine"]
    with pytest.raises(TadError, match="--method base"):
        run("throughput", model, *task, "--method", "base")


TAD = ("--decoder", "tad", "--gen-length", "64")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "gms8k"], "unknown task 'gms8k'"),
        (["--tasks", "nano", "--decoder", "tda"], "unknown decoder 'tda'; did you mean 'tad'"),
        (["--tasks", "nano", "--decoder", "tad,fast"], "unknown decoder 'fast'"),
        (
            ["--tasks", "nano", *TAD, "--set", "treshold=1"],
            "has no parameter 'treshold'; did you mean 'threshold'",
        ),
        (
            ["--tasks", "nano", "--decoder", "tad", "--gen-length", "40"],
            "gen_length 40 is not a multiple of the block length 32",
        ),
        (["--tasks", "nano", "--split", "dev"], "has no split 'dev'"),
        (["--tasks", "nano", "--template", "mine"], "has no prompt template 'mine'"),
        (["--tasks", "nano-word,nano-word"], "task 'nano-word' is named twice"),
        (["--tasks", "nano", "--limit", "3", "--sample", "3"], "give one of them"),
        (["--tasks", "nano", "--sweep", "--threshold", "0.1"], "give one of them"),
        (["--tasks", "nano", "--threshold", "a,b"], "--threshold a,b: should be numbers"),
        (["--tasks", "nano", "--threshold", "0.1,0.1"], "stands there twice"),
        (
            ["--tasks", "nano", "--decoder", "llada", "--gen-length", "64", "--threshold", "0.1,0.2"],
            "has no threshold",
        ),
        (
            ["--tasks", "nano", "--set", "gsm8k.extraction=exact"],
            "options for 'gsm8k', which is not one of the tasks",
        ),
        (["--tasks", "nano-word", "--set", "nano-word.sze=3"], "task 'nano-word' has no option 'sze'"),
        (["--tasks", "nano", "--workers", "dask"], "--workers dask"),
        (["--tasks", "gsm8k", "--data-dir", "nowhere"], "nowhere"),
        (["--tasks", ","], "no task given"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_the_model_is_read(words: list[str], message: str) -> None:
    with pytest.raises(TadError) as error:
        run("eval", "no-such/model", *words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_base_is_refused(
    model: str, world: Path, own: list[str], tmp_path: Path
) -> None:
    other = load(world / "dream", device="cpu")
    other.attach(rank=2).save_pretrained(tmp_path / "adapter")
    with pytest.raises(TadError, match="it is an adapter for dream, the model is llada"):
        run("eval", model, *own, "--adapter", tmp_path / "adapter", "--out", tmp_path / "r")


def test_an_adapter_and_the_options_of_a_task_are_part_of_the_run(
    model: str, own: list[str], tmp_path: Path
) -> None:
    load(model, device="cpu").attach(rank=2).save_pretrained(tmp_path / "adapter")
    words = ["--out", tmp_path / "r", "--limit", 2, "--set", "jsonl.contained=true"]
    run("eval", model, *own, "--adapter", tmp_path / "adapter", *words)
    meta = Results.open(tmp_path / "r").meta
    assert meta.tasks[0]["options"] == {"contained": True}
    assert meta.adapter is not None
    assert Path(meta.source["adapter"]).name == "adapter"
    with pytest.raises(TadError, match=r"adapter is '[0-9a-f]+' there and None here"):
        run("eval", model, *own, *words)


def test_what_holds_no_runs_is_said(tmp_path: Path) -> None:
    for command in ("points", "regrade"):
        with pytest.raises(TadError, match="no runs here"):
            run(command, tmp_path)
