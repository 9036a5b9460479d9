"""A served autoregressive model and a converted one: the same text, kept tokens only, and the counts of drafts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from live_server import Live, live
from tests.tiny_autoregressive import write_autoregressive

import tad
from tad.models import LM


def with_common_embeddings(lm: LM) -> LM:
    """Embeddings that have much in common: a mask often predicts what the token in its place would."""
    with torch.no_grad():
        embedding = lm.model.embedding().weight
        common = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(1))
        embedding.mul_(0.5).add_(common * embedding.std() * 2)
    return lm


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> LM:
    folder = tmp_path_factory.mktemp("serving") / "parent"
    return with_common_embeddings(tad.load(write_autoregressive(folder, "llama", 2), device="cpu"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> LM:
    folder = tmp_path_factory.mktemp("serving") / "converted"
    return with_common_embeddings(tad.load(write_autoregressive(folder, "llama", 2, 6), device="cpu"))


def ask(server: Live, number: int, **fields: object) -> dict:
    answer = server.chat(f"question {number}", max_tokens=30, **fields).json()
    assert "choices" in answer, answer
    return answer


def test_a_converted_model_is_served_verified_and_says_what_its_parent_does(
    parent: LM, converted: LM
) -> None:
    with live(parent) as server:
        wanted = [ask(server, number)["choices"][0]["message"]["content"] for number in range(6)]
        assert "completion_tokens_details" not in ask(server, 0)["usage"]
    with live(converted) as server, ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda number: ask(server, number), range(6)))
        assert [one["choices"][0]["message"]["content"] for one in answers] == wanted
        assert {one["tad"]["decoder"] for one in answers} == {"verified"}
        details = [one["usage"]["completion_tokens_details"] for one in answers]
        kept, thrown = (
            sum(one[f"{name}_prediction_tokens"] for one in details) for name in ("accepted", "rejected")
        )
        assert kept > 0
        forwards = sum(one["usage"]["forwards"] for one in answers)
        assert sum(one["usage"]["completion_tokens"] for one in answers) == forwards + kept
        lines = server.client().get("/metrics").text.splitlines()
        assert f"tad_drafted_total {kept + thrown:.1f}" in lines
        assert f"tad_accepted_total {kept:.1f}" in lines


def test_a_stream_hands_out_what_was_kept(converted: LM) -> None:
    with live(converted) as server:
        whole = ask(server, 3)["choices"][0]["message"]["content"]
        events = server.events("question 3", max_tokens=30, reveals=True)
    text = "".join(
        data["choices"][0]["delta"].get("content") or ""
        for name, data in events
        if name is None and data != "[DONE]" and data["choices"]
    )
    assert text == whole
    places = [place for name, data in events if name == "reveal" for place in data["positions"]]
    assert places == list(range(len(places)))
