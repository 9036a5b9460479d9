"""Rows that begin alike share the keys of what they have in common: the same tokens, less computed."""

from __future__ import annotations

from typing import Any

import pytest
from parity_models import tiny, tiny_prompts

from tad.decoding import Decoded, GraphEngine, Request, Scheduler, Step, decode, get_decoder
from tad.models import LM

LENGTH = 32
CASES = pytest.mark.parametrize(
    ("family", "decoder", "settings"),
    [
        ("sdar", "sdar", {"block": 8}),
        ("sdar", "llada2", {"block": 8}),
        ("sdar", "llada2.1", {"block": 8, "threshold": 0.5, "edit_threshold": 0.3}),
        ("fastdllm_v2", "fast-dllm-v2", {"block": 16, "cache": "sub-block"}),
    ],
)


class Recorder:
    """Serves requests of one decoder, and knows how many positions each forward of a row computed."""

    def __init__(self, lm: LM, engine: Any, decoder: str, settings: dict[str, Any]) -> None:
        self.lm, self.queries = lm, dict[tuple[int, int], int]()
        self.decoder = get_decoder(decoder, lm.family.name, **settings).bind(lm, LENGTH)
        self.scheduler = Scheduler(lm, engine, self.record)
        self.done: dict[int, Decoded] = {}

    def record(self, step: Step) -> None:
        self.queries[step.row, step.forward] = step.queries

    def admit(self, name: int, prompt: list[int]) -> None:
        self.scheduler.admit([Request(name, prompt, LENGTH, self.decoder)])

    def step(self, count: int = 10_000) -> None:
        while len(self.scheduler) and count:
            self.done |= self.scheduler.step()
            count -= 1

    def assert_as_alone(self, name: int, prompt: list[int]) -> None:
        (alone,) = decode(self.lm, [prompt], self.decoder, LENGTH, engine="plain")
        found = self.done[name]
        assert (found.tokens, found.steps, found.forwards) == (alone.tokens, alone.steps, alone.forwards)


@CASES
def test_rows_that_join_take_over_what_others_have_computed(
    family: str, decoder: str, settings: dict[str, Any]
) -> None:
    lm, texts, block = tiny(family), tiny_prompts(family), settings["block"]
    common = (texts[3] * 4)[:90]
    prompts = [common + texts[0], common + texts[1], texts[2], common[:80] + texts[1], common[1:] + texts[0]]
    for engine in ("plain", GraphEngine(lm.model)):
        served = Recorder(lm, engine, decoder, settings)
        for name, prompt in enumerate(prompts):  # the first one is on its way when the others come
            served.admit(name, prompt)
            served.step(3)
        served.step()
        for name, prompt in enumerate(prompts):
            served.assert_as_alone(name, prompt)
        first = [served.queries[name, 1] for name in range(5)]
        assert first[1] <= len(prompts[1]) - 90 // block * block + block
        assert first[3] <= len(prompts[3]) - 80 // block * block + block
        assert first[0] > 80
        assert first[4] > 80  # the same tokens at other positions


@CASES
def test_the_next_turn_of_a_chat_begins_where_the_last_one_ended(
    family: str, decoder: str, settings: dict[str, Any]
) -> None:
    lm, text, block = tiny(family), tiny_prompts(family)[3], settings["block"]
    served = Recorder(lm, GraphEngine(lm.model), decoder, {**settings, "stop": "off"})
    prompt = (text * 4)[:70]
    served.admit(0, prompt)
    served.step()
    longer = prompt + served.done[0].tokens + text[:12]
    served.admit(1, longer)
    served.step()
    served.assert_as_alone(1, longer)
    known = len(prompt) + LENGTH - 2 * block  # all but the last blocks of the answer
    assert served.queries[1, 1] <= len(longer) - known + block
    other = Recorder(lm, served.scheduler.engine, decoder, settings)
    other.admit(0, prompt)
    other.step()
    assert other.queries[0, 1] > 60  # nothing is taken over from another scheduler


def test_attention_that_sees_what_follows_shares_nothing() -> None:
    lm, text = tiny("llada"), tiny_prompts("llada")[3]
    served = Recorder(lm, "plain", "d2f", {"block": 8})
    for name in range(2):
        served.admit(name, (text * 4)[: 80 + name])
        served.step(3)
    served.step()
    assert served.queries[1, 1] > 80
