"""The bench of decoding at toy size: its pace, its staged steps, and that one row's failure costs no other row."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import decode as bench_decode
import decode_timing
import engine_load
import machine
import serve_load
from decode_timing import Bench
from tad.decoding import Decoded, Decoder, decode
from tad.decoding.scheduler import ENGINE_VARIABLE
from tad.decoding.state import RowFacts

CPU = torch.device("cpu")


@pytest.fixture(params=["llada-8b", "dream-7b"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with machine.ASSUMED_TPF.at(CPU, bench_decode.TPF):
        yield Bench(CPU, Namespace(tiny=True, shape=request.param, repeats=1))


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(
        sys, "argv", ["decode.py", "--tiny", "--repeats", "1", "--out", str(tmp_path), *arguments]
    )
    assert bench_decode.main() == 0
    return json.loads((tmp_path / "decode.json").read_text())["rows"], (tmp_path / "decode.md").read_text()


def test_the_assumed_tpf_decides_how_many_tokens_a_forward_reveals(bench: Bench) -> None:
    for rate, forwards in ((8.0, 8), (4.0, 16)):
        machine.ASSUMED_TPF.rate.fill_(rate)
        for decoder in ("tad", "tad-cached"):
            ways = [
                decode(bench.lm, bench.prompts(2), bench.decoder(decoder), 64, engine=one)
                for one in ("plain", bench.engine)
            ]
            assert [row.forwards for way in ways for row in way] == [forwards] * 4
            assert [row.steps for row in ways[0]] == [row.steps for row in ways[1]]


def test_methods_take_turns_each_at_its_own_tpf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forwards = {
        "one-by-one:0.74": 64,  # no forward reveals less than one token
        "fast-dllm:3.89": 17,
        "fast-dllm-dual:3.8": 17,
        "dparallel:6.96": 10,
        "d2f:5.01": 13,
        "d3llm:12.25": 6,
        "tad-cached:8.8": 8,
        "d2f,rule=entropy,block=16,block_add=1.0:10.86": 6,
        "fast-dllm,rule=credit:4": 16,
    }
    order: list[str] = []

    def note(lm: Any, prompts: Any, decoder: Decoder, *rest: Any, **options: Any) -> list[Decoded]:
        order.append(decoder.name)
        return decode(lm, prompts, decoder, *rest, **options)

    monkeypatch.setattr(decode_timing, "decode", note)
    wanted = ["--only", "methods", "--repeats", "2", "--assume", *forwards]
    rows, table = run(tmp_path, monkeypatch, *wanted)
    rows["methods"].pop("seconds")
    found = dict(zip(forwards, rows["methods"].values(), strict=True))
    assert {text: 64 / row["tpf_reached"] for text, row in found.items()} == forwards
    names = [text.split(",")[0].split(":")[0] for text in forwards]
    twice = [name for name in names for _ in range(2)]
    assert order == twice + names + names  # warmed up, then timed
    engines = {text: row["engine"] for text, row in found.items()}
    assert [text for text in engines if engines[text] == "plain"] == ["fast-dllm,rule=credit:4"]
    base, fast = found["one-by-one:0.74"], found["fast-dllm:3.89"]
    assert base["tokens_per_s"] == pytest.approx(0.74 * base["forwards_per_s"])
    assert fast["times_first"] == pytest.approx(fast["tokens_per_s"] / base["tokens_per_s"])
    # the prompt and all of the canvas at the opening of each of two blocks, else the block of 32
    assert found["fast-dllm-dual:3.8"]["computed_per_forward"] == (2 * 96 + 15 * 32) / 17
    assert (
        "| methods: d2f,rule=entropy,block=16,block_add=1.0 at 10.86 | engine graph, ms_per_forward" in table
    )
    for wrong in ("tad", "nosuch:3", "tad,nosuch=1:3"):
        with pytest.raises(SystemExit):
            run(tmp_path, monkeypatch, "--assume", wrong)
        assert f"--assume: {wrong}: " in capsys.readouterr().err


def test_a_row_that_fails_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Bench) -> dict[str, Any]:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(bench_decode.ROWS, "step", fail)
    rows, table = run(tmp_path, monkeypatch, "--only", "cached,exact,step")
    assert list(rows) == ["exact", "step", "cached"]
    assert rows["step"]["error"] == "RuntimeError: out of luck"
    assert rows["exact"]["ms_per_forward"] > 0
    assert rows["cached"]["tad-cached"]["computed_per_forward"] < rows["exact"]["computed_per_forward"]
    assert "at assumed TPF 8.5" in table
    assert "| step | error RuntimeError: out of luck" in table
    assert capsys.readouterr().out.endswith(table)


def test_no_row_is_begun_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = run(tmp_path, monkeypatch, "--minutes", "0")
    assert list(rows) == list(bench_decode.ROWS)
    assert {row["error"] for row in rows.values()} == {"not begun: out of time"}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b", "fast-dllm-v2-7b", "sdar-8b"])
def test_a_staged_step_computes_what_it_says_and_can_be_repeated(shape: str, count: int) -> None:
    with machine.ASSUMED_TPF.at(CPU, bench_decode.TPF), torch.inference_mode():
        bench = Bench(CPU, Namespace(tiny=True, shape=shape, repeats=1))
        staged = bench.stage(bench.engine, count, 16)
        staged.reset()
        for _ in range(12):  # more than are timed without starting anew
            facts = [RowFacts(*row) for row in staged.forward.state.facts[:count].tolist()]
            assert [(fact.alive, fact.queries) for fact in facts] == [(1, 16)] * count
            staged.run()


def test_the_serving_engine_is_measured_without_http(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_VARIABLE, "auto")  # the bench sets it
    words = "--shape dream-7b --tiny --decoders tad-cached,block=16 --seconds 0.3 --queue 1 --together 3 --batches 4 1 --rates 1000 2000"
    rows = engine_load.run(serve_load.parse([*words.split(), "--out", str(tmp_path)]))["rows"]
    # the higher rate is not tried on a server that refuses at the lower one
    assert [(row["server"].split(", ")[-1], row["load"]) for row in rows] == [
        ("3 rows at once", "3 clients"),
        ("4 rows at once", "1000 per s"),
        ("1 rows at once", "1000 per s"),
    ]
    clients, many, alone = rows
    assert 0 < clients["first block p50 s"] <= clients["latency p50 s"] <= clients["latency p99 s"]
    assert (clients["refused"], clients["cut off"]) == (0, 0)
    assert clients["rows/forward"] > 1.5
    assert alone["rows/forward"] <= 1.1  # a forward may end between the two clocks that are read
    for row in (many, alone):
        assert row["answered"] + row["cut off"] + row["refused"] == 300
        assert row["refused"] > 0
    assert json.loads((tmp_path / "serve_load.json").read_text())["rows"] == rows
    assert (
        "goodput of tad-cached,block=16, auto forward, 4 rows at once: "
        in capsys.readouterr().out.splitlines()[-2]
    )


@pytest.mark.parametrize("shape", ["fast-dllm-v2-7b", "sdar-8b"])
def test_block_diffusion_shapes_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    rows, table = run(tmp_path, monkeypatch, "--shape", shape, "--layers", "1")
    assert list(rows) == list(bench_decode.BLOCK_ROWS)
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
    fed = [row["rows 1"]["computed_per_forward"] for name, row in rows.items() if name != "block-step"]
    assert max(fed) < 40  # of 96: the current block, and the prompt once
    assert "| block-32: rows 1 | ms_per_forward " in table


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b"])
def test_every_row_runs_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    rows, _ = run(tmp_path, monkeypatch, "--shape", shape)
    assert list(rows) == list(bench_decode.ROWS)
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
