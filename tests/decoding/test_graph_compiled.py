"""The graph engine compiled: the tokens of the plain forward, and nothing compiled anew for another size, threshold or prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity_models import assert_same, tiny, tiny_prompts

from tad.decoding import GraphEngine, decode
from tad.models import LM


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "layers and decisions"])
def test_compiled_steps_give_the_tokens_of_the_plain_forward_and_compile_once_for_all_sizes(
    lm: LM, prompts: list[list[int]], fused: bool
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    engine = GraphEngine(lm.model, compiled=True)
    engine.fused = fused
    made = []
    for slots in (1, 3, 8):
        for gen_length, some in ((64, prompts), (64, prompts[::-1][:6])):
            plain = decode(lm, some, "tad-cached", gen_length, engine="plain")
            assert_same(decode(lm, some, "tad-cached", gen_length, batch_size=slots, engine=engine), plain)
        made.append(counters["stats"]["unique_graphs"])
    # One slot and several differ where decisions are compiled; nothing else does.
    assert made[2] == made[1]
    assert made[1] - made[0] <= (2 if fused else 0)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is compiled is traced and guarded as ever, but no code is made: that takes most of the time."""
    compiling = torch.compile

    def trace(function: Any, fullgraph: bool, dynamic: bool | None) -> Any:
        return compiling(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", trace)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SLOW = pytest.mark.slow  # tracing takes most of a minute
RULES = [
    pytest.param("llada", 3, "tad-cached", [{"threshold": value} for value in (0.5, 0.1)], id="entropy"),
    pytest.param("llada", 1, "tad-cached", [{"threshold": value} for value in (0.5, 0.1)], id="one row", marks=SLOW),
    pytest.param("llada", 3, "tad-leftmost", [{"threshold": value} for value in (0.5, 0.1)], id="leftmost", marks=SLOW),
    pytest.param("llada", 1, "fast-dllm", [{"threshold": value} for value in (0.9, 0.5)], id="confidence", marks=SLOW),
    pytest.param(
        "llada", 1, "fast-dllm", [{"rule": "factor", "factor": value} for value in (1.0, 0.7)], id="factor", marks=SLOW
    ),
    pytest.param(
        "llada", 1, "fast-dllm", [{"rule": "hierarchy", "threshold": value, "low": value / 2} for value in (0.9, 0.6)],
        id="hierarchy", marks=SLOW,
    ),
    pytest.param("sdar", 1, "sdar", [{"threshold": value} for value in (0.95, 0.5)], id="quota", marks=SLOW),
    pytest.param("sdar", 3, "sdar", [{"threshold": value} for value in (0.95, 0.5)], id="quota, rows", marks=SLOW),
    pytest.param("sdar", 1, "llada2.1", [{"edit_threshold": value} for value in (0.9, 0.3)], id="editing", marks=SLOW),
    pytest.param(
        "fastdllm_v2", 3, "fast-dllm-v2", [{"threshold": value} for value in (0.9, 0.5)], id="sub-blocks", marks=SLOW
    ),
]  # fmt: skip


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("family", "slots", "name", "settings"), RULES)
def test_what_was_compiled_for_one_threshold_and_prompt_serves_all_others(
    family: str, slots: int, name: str, settings: list[dict[str, Any]]
) -> None:
    from torch._dynamo.utils import counters

    lm, text = tiny(family), tiny_prompts(family)[0]
    engine = GraphEngine(lm.model, compiled=True)
    engine.fused = True
    made = set()
    for one in settings:
        for length in (9, 70):  # room for 64 and 96
            some = [(text * length)[row : row + length] for row in range(slots)]
            plain = decode(lm, some, name, 32, block=16, engine="plain", **one)
            assert_same(decode(lm, some, name, 32, block=16, engine=engine, **one), plain)
            made.add(counters["stats"]["unique_graphs"])
    assert len(made) == 1, f"compiled anew: {sorted(made)} graphs"
