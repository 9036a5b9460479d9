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

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import decode as bench_decode
import decode_bench
import decode_tokens
from tad.decoding import decode

CPU = torch.device("cpu")


@pytest.fixture(params=["llada-8b", "dream-7b"])
def bench(request: pytest.FixtureRequest) -> Iterator[decode_bench.Bench]:
    with decode_bench.PACE.at(CPU):
        yield decode_bench.Bench(CPU, Namespace(tiny=True, shape=request.param, engine_options="", repeats=1))


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(
        sys, "argv", ["decode.py", "--tiny", "--repeats", "1", "--out", str(tmp_path), *arguments]
    )
    assert bench_decode.main() == 0
    return json.loads((tmp_path / "decode.json").read_text())["rows"], (tmp_path / "decode.md").read_text()


def test_the_pace_decides_how_many_tokens_a_forward_reveals(bench: decode_bench.Bench) -> None:
    for rate, forwards in ((8.0, 8), (4.0, 16)):
        decode_bench.PACE.rate.fill_(rate)
        for decoder in ("tad", "tad-cached"):
            ways = [
                decode(bench.lm, bench.prompts(2), bench.decoder(decoder), 64, engine=one)
                for one in ("plain", bench.engine)
            ]
            assert [row.forwards for way in ways for row in way] == [forwards] * 4
            assert [row.steps for row in ways[0]] == [row.steps for row in ways[1]]


def test_a_row_that_fails_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: decode_bench.Bench) -> dict[str, Any]:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(decode_bench.ROWS, "step", fail)
    rows, table = run(tmp_path, monkeypatch, "--only", "cached,exact,step")
    assert list(rows) == ["exact", "step", "cached"]
    assert rows["step"]["error"] == "RuntimeError: out of luck"
    assert rows["exact"]["ms_per_forward"] > 0
    assert rows["cached"]["ways"]["tad-cached"]["fed_per_forward"] < rows["exact"]["fed_per_forward"]
    assert "at assumed TPF 8.5" in table
    assert "step: RuntimeError: out of luck" in table
    assert capsys.readouterr().out.endswith(table)


def test_no_row_is_begun_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = run(tmp_path, monkeypatch, "--minutes", "0", "--skip", "step")
    assert list(rows) == [name for name in bench_decode.ORDER if name != "step"]
    assert {row["error"] for row in rows.values()} == {"not begun: out of time"}


@pytest.mark.parametrize("count", [1, 3])
def test_a_staged_step_feeds_what_it_says_and_can_be_repeated(bench: decode_bench.Bench, count: int) -> None:
    with torch.inference_mode():
        stepper, _, _, shape = bench.stage(bench.engine, count, 16)
        for _ in range(12):  # more than are timed without starting anew
            assert stepper.slots.facts[:, :2].tolist() == [[1, 16]] * count
            stepper.step(shape, False)


def test_the_engine_and_the_model_predict_the_same_on_a_canvas(bench: decode_bench.Bench) -> None:
    for canvas in bench.canvases(2):
        at, found = decode_tokens.predict(bench.engine, bench.lm, canvas)
        with torch.inference_mode():
            torch.testing.assert_close(found, bench.lm.model(canvas, logits_at=at).logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b"])
def test_every_row_runs_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    rows, _ = run(tmp_path, monkeypatch, "--shape", shape)
    assert list(rows) == list(bench_decode.ORDER)
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
