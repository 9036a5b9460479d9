"""What starts fast: `import tad`, `tad --help`, and every refusal that needs no model. Torch is not imported for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.cli.options import DECODERS, FAMILIES, QUANTIZED, read_settings
from tad.cli.progress import Progress
from tad.errors import TadError


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def command(*words: str) -> tuple[list[str], bool, float]:
    """What `tad` printed as its errors, whether it had to import torch, and its CPU seconds."""
    code = (
        "import resource, sys; from tad.cli import main; sys.argv = ['tad', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print('torch' in sys.modules, used.ru_utime + used.ru_stime, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    *said, facts = done.stderr.strip().split("\n")
    torch, seconds = facts.split()
    assert done.returncode == (2 if said else 0)
    return said, torch == "True", float(seconds)


def test_importing_tad_imports_no_torch_and_shows_the_api() -> None:
    assert python("import sys, tad; print('torch' in sys.modules, *dir(tad))").split() == [
        "False",
        *sorted(tad.__all__),
    ]


@pytest.mark.parametrize("order", ["import tad, transformers", "import transformers, tad"])
def test_the_auto_classes_know_the_families_in_any_order_of_imports(order: str) -> None:
    """Also where pydantic and typer, which only recipes and commands need, are not installed."""
    absent = "import sys; sys.modules['pydantic'] = sys.modules['typer'] = None"
    check = "print(*(transformers.AutoConfig.for_model(name).model_type for name in ('llada', 'Dream')))"
    assert python(f"{absent}; {order}; {check}") == "llada Dream"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate", "nano-lada", "hello"], "nano-llada"),
        (["info", "./missing"], "./missing"),
        (["chat", "nano-llada", "--adapter", "/missing"], "/missing"),
        (["serve", "nano-llada", "--device", "gpu"], "--device gpu"),
        (["generate", "nano-llada", "hello", "--dtype", "int4"], "--dtype int4"),
        (["chat", "nano-llada", "--quantize", "int3"], "--quantize int3"),
        (["generate", "nano-llada", "hello", "--set", "threshold"], "--set threshold"),
        (["generate", "nano-llada", "hello", "--decoder", "d3lm"], "d3llm"),
        (["decoders", "--family", "qwen"], "--family qwen"),
        (["grade", "taskz", "/missing.jsonl"], "taskz"),
        (["recipes", "nano-lada-speed"], "nano-llada-speed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named_before_torch_is_imported(words: list[str], named: str) -> None:
    (said,), torch, seconds = command(*words)
    assert said.startswith("error: ")
    assert named in said
    assert not torch
    assert seconds < 1.0  # half a second where nothing else runs


def test_help_needs_no_torch() -> None:
    _, torch, seconds = command("--help")
    assert not torch
    assert seconds < 1.0


@pytest.mark.skipif(sys.platform == "darwin", reason="needs a machine without MPS")
def test_mps_where_there_is_none_is_named() -> None:
    with pytest.raises(TadError, match="--device mps"):
        CliRunner().invoke(
            app, ["generate", "nano-llada", "hello", "--device", "mps"], catch_exceptions=False
        )


def test_settings_are_read_as_numbers_words_and_texts() -> None:
    texts = ["a=1", "b-c=0.5", "d=true", "e=none", "f=off", "g=1e-3", "h=.5", "i=null", "j=False", "k=no"]
    values = [1, 0.5, True, None, "off", 1e-3, 0.5, None, False, "no"]
    found = read_settings(texts, threshold=0.9)
    assert found == {**dict(zip(["a", "b_c", *"defghijk"], values, strict=True)), "threshold": 0.9}
    assert [type(value) for value in found.values()] == [*map(type, values), float]
    for wrong, named in (
        (["a"], "--set a"),
        (["=1"], "--set =1"),
        (["a=1", "a=2"], "a"),
        (["threshold=1"], "threshold"),
    ):
        with pytest.raises(TadError, match=named):
            read_settings(wrong, threshold=0.9)


def test_names_known_without_torch_are_those_of_the_tables() -> None:
    from tad.decoding import DECODERS as TABLE
    from tad.models import FAMILIES as MODELS
    from tad.models.quantize import KINDS

    assert tuple(TABLE) == DECODERS
    assert tuple(family.name for family in MODELS.values()) == FAMILIES
    assert tuple(KINDS) == QUANTIZED


def test_a_family_lists_what_it_decodes_with() -> None:
    def names(*words: str) -> set[str]:
        found = CliRunner().invoke(app, ["decoders", "--json", *words], catch_exceptions=False).stdout
        return {row["name"] for row in json.loads(found)}

    assert names() == set(DECODERS)
    assert names("--family", "llada") & names("--family", "sdar") == {"one-by-one"}
    assert names("--family", "llada") | names("--family", "llama") == set(DECODERS)
    assert names("--family", "llama") - names("--family", "sdar") == {"autoregressive", "verified"}


# Recipes


def test_recipes_are_listed_with_their_verb_shown_and_copied_with_comments(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        return CliRunner().invoke(app, ["recipes", *words], catch_exceptions=False).stdout

    rows = {row["name"]: row["verb"] for row in json.loads(run("--json"))}
    assert rows["collect-nano-llada"] == "collect"
    assert rows["nano-llada-speed"] == "distill"
    assert rows["run-nano-llada"] == "run"
    assert rows["study-nano-llada"] == "study"
    assert rows["pretrain-tiny"] == "pretrain"
    assert run("pretrain-tiny").startswith("# ")
    assert "tad pretrain" in run("pretrain-tiny", "--copy", str(tmp_path))
    assert (tmp_path / "pretrain-tiny.yaml").read_text() == run("pretrain-tiny")
    with pytest.raises(TadError, match=r"pretrain-tiny\.yaml"):
        run("pretrain-tiny", "--copy", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["distill", "collect-nano-llada"], "tad collect"),
        (["collect", "llada-quality"], "tad distill"),
        (["run", "study-nano-llada"], "tad study"),
        (["study", "run-nano-llada"], "tad run"),
        (["pretrain", "run-nano-llada"], "tad run"),
        (["collect", "collect-nano-llada", "taskz=3"], r"taskz=3.*'tasks'"),
        (["distill", "nano-llada-speed", "learning.stepz=3"], r"learning\.stepz=3.*'steps'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_wrong_kind_of_recipe_and_the_wrong_override_are_named(words: list[str], named: str) -> None:
    with pytest.raises(TadError, match=named):
        CliRunner().invoke(app, words, catch_exceptions=False)


# Progress


def test_a_log_gets_a_line_now_and_then_and_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.begin("rollouts")
        for done in range(1, 101):
            progress.update(done, 100, f"{done // 2} right")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rollouts: 1/100  0 right")
    assert lines[-1].startswith("rollouts: 100/100  50 right")
    assert len(lines) == 2


def test_a_first_ctrl_c_lets_work_finish_and_a_second_stops(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom tad.cli.progress import Progress\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "with Progress('the batch') as progress:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print(progress.stopping())\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt: print('stopped')\n"
        "print(signal.getsignal(signal.SIGINT) is before)"
    )
    assert python(code).split() == ["True", "stopped", "True"]


def test_help_shows_every_command_once_and_where_to_start() -> None:
    shown = CliRunner().invoke(app, ["--help"], catch_exceptions=False).stdout
    groups = shown.partition("Look at a model:")[2]
    listed = [line.split()[0] for line in groups.splitlines() if line[:2] == "  " and line[2:3].isalpha()]
    assert sorted(listed) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert "tad demo" in shown.partition("Look at a model:")[0]
