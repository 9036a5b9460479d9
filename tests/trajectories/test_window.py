"""The decay curve and the two windows: hand-made curves, a hand-counted measurement, and the commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tad.cli import app
from tad.errors import TadError
from tad.models import LM
from tad.trajectories.partition import state
from tad.trajectories.rollout import RolloutConfig, roll_out
from tad.trajectories.store import Trajectory
from tad.trajectories.window import choose_windows, find_crossing, measure_decay
from tad.trajectories.window_report import Decay, Window, WindowReport, read_report, read_window, write_report
from tiny_trajectory import make_trajectory

LENGTH = 16


def trajectories(lm: LM, plain: list[list[int]]) -> list[Trajectory]:
    rollouts = roll_out(lm, plain, plain, LENGTH, RolloutConfig(block=8))
    return [
        make_trajectory(
            f"t{i}", plain_ids=plain[i], tokens=row.tokens, reveal=row.reveal, n_real=row.n_real,
            teacher_confidence=row.teacher,
        )
        for i, row in enumerate(rollouts)
    ]  # fmt: skip


def test_measured_decay_is_the_mean_of_single_forwards(lm: LM, plain: list[list[int]]) -> None:
    rows = trajectories(lm, plain)
    ended = [*rows[0].tokens]
    ended[3] = ended[-1] = lm.tokens.eos  # filler that is revealed before the row has ended
    rows[0] = replace(rows[0], tokens=ended)
    decay, filled, _ = measure_decay(lm, rows, states=LENGTH, distances=LENGTH, batch_size=3)
    sums: dict[tuple[int, bool], list[float]] = {}
    for row in rows:
        for step in range(row.n_real):  # as many parts as steps: every state is visited
            canvas = state(torch.tensor(row.tokens), torch.tensor(row.reveal), step, lm.tokens.mask)
            with torch.inference_mode():
                logits = lm.model(torch.tensor([[*row.plain_ids, *canvas.tolist()]])).logits[0].float()
            first = len(row.plain_ids) - lm.family.logit_shift
            p = logits[first : first + LENGTH].softmax(-1)
            for position, reveal in enumerate(row.reveal):
                if reveal > step:
                    own = p[position, row.tokens[position]].item()
                    sums.setdefault((reveal - step, True), []).append(own)
                    if not set(row.tokens[:position]) & set(lm.tokens.ends):
                        sums.setdefault((reveal - step, False), []).append(own)
    for curve, with_filler in ((decay, False), (filled, True)):
        for d, (mean, count) in enumerate(zip(curve.mean, curve.count, strict=True), 1):
            assert count == len(sums[d, with_filler])
            assert mean == pytest.approx(np.mean(sums[d, with_filler]), abs=1e-5)


@pytest.mark.parametrize(
    ("curve", "level", "crossing"),
    [
        ([0.9, 0.7, 0.5, 0.3], 0.5, 3.0),
        ([0.9, 0.6, 0.4], 0.5, 2.5),
        ([0.4, 0.3], 0.5, 0.0),
        ([0.9, 0.8], 0.5, math.nan),
        ([], 0.5, math.nan),
    ],
)
def test_crossing_lies_between_whole_distances(curve: list[float], level: float, crossing: float) -> None:
    found = find_crossing(curve, level)
    assert found == pytest.approx(crossing) or (math.isnan(found) and math.isnan(crossing))


def test_windows_are_the_nearest_whole_distances() -> None:
    # The curve of a 26M model measured once: it should give 6 and 14.
    at = {1: 0.89, 2: 0.79, 4: 0.60, 8: 0.36, 12: 0.23, 16: 0.18, 20: 0.14}
    mean = np.interp(range(1, 21), list(at), list(at.values()))
    sums = np.stack([np.stack([mean * 10, np.full(20, 10.0)], axis=1)] * 5)
    curve = Decay(mean.tolist(), mean.tolist(), mean.tolist(), [50] * 20, 5, 40, False)
    windows = choose_windows(curve, sums)
    assert windows["quality"].window == 6
    assert windows["speed"].window == 14
    assert windows["quality"].low == pytest.approx(windows["quality"].high)


def test_recipes_read_numbers_and_measured_windows(tmp_path: Path) -> None:
    assert read_window(tmp_path, 12) == 12
    with pytest.raises(TadError, match="tad window"):
        read_window(tmp_path, "quality")
    decay = Decay([0.9, math.nan], [0.9] * 2, [0.9] * 2, [1, 0], 1, 1, False)
    report = WindowReport("teacher", "m", decay, decay, {"quality": Window(0.5, 7.6, 8, math.nan, 9.0)})
    write_report(report, tmp_path)
    assert str(read_report(tmp_path)) == str(report)  # nan is not equal to itself
    assert read_window(tmp_path, "quality") == 8
    with pytest.raises(TadError, match="'fast'"):
        read_window(tmp_path, "fast")
    (tmp_path / "window.json").write_text('{"windows": {}}')
    with pytest.raises(TadError, match=r"window\.json"):
        read_window(tmp_path, "quality")


def test_commands_collect_show_export_and_measure(tmp_path: Path) -> None:
    from tad.models import load
    from tad.trajectories.store import TrajectoryStore
    from tiny_lm import write_checkpoint

    model = write_checkpoint(tmp_path / "model")
    questions = tmp_path / "q.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": "q" * n, "answer": str(n)}) + "\n" for n in (3, 5, 8))
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model": str(model),
                "tasks": [{"name": "jsonl", "options": {"path": str(questions)}}],
                "gen_length": 16,
                "block": 8,
                "device": "cpu",
            }
        )
    )
    out = tmp_path / "store"
    run = CliRunner().invoke
    made = run(app, ["collect", str(recipe), "keep=all", "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert "3 trajectories of 3 rollouts" in made.output
    summary = json.loads(run(app, ["trajectories", str(out), "--json"]).output)
    assert summary["kept"] == 3
    shown = run(app, ["trajectories", str(out), "--show", "0", "--model", str(model)])
    assert shown.exit_code == 0, shown.output
    assert "steps, then end filler" in shown.output
    missing = run(app, ["trajectories", str(out), "--show", "nobody"])
    assert isinstance(missing.exception, TadError)
    assert "ids look like" in str(missing.exception)
    measured = run(app, ["window", str(out), "--model", str(model), "--device", "cpu"])
    assert measured.exit_code == 0, measured.output
    for name in ("window.json", "window.png", "window.svg"):
        assert (out / name).stat().st_size > 100
    better, measure = (out / "window.json").read_text(), ["window", str(out), "--model", str(model)]
    fewer = run(app, [*measure, "--limit", "2"])
    assert isinstance(fewer.exception, TadError)
    assert "--overwrite" in str(fewer.exception)
    assert (out / "window.json").read_text() == better
    replaced = run(app, [*measure, "--limit", "2", "--overwrite", "--device", "cpu", "--json"])
    assert json.loads(replaced.stdout)["decay"]["trajectories"] == 2
    exported = tmp_path / "released.jsonl"
    assert (
        run(app, ["trajectories", str(out), "--export", str(exported), "--model", str(model)]).exit_code == 0
    )
    lm = load(model, device="cpu")
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    for row, line in zip(TrajectoryStore.open(out).rows(), lines, strict=True):
        assert lm.encode_text(line["prompt"], allow_special=True) == row.plain_ids
        assert len(line["trajectory"]) == 17
        for step in range(17):
            want = [
                token if at <= step else lm.tokens.mask
                for token, at in zip(row.tokens, row.reveal, strict=True)
            ]
            assert line["trajectory"][f"step{step}"] == want
    assert [line["groundtruth"] for line in lines] == ["3", "5", "8"]
    back = run(
        app, ["trajectories", str(tmp_path / "back"), "--import", str(exported), "--model", str(model)]
    )
    assert back.exit_code == 0, back.output
    for row, again in zip(
        TrajectoryStore.open(out).rows(), TrajectoryStore.open(tmp_path / "back").rows(), strict=True
    ):
        assert (again.plain_ids, again.tokens, again.reveal) == (row.plain_ids, row.tokens, row.reveal)
        reference = lm.family.reference_turn({3: "3", 5: "5", 8: "8"}[lm.decode(row.plain_ids).count("q")])
        assert again.privileged_ids == lm.encode(
            [reference, {"role": "user", "content": "q" * int(reference["content"][-1])}]
        )
    other = write_checkpoint(tmp_path / "other", scale=3.0)
    wrong = run(app, ["window", str(out), "--model", str(other), "--device", "cpu"])
    assert isinstance(wrong.exception, TadError)
    assert f"another model than {other}" in str(wrong.exception)
    again = run(app, ["collect", str(recipe), "keep=correct", "--out", str(out)])
    assert isinstance(again.exception, TadError)
    assert "recipe.keep is 'all' there and 'correct' here" in str(again.exception)


def test_an_imported_answer_is_over_when_its_last_token_is_revealed(tmp_path: Path) -> None:
    from tad.models import load
    from tad.trajectories.jsonl_format import import_rows
    from tiny_lm import write_checkpoint

    lm = load(write_checkpoint(tmp_path / "model"), device="cpu")
    mask, end = lm.tokens.mask, lm.tokens.ends[0]
    tokens, reveal = [10, end, end, end], [4, 1, 2, 3]  # the answer is revealed last
    states = {
        f"step{s}": [t if at <= s else mask for t, at in zip(tokens, reveal, strict=True)] for s in range(5)
    }
    prompt = lm.decode(lm.encode([{"role": "user", "content": "q"}]), skip_special=False)
    whole = {"prompt": prompt, "groundtruth": "", "trajectory": states}
    file = tmp_path / "published.jsonl"
    file.write_text(json.dumps(whole))
    (row,) = import_rows(lm, file, tmp_path / "store").rows()
    assert (row.reveal, row.n_real) == (reveal, 4)
    for bad in (
        "{",
        json.dumps({"prompt": prompt, "trajectory": states}),
        json.dumps({**whole, "trajectory": {"step1": tokens}}),
        json.dumps({**whole, "trajectory": {**states, "step2": tokens[:2]}}),
        json.dumps({**whole, "trajectory": {**states, "step4": [10, mask, end, end]}}),
    ):
        file.write_text(f"{json.dumps(whole)}\n{bad}\n{json.dumps(whole)}")
        with pytest.raises(TadError, match=r"published\.jsonl:2"):
            import_rows(lm, file, tmp_path / "other")
