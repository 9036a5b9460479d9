"""Many clients at once, some of which hang up: every answer that comes is the one decoded alone, and nothing breaks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from live_server import live, wait_until

import serve_load
from serve_load import answer_alone, make_questions, memory_of, parse, put_load, run
from tad.models import LM
from tad.serving import Settings


def test_load_with_hang_ups_and_a_full_queue(
    plain: LM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_load, "RETRY_AFTER", 0.1)
    questions = make_questions(12, [8, 16, 32, 40], ["tad", "tad-cached"], [0.0, 0.7])
    expected = answer_alone(str(checkpoint), "cpu", questions)
    with live(plain, Settings(name="model", batch=6, queue=4)) as server:
        outcome = asyncio.run(
            put_load(server.url, os.getpid(), questions, expected, requests=48, clients=16, hang_ups=0.2)
        )
        wait_until(lambda: server.engine.running + server.engine.waiting == 0)
        counts = server.engine.counts
    assert not outcome.errors
    assert not outcome.wrong
    assert outcome.answered + outcome.hung_up == 48
    assert outcome.hung_up > 0
    assert counts.refused >= outcome.refused > 0  # one that hung up may have been refused unheard
    assert counts.finished + counts.cancelled >= outcome.answered
    assert counts.failed == 0
    assert counts.forwards < counts.row_forwards


def test_memory_is_read_from_the_system() -> None:
    assert memory_of(os.getpid()) > 10


@pytest.mark.slow
def test_two_thousand_requests_from_sixty_four_clients(checkpoint: Path) -> None:
    result: dict[str, Any] = run(
        parse([str(checkpoint), "--device", "cpu", "--requests", "2000", "--compare", "200"]), str(checkpoint)
    )
    load, batched, single = result["rows"]
    assert result["wrong"] == []
    assert load["errors"] == batched["errors"] == single["errors"] == {}
    assert load["answered"] + load["hung up"] == 2000
    assert load["hung up"] > 100
    assert load["429 then retried"] > 0
    assert load["MiB last quarter"] < 1.05 * load["MiB 2nd quarter"] + 10
    assert batched["answers/s"] >= single["answers/s"]
