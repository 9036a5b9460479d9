"""Conversion end to end at a size that takes seconds: both ways, exact resume, the parent's bits, bad input."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_autoregressive import edit, write_autoregressive
from tiny_store import read_log, same_weights
from typer.testing import CliRunner

import tad
from tad.cli import app
from tad.config import load_recipe
from tad.errors import TadError
from tad.models.conversion import FILE
from tad.training.convert import RUN, convert, plan
from tad.training.recipe import ConvertRecipe

WEIGHTS = "adapter_model.safetensors"
ROWS = [
    {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}."}
    for a in range(4)
    for b in range(3)
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    write_autoregressive(root / "parent")
    write_rows(root / "rows.jsonl", ROWS)
    return root


def recipe(world: Path, **changes: Any) -> ConvertRecipe:
    values: dict[str, Any] = {
        "name": "tiny", "model": str(world / "parent"), "data": [{"source": str(world / "rows.jsonl")}], "block": 8,
        "objective": {"name": "causal-blocks"}, "adapter": {"rank": 4, "dropout": 0.1}, "held_out": 2,
        "learning": {"lr": 1e-2, "steps": 6}, "batch": {"size": 4, "micro": 2}, "save_every": 2, "keep": 9,
        "report_to": [], "device": "cpu", **changes,
    }  # fmt: skip
    return ConvertRecipe.model_validate(values)


@pytest.fixture(scope="module")
def converted(world: Path) -> Path:
    outcome = convert(recipe(world), world / "whole", quiet=True)
    assert outcome.finished
    return world / "whole"


def test_the_parents_forward_is_what_it_was_bit_for_bit(world: Path, converted: Path) -> None:
    lm, parent = tad.load(converted), tad.load(world / "parent")
    ids = torch.randint(0, 250, (2, 30), generator=torch.Generator().manual_seed(0))
    assert torch.equal(lm.model(ids).logits, parent.model(ids).logits)
    ids[:, 20:] = lm.tokens.mask
    assert not torch.equal(lm.model(ids).logits, parent.model(ids).logits)


def test_the_masks_embedding_is_trained_and_kept_with_the_adapter(world: Path, converted: Path) -> None:
    stored = load_file(converted / WEIGHTS)
    embedding = stored.pop("base_model.model.mask_embedding")
    mean = tad.load(world / "parent").model.embedding().weight.mean(0)
    assert not torch.equal(embedding, mean)
    assert all("lora_" in name for name in stored)


def test_the_result_and_its_log_say_what_was_done(converted: Path) -> None:
    said = json.loads((converted / FILE).read_text())
    assert said["mask_token_id"] == 261
    assert "beyond the tokenizer" in said["mask_row"]
    losses = [line["loss_near"] for line in read_log(converted / RUN, "loss_near")]
    assert len(losses) == 6
    held = [line["held_out_loss_near"] for line in read_log(converted / RUN, "held_out_loss_near")]
    assert held[-1] < held[0]
    assert not list(converted.glob(".*result*"))


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    world: Path, converted: Path, tmp_path: Path
) -> None:
    assert not convert(recipe(world), tmp_path / "run", quiet=True, stop_at=3).finished
    with pytest.raises(TadError, match="missing"):
        tad.load(tmp_path / "run")
    assert convert(recipe(world), tmp_path / "run", resume=True, quiet=True).finished
    assert same_weights(converted, tmp_path / "run", WEIGHTS)


def test_micro_batches_do_not_change_the_loss(world: Path, converted: Path, tmp_path: Path) -> None:
    values = {"adapter": {"rank": 4, "dropout": 0.0}, "learning": {"lr": 1e-2, "steps": 1}, "held_out": 0}
    losses = []
    for micro in (1, 4):
        out = tmp_path / str(micro)
        convert(recipe(world, batch={"size": 4, "micro": micro}, **values), out, quiet=True)
        losses.append(read_log(out / RUN, "loss_near")[0]["loss_near"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_trained_whole_it_is_an_autoregressive_checkpoint_for_others(world: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "all"
    convert(recipe(world, how="all", learning={"lr": 1e-3, "steps": 3}), out, quiet=True)
    assert read_log(out / RUN, "loss_next")
    lm = tad.load(out)
    layout = lm.model.shape.blocks
    assert layout is not None
    assert layout.drafts
    assert lm.conversion is None
    assert lm.tokens.mask == 261
    other = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(0, 250, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (other(ids).logits - lm.model(ids).logits).abs().max() < 1e-4
    with pytest.raises(TadError, match="already holds a model"):
        convert(recipe(world), out, quiet=True)
    with pytest.raises(TadError, match="is converted already"):
        convert(recipe(world, model=str(out)), tmp_path / "again", quiet=True)


def test_with_a_window_what_is_far_learns_the_models_own_distribution(world: Path, tmp_path: Path) -> None:
    section = {"name": "causal-blocks", "window": 3, "least": 1.0}
    convert(recipe(world, objective=section, learning={"steps": 1}), tmp_path / "run", quiet=True)
    line = read_log(tmp_path / "run" / RUN, "loss_distant")[0]
    assert line["distant_tokens"] > 0
    assert line["loss_distant"] > 0


def test_a_time_budget_becomes_a_number_of_steps_that_a_resumed_run_keeps(
    world: Path, tmp_path: Path
) -> None:
    values = recipe(world, learning={"lr": 1e-2})
    out = tmp_path / "run"
    first = convert(values, out, quiet=True, minutes=0.01, stop_at=2)
    assert first.step == 2
    second = convert(values, out, resume=True, quiet=True, minutes=0.01)
    assert second.finished
    assert second.steps == first.steps


def test_several_processes_do_not_each_plan_their_own_steps(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TadError, match="give --steps"):
        convert(recipe(world), tmp_path / "run", minutes=1.0)


def test_the_plan_counts_rows_and_says_which_token_is_the_mask(world: Path) -> None:
    found = plan(recipe(world))
    assert (found.rows, found.held_out, found.steps) == (11, 1, 6)
    assert found.positions_per_second > 0
    assert "token 261" in found.describe()


def test_chats_weights_limits_and_compressed_files_are_read(world: Path, tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"answer {n}"}]}
        for n in range(6)
    ]
    packed = tmp_path / "chats.jsonl.gz"
    with gzip.open(packed, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in chats))
    rows = str(world / "rows.jsonl")
    data = [{"source": str(packed), "weight": 2}, {"source": rows, "limit": 3}]
    found = plan(recipe(world, data=data, held_out=0))
    assert found.rows == 9
    everything = plan(recipe(world, data=[{"source": rows, "weight": 0.5}], held_out=0, longest=1000))
    assert everything.rows == 12  # before the weight
    assert plan(recipe(world, longest=59, held_out=0)).too_long == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "rows.jsonl:2: is not valid JSON"),
        ('{"question": "a?"}', "field 'answer' is missing"),
        ('{"answer": "a"}', "field 'question' is missing"),
        ('{"question": 3, "answer": "a"}', "field 'question' should be a string"),
        ('{"question": "a?", "answer": ["a"]}', "field 'answer' should be a text"),
        ('{"question": "a?", "answer": " "}', "the answer is empty"),
        ('{"messages": []}', "should be a list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "should end with a message of the assistant"),
        ('{"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}', "role should be one of"),
        ("[1]", "should be a JSON object"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(line: str, said: str, world: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(TadError, match=said) as error:
        plan(recipe(world, data=[{"source": str(rows)}]))
    assert "rows.jsonl:2" in str(error.value)


def _no_template(parent: Path) -> None:
    edit(parent / "tokenizer_config.json", chat_template=None)


def _no_tokenizer(parent: Path) -> None:
    (parent / "tokenizer.json").unlink()
    (parent / "tokenizer_config.json").unlink()


def _cut(parent: Path) -> None:
    weights = parent / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def _foreign_tokenizer(parent: Path) -> None:
    values = json.loads((parent / "tokenizer.json").read_text())
    values["model"]["vocab"]["zz"] = 900
    (parent / "tokenizer.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("damage", "changes", "said"),
    [
        (_no_template, {}, "no chat template"),
        (_no_tokenizer, {}, "has no tokenizer"),
        (_cut, {}, "truncated"),
        (_foreign_tokenizer, {}, "belongs to another model"),
        (None, {"mask": 257}, "begins or ends texts"),
        (None, {"mask": 9999}, "rows 0 to 263"),
        (None, {"data": [{"source": "missing.jsonl"}]}, "no such file"),
        (None, {"data": [{"source": "gsm9k"}]}, "did you mean 'gsm8k'"),
        (None, {"longest": 5}, "are longer than 5 tokens"),
        (None, {"objective": {"name": "causal-blocks", "next_token": 0.5}}, "the parent is frozen"),
        (None, {"objective": {"name": "causal-blocks", "least": 0}}, "objective.least"),
        (None, {"model": "nano-llada"}, "is a diffusion model already"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    damage: Any, changes: dict[str, Any], said: str, world: Path, tmp_path: Path
) -> None:
    parent = write_autoregressive(tmp_path / "parent")
    if damage is not None:
        damage(parent)
    with pytest.raises(TadError, match=said) as error:
        plan(recipe(world, **{"model": str(parent), **changes}))
    assert "\n" not in str(error.value)


def test_a_converted_model_is_not_converted_again(world: Path, converted: Path) -> None:
    with pytest.raises(TadError, match="is converted already"):
        plan(recipe(world, model=str(converted)))


def test_without_a_free_token_the_mask_has_no_place(world: Path, tmp_path: Path) -> None:
    parent = write_autoregressive(tmp_path / "parent", vocab_size=261)
    values = json.loads((parent / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["special"] = token["content"] in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    (parent / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(TadError, match="no free token for the mask"):
        plan(recipe(world, model=str(parent)))


# The command


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["convert", *words])


def test_the_command_converts_and_says_what_to_try(world: Path, tmp_path: Path) -> None:
    words = (str(world / "parent"), "--data", str(world / "rows.jsonl"), "--quiet")
    small = ("batch.size=4", "batch.micro=4", "adapter.rank=4", "report_to=[]")
    listed = run(*words, *small, "--list", "--steps", "2")
    assert listed.exit_code == 0
    assert "positions/s" in listed.output
    done = run(*words, *small, "--steps", "2", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0
    assert "tad generate" in done.output
    assert tad.load(tmp_path / "out").conversion is not None
    assert run(*words, "--steps", "2").exit_code != 0  # no --out


def test_the_bundled_recipes_are_valid() -> None:
    for name, how in (("convert-adapter", "adapter"), ("convert-all", "all")):
        found = load_recipe(ConvertRecipe, name)
        assert (found.name, found.how) == (name, how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted_or_killed_goes_on_to_the_same_weights(
    kind: signal.Signals, world: Path, converted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    values = tmp_path / "recipe.yaml"
    values.write_text(json.dumps(recipe(world).model_dump(mode="json", exclude_unset=True)))
    words = [
        sys.executable,
        "-m",
        "tad",
        "convert",
        str(world / "parent"),
        "--recipe",
        str(values),
        "--out",
        str(out),
    ]
    process = subprocess.Popen([*words, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while not list(out.glob(f"{RUN}/checkpoint-2")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(kind)
    said = process.communicate()[0].decode()
    if kind == signal.SIGINT and not (out / FILE).exists():
        assert process.returncode == 130
        assert "--resume" in said
    if not (out / FILE).exists():
        assert subprocess.run([*words, "--quiet", "--resume"], check=False).returncode == 0
    assert same_weights(converted, out, WEIGHTS)


def test_bad_input_leaves_nothing_behind(world: Path, tmp_path: Path) -> None:
    with pytest.raises(TadError, match="no such file"):
        convert(recipe(world, data=[{"source": "missing.jsonl"}]), tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    "TAD_GGUF" not in os.environ, reason="needs TAD_GGUF, the path of a GGUF file such as SmolLM2-135M's"
)
def test_a_real_model_from_a_gguf_file_is_converted_and_nothing_is_lost(world: Path, tmp_path: Path) -> None:
    parent = os.environ["TAD_GGUF"]
    values = recipe(
        world, model=parent, learning={"lr": 1e-3, "steps": 20}, adapter={"rank": 8}, precision="bf16"
    )
    assert convert(values, tmp_path / "out", quiet=True).finished
    losses = [line["loss_near"] for line in read_log(tmp_path / "out" / RUN, "loss_near")]
    assert losses[-1] < losses[0]
    lm, before = tad.load(tmp_path / "out", dtype="fp32"), tad.load(parent, dtype="fp32")
    questions = ["What is 3 plus 4?", "Name a colour."]
    wanted = tad.generate(before, questions, gen_length=16)
    drafted = tad.generate(lm, questions, decoder="verified", gen_length=16)
    assert [answer.text for answer in drafted] == [answer.text for answer in wanted]


@pytest.mark.parametrize("how", ["adapter", "all"])
def test_a_gguf_file_is_converted_like_any_checkpoint(
    how: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from tests.models.test_gguf import write_gguf

    monkeypatch.setenv("TAD_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf", "qwen2")
    parent = str(tmp_path / "model.gguf")
    convert(
        recipe(world, model=parent, how=how, learning={"lr": 1e-3, "steps": 1}), tmp_path / "out", quiet=True
    )
    lm = tad.load(tmp_path / "out")
    layout = lm.model.shape.blocks
    assert layout is not None
    assert layout.drafts
    assert lm.encode("hello") == tad.load(parent).encode("hello")
    if how == "adapter":
        assert lm.conversion is not None
        assert lm.conversion.parent == parent
        ids = torch.arange(30)[None]
        assert torch.equal(lm.model(ids).logits, tad.load(parent).model(ids).logits)
