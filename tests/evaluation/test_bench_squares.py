"""The task without a left-to-right order: its questions have one answer, and decoding does what it says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import torch

import squares


def test_there_are_161280_squares_and_every_row_and_column_has_every_symbol() -> None:
    every = squares.all_squares().reshape(-1, 5, 5)
    numbers = every.reshape(-1, 25).astype(np.int64) @ 6 ** np.arange(24, -1, -1)
    assert len(np.unique(numbers)) == len(every) == 161_280
    wanted = np.arange(1, 6)
    for axis in (1, 2):
        assert (np.sort(every[::37], axis=axis) == (wanted[:, None] if axis == 1 else wanted)).all()


def test_a_question_has_one_completion_and_no_test_square_is_in_training() -> None:
    train, test = (squares.draw_many(40, 3, 15, test=side) for side in (False, True))
    for questions, answers in (train, test):
        assert ((questions == 0).sum(1) == 15).all()
        assert torch.equal(torch.where(questions == 0, answers, questions), answers)
        for question in questions[:5].numpy():
            fits = (squares.all_squares() == question) | (question == 0)
            assert fits.all(1).sum() == 1
    assert not {tuple(row) for row in train[1].tolist()} & {tuple(row) for row in test[1].tolist()}


def test_decoding_reveals_one_by_one_all_at_once_or_from_the_left() -> None:
    model = squares.build(squares.TINY, 0).eval()
    prompt = squares.prompts(squares.draw_many(4, 1, 10)[0])
    _, reveal, forwards = squares.decode(model, prompt, None, "leftmost")
    assert torch.equal(reveal, torch.arange(1, 26).expand(4, 25))
    _, reveal, forwards = squares.decode(model, prompt, None, "best")
    assert torch.equal(reveal.sort(1).values, torch.arange(1, 26).expand(4, 25))
    tokens, reveal, forwards = squares.decode(model, prompt, 99.0, "best")
    assert (forwards == 1).all()
    assert ((tokens >= 1) & (tokens <= 5)).all()


def test_a_whole_small_run_writes_a_run_per_setting(tmp_path: Path) -> None:
    where = squares.main(["--out", str(tmp_path), "--tiny"])
    record = json.loads(gzip.decompress(where.read_bytes()))
    methods = {(run["method"], run["seed"]) for run in record["runs"]}
    orders = {(f"tad, {order}", 0) for order in squares.ORDERS}
    assert methods == {("base", None), ("random masks", 0)} | orders
    assert all(len(run["correct"]) == len(run["forwards"]) == squares.TINY.test for run in record["runs"])
